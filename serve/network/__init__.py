"""Connections, access control and signals."""
