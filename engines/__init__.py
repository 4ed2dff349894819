"""Tensor names and shapes, devices, engines bound to buffers, and sessions with a KV cache."""
