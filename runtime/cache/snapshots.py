"""Snapshots of recurrent states after prefixes that other texts may have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import count

from outrider.engines.session import Session
from outrider.runtime.cache.slot import Slot


class StateSnapshot:
    """The state after a text. Another text can continue from it if some slot has the keys and values."""

    def __init__(self, place: int):
        self.place = place
        self.owner: Hashable = None
        self.text: list[int] = []  # empty if there is none
        self.shared = False  # whether several requests had this prefix
        self.used = 0

    def begins(self, slot: Slot) -> bool:
        """Return whether a slot's text begins with this one, and has the same owner."""
        return bool(self.text) and self.owner == slot.owner and self.text == slot.tokens[: len(self.text)]


class Snapshots:
    """The snapshots of a target: a fixed number, 0 without recurrent layers."""

    def __init__(self, target: Session):
        self._target = target
        self._all = [StateSnapshot(place) for place in range(target.places)]
        self._clock = count(1)

    def longest(self, slot: Slot, limit: int) -> int:
        """Return the length of the longest prefix of a slot's text, up to `limit` tokens, with a snapshot; 0 for none."""
        return max((len(each.text) for each in self._all if len(each.text) <= limit and each.begins(slot)), default=0)

    def restore(self, slot: Slot) -> None:
        """Set a slot's state to that after its cached tokens, unless it already is."""
        if self._target.usable(slot.index, slot.cached) == slot.cached:
            return
        (snapshot,) = (each for each in self._all if len(each.text) == slot.cached and each.begins(slot))
        self._target.restore(snapshot.place, slot.index, slot.cached)
        snapshot.shared, snapshot.used = True, next(self._clock)

    def take(self, slot: Slot, slots: Iterable[Slot], shared: bool) -> None:
        """Save the state of a slot. This replaces a snapshot for which no slot has the cache entries, or else the least
        recently used one. Snapshots shared by several requests are replaced only by other shared ones."""

        def worth(each: StateSnapshot) -> tuple[bool, bool, int]:
            held = any(other.shared(each.text, each.owner) == len(each.text) > 0 for other in slots)
            return held, each.shared, each.used

        if not self._all or any(len(each.text) == slot.cached and each.begins(slot) for each in self._all):
            return
        snapshot = min(self._all, key=worth)
        held, common, _ = worth(snapshot)
        if held and common and not shared:
            return
        self._target.snapshot(slot.index, snapshot.place)
        snapshot.text, snapshot.owner = slot.tokens[: slot.cached], slot.owner
        snapshot.shared, snapshot.used = shared, next(self._clock)

    def drop(self, slot: Slot) -> None:
        """Drop the snapshots of a slot's text, whose states may contain NaN."""
        for each in self._all:
            if each.begins(slot):
                each.text = []
