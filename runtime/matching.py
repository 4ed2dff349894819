"""Comparing tokens that were guessed with those that came."""

from __future__ import annotations

from collections.abc import Sequence


def matching(proposed: Sequence[int], actual: Sequence[int]) -> int:
    """Return how many tokens are equal, from the first one on."""
    count = 0
    for guess, token in zip(proposed, actual, strict=False):
        if guess != token:
            break
        count += 1
    return count
