"""Tensor names and shapes, devices, and sessions: step models with a KV cache."""
