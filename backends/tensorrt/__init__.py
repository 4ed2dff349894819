"""TensorRT and TensorRT-RTX: plans compiled from the exported graphs."""
