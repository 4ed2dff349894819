"""What the slots of the caches hold."""
