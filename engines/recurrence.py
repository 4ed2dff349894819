"""Which rows of a text are in the state of the recurrent layers, slot by slot; see `engines.contract`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.engines.arrays import Int64s
from outrider.errors import EngineError


class Recurrence:
    """What the recurrent layers hold of the text in each slot: its first `committed` tokens are in the state, and `kept` more
    rows lie behind them, confirmed or not."""

    def __init__(self, slots: int):
        self._committed = np.zeros(slots, dtype=np.int64)
        self._kept = np.zeros(slots, dtype=np.int64)

    def usable(self, slot: int, length: int) -> int:
        """Return after how many of the first `length` tokens of a slot's text another text can go on; 0 is its beginning."""
        return length if self._reaches(slot, length) else 0

    def _reaches(self, slot: int, position: int) -> bool:
        return 0 <= position - int(self._committed[slot]) <= int(self._kept[slot])

    def clear(self, slot: int) -> None:
        """Note that a slot is empty."""
        self.assume(slot, 0)

    def assume(self, slot: int, position: int) -> None:
        """Note that the state of a slot is that after `position` tokens, with nothing behind it."""
        self._committed[slot], self._kept[slot] = position, 0

    def copy(self, slot: int, to: int) -> None:
        """Note that a slot's content was copied to another one."""
        self._committed[to], self._kept[to] = self._committed[slot], self._kept[slot]

    def begins(self, slot: int, position: int) -> bool:
        """Return whether a pass that writes from `position` on begins another text, so that the slot has to be cleared."""
        return position == 0 and bool(self._committed[slot] or self._kept[slot])

    def advance(
        self, first: int, positions: Sequence[int] | Int64s, rows: int, certain: Sequence[int]
    ) -> tuple[Int64s, Int64s]:
        """Return `pending` and `committed` of a pass, int64 [N] each, and note what it does.

        Args:
            first: the slot of the first sequence.
            positions: where each sequence's rows begin.
            rows: of the pass.
            certain: how many of them are confirmed; 0 of a sequence that takes no part, and whose rows are never read.

        Raises:
            EngineError: the state before a position is not there; nothing was noted.
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
