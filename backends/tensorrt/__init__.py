"""TensorRT-RTX and TensorRT: two packages with nearly the same names, so the same modules serve both."""
