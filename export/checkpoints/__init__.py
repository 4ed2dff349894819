"""Read checkpoints."""
