"""Connections, signals, and who may connect."""
