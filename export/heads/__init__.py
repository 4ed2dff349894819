"""Reads and makes draft heads."""
