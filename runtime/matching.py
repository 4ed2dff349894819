"""Compare guessed tokens with actual ones."""

from __future__ import annotations

from collections.abc import Sequence


def matching(proposed: Sequence[int], actual: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for guess, token in zip(proposed, actual, strict=False):
        if guess != token:
            break
        count += 1
    return count
