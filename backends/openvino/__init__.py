"""OpenVINO: step models over a paged cache, in kernels whose cost hardly grows with the rows of a pass."""
