"""OpenVINO: step models over a paged cache, with kernels whose cost hardly grows with the rows of a pass."""
