"""Tracks which rows of each slot's text are in the state of the recurrent layers; see `engines.contract`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.engines.arrays import Int64s
from outrider.errors import EngineError


class Recurrence:
    """The progress of the recurrent state in each slot: the first `committed` tokens of the text are in the state, and `kept`
    more rows follow, confirmed or not."""

    def __init__(self, slots: int):
        self._committed = np.zeros(slots, dtype=np.int64)
        self._kept = np.zeros(slots, dtype=np.int64)

    def usable(self, slot: int, length: int) -> int:
        """Return how many of the first `length` tokens of a slot's text another text can reuse: all, or 0."""
        return length if self._reaches(slot, length) else 0

    def _reaches(self, slot: int, position: int) -> bool:
        return 0 <= position - int(self._committed[slot]) <= int(self._kept[slot])

    def assume(self, slot: int, position: int) -> None:
        """Record that a slot's state is the one after `position` tokens, and that no rows follow; 0 is an empty slot."""
        self._committed[slot], self._kept[slot] = position, 0

    def copy(self, slot: int, to: int) -> None:
        """Record that a slot's content was copied to another slot."""
        self._committed[to], self._kept[to] = self._committed[slot], self._kept[slot]

    def begins(self, slot: int, position: int) -> bool:
        """Return whether a pass that writes from `position` on begins another text, so that the slot must be cleared."""
        return position == 0 and bool(self._committed[slot] or self._kept[slot])

    def advance(
        self, first: int, positions: Sequence[int] | Int64s, rows: int, certain: Sequence[int]
    ) -> tuple[Int64s, Int64s]:
        """Record a pass, and return its `pending` and `committed`, int64 [N] each.

        Args:
            first: the slot of the first sequence.
            positions: where each sequence's rows begin.
            rows: rows of the pass.
            certain: how many of the rows are confirmed; 0 for a sequence that takes no part, whose rows are never read.

        Raises:
            EngineError: the state before a position is gone; nothing was recorded.
        """
        pending, committed = np.zeros(len(certain), np.int64), np.zeros(len(certain), np.int64)
        sequences = [*enumerate(zip(positions, certain, strict=True))]
        for index, (position, confirmed) in sequences:
            if confirmed and not self._reaches(first + index, int(position)):
                raise EngineError(
                    f"the recurrent state before position {position} of slot {first + index} is gone",
                    "a failed pass has changed it; send the request again",
                )
        for index, (position, confirmed) in sequences:
            slot = first + index
            if self._reaches(slot, int(position)):
                pending[index] = position - self._committed[slot]
                committed[index] = pending[index] + confirmed
                self._committed[slot] = position + confirmed
                self._kept[slot] = rows - confirmed if confirmed else 0
            else:
                self._kept[slot] = 0
        return pending, committed
