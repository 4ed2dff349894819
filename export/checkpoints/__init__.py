"""Reads the checkpoints that others write."""
