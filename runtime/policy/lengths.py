"""How long answers are, learned from earlier ones."""

from __future__ import annotations

from collections import deque

REMEMBERED = 64  # answers
USUAL = 128  # tokens that are expected of an unknown answer
WEIGHT = 2.0  # answers that this guess counts as


class AnswerLengths:
    """Estimates how many tokens an answer still needs, by those of the same owner that were as long already."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=REMEMBERED)

    def observe(self, tokens: int) -> None:
        """Note the length of an answer that has ended."""
        self._ended.append(tokens)

    def expected(self, emitted: int, remaining: int) -> float:
        """Return the number of tokens that an answer will probably still get, at most `remaining`."""
        left = [min(length - emitted, remaining) for length in self._ended if length > emitted]
        return (sum(left) + WEIGHT * min(USUAL, remaining)) / (len(left) + WEIGHT)
