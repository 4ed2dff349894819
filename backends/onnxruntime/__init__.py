"""ONNX Runtime: runs the exported graphs, fused for the CPU and mostly unchanged on CUDA."""
