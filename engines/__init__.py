"""What all stages agree on: tensors, the manifest, sealed folders, errors, and sessions that run an engine."""
