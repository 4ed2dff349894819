"""Trains EAGLE-3 heads and parallel drafts on the target's own answers."""
