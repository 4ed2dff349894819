"""Rounds weights."""
