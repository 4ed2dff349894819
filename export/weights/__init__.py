"""Round weights."""
