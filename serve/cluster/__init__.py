"""Replicas in a Ray cluster."""
