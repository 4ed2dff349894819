"""ONNX Runtime: the exported graphs, fused for the CPU, or as they are on CUDA."""
