"""The checks behind `scripts/gpu-check`."""
