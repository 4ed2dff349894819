"""States of recurrent layers at the ends of beginnings that other texts may have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import count

from outrider.engines.session import Session
from outrider.runtime.cache.slot import Slot


class Snapshot:
    """The state after a text, which another text can go on from where some slot has the keys and values."""

    def __init__(self, place: int):
        self.place = place
        self.owner: Hashable = None
        self.text: list[int] = []  # empty if there is none
        self.shared = False  # whether several requests had these tokens in common
        self.used = 0

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.text)

    def begins(self, slot: Slot) -> bool:
        """Return whether a slot's text begins with this one, and has the same owner."""
        return self.length > 0 and self.owner == slot.owner and self.text == slot.tokens[: self.length]


class Snapshots:
    """A fixed number of snapshots of a target; none if it has no recurrent layers."""

    def __init__(self, target: Session):
        self._target = target
        self._all = [Snapshot(place) for place in range(target.places)]
        self._clock = count(1)

    def longest(self, slot: Slot, limit: int) -> int:
        """Return after how many of the first `limit` tokens of a slot's text there is a snapshot; 0 is its beginning."""
        return max((each.length for each in self._all if each.length <= limit and each.begins(slot)), default=0)

    def restore(self, slot: Slot) -> None:
        """Give a slot the state after the tokens that its caches hold, if it has another one."""
        if self._target.usable(slot.index, slot.cached) == slot.cached:
            return
        (snapshot,) = (each for each in self._all if each.length == slot.cached and each.begins(slot))
        self._target.restore(snapshot.place, slot.index, snapshot.length)
        snapshot.shared, snapshot.used = True, next(self._clock)

    def take(self, slot: Slot, slots: Iterable[Slot], shared: bool) -> None:
        """Keep the state of a slot. It takes the place of one that no slot has the entries for, else of the one that was used
        least recently; those that several requests had in common make room only for others of these."""

        def worth(each: Snapshot) -> tuple[bool, bool, int]:
            return any(other.shared(each.text, each.owner) == each.length > 0 for other in slots), each.shared, each.used

        known = [each for each in self._all if each.length == slot.cached and each.begins(slot)]
        if not self._all or known:
            return
        snapshot = min(self._all, key=worth)
        held, common, _ = worth(snapshot)
        if held and common and not shared:
            return
        self._target.snapshot(slot.index, snapshot.place)
        snapshot.text, snapshot.owner = slot.tokens[: slot.cached], slot.owner
        snapshot.shared, snapshot.used = shared, next(self._clock)

    def drop(self, slot: Slot) -> None:
        """Forget those of a slot's text, whose states may contain NaN."""
        for each in self._all:
            if each.begins(slot):
                each.text = []
