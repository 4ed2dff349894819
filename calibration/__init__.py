"""Measurements of a bundle on this machine: what passes cost, and how many drafted tokens are accepted."""
