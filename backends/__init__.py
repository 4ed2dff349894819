"""What builds and runs engines: ONNX Runtime, TensorRT-RTX and TensorRT."""
