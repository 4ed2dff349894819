"""TensorRT-RTX and TensorRT: two packages that share nearly every name, so one set of modules serves both."""
