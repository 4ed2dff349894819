"""Make ONNX graphs from PyTorch modules."""
