"""Rewrites of exported graphs that several backends use."""
