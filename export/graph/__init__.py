"""Makes ONNX graphs of modules."""
