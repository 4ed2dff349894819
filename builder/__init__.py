"""ONNX step models become engines in a bundle."""
