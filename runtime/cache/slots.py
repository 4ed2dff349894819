"""The slots of the caches: assigning them to requests, reusing what they hold, and reading prompts into them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from outrider.engines.session import Session
from outrider.runtime.cache.slot import Slot
from outrider.runtime.cache.snapshots import Snapshots
from outrider.runtime.drafters.base import Drafter
from outrider.runtime.request import Request

MIN_SHARED = 16  # length of a prefix that is worth keeping or copying


class Eviction(NamedTuple):
    """What is lost if a slot is overwritten. The slot with the least eviction is overwritten first."""

    worth: int  # 0: nothing worth keeping, 1: tokens of one request, 2: a prefix of several requests
    held: int  # minus the reusable tokens, if nothing worth keeping is lost
    used: int  # when the slot was last used
    lost: int  # tokens


class Slots:
    """The slots of a bundle's caches, for target and drafters, by index."""

    def __init__(self, target: Session, drafters: Mapping[str, Drafter], max_prompt_chunk: int):
        """Make empty slots. Prompts are read in chunks of at most `max_prompt_chunk` tokens."""
        self._target = target
        self._drafters = drafters
        self._snapshots = Snapshots(target)
        self._chunk = max_prompt_chunk
        self._slots = [Slot(index) for index in range(target.batch)]
        self._clock = count(1)
        self.across_owners = False  # whether owners may reuse each other's texts
        self.evicted = 0  # reusable tokens that were overwritten so far
        self.launched = False  # whether a launch outside of rounds may still be running

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def between(self, first: int, last: int) -> list[Slot]:
        """Return the slots from `first` to `last`, both included."""
        return self._slots[first : last + 1]

    def admit(self, request: Request, free: Sequence[Slot]) -> Slot:
        """Give a request the free slot with the least eviction, with the prefix of its prompt that any slot holds."""
        evictions = self._evictions(request.tokens, self._owner(request))
        slot = min(free, key=evictions.__getitem__)
        self.evicted += evictions[slot].lost
        self.begin(slot, request)
        if not request.stats.emitted:
            request.stats.cached_tokens = slot.cached
        self.share(request)
        return slot

    def _owner(self, request: Request) -> Hashable:
        return None if self.across_owners else request.owner

    def _evictions(self, prompt: list[int], owner: Hashable) -> dict[Slot, Eviction]:
        """Return what each slot would lose to a prompt. The prefix that the prompt reuses is not lost, nor is a prefix that
        another slot holds."""
        # Sorting puts texts with long common prefixes side by side.
        held = sorted(self._slots, key=lambda slot: (hash(slot.owner), slot.tokens[: slot.cached]))
        kept = {slot: self.reusable(slot, prompt, owner) for slot in held}
        reusable = dict(kept)
        for one, other in pairwise(held):
            common = one.shared(other.tokens[: other.cached], other.owner)
            kept[one] = max(kept[one], self._usable(other, common))
            kept[other] = max(kept[other], self._usable(one, common))
        evictions = {}
        for slot in held:
            lost = slot.cached - kept[slot]
            worth = 1 + (kept[slot] < slot.reused) if lost >= MIN_SHARED else 0
            evictions[slot] = Eviction(worth, 0 if worth else -reusable[slot], slot.used, lost if worth else 0)
        return evictions

    def reusable(self, slot: Slot, prompt: list[int], owner: Hashable) -> int:
        """Return the length of the prompt's prefix that a slot can provide, for a prompt of `owner`."""
        length = max(min(slot.shared(prompt, owner), len(prompt) - 1), 0)
        if not slot.finite:  # a token that leads to NaN spoils its whole chunk, so only whole chunks are shared
            length -= length % self._chunk
        return self._usable(slot, length)

    def _usable(self, slot: Slot, length: int) -> int:
        """Return the longest prefix in a slot's cache, up to `length` tokens, that another text can continue. Recurrent layers
        can only continue from their current state, usually at the end of the text, or from a snapshot."""
        return max(self._target.usable(slot.index, length), self._snapshots.longest(slot, length))

    def begin(self, slot: Slot, request: Request) -> None:
        """Give a slot to a request, which reuses the prefix of the prompt in the slot's caches."""
        owner = self._owner(request)
        shared, slot.cached = slot.shared(request.tokens, owner), self.reusable(slot, request.tokens, owner)
        for drafter in self._drafters.values():
            drafter.truncate(slot.index, shared)
        slot.branch = 0
        for other in self._slots:
            common = other.common(request.tokens, owner)
            slot.branch = max(slot.branch, common)
            if other is not slot:
                other.branch = max(other.branch, common)
        slot.tokens, slot.owner, slot.finite = request.tokens, owner, False
        self._snapshots.restore(slot)
        slot.reused = slot.cached if slot.cached >= MIN_SHARED else 0
        request.slot = slot

    def share(self, request: Request) -> None:
        """Copy the unread part of a prompt that another slot holds. That slot may be reading the same prompt."""
        slot = request.slot
        assert slot is not None
        others = [other for other in self._slots if other is not slot]
        source = max(others, key=lambda other: self.reusable(other, slot.tokens, slot.owner), default=slot)
        length = self.reusable(source, slot.tokens, slot.owner)
        copied = length - slot.cached
        if copied < MIN_SHARED:
            return
        self._target.copy(source.index, slot.index, length)
        for drafter in self._drafters.values():
            drafter.copy(source.index, slot.index, length)
        self.launched = True
        slot.cached = slot.reused = length
        self._snapshots.restore(slot)
        source.reused, source.used = max(source.reused, length), next(self._clock)
        if not request.stats.emitted:
            request.stats.cached_tokens += copied
            request.stats.copied_tokens += copied

    def catch_up(self, slot: Slot, drafter: Drafter, window: int, most: int) -> None:
        """Let a drafter read a text with this window, at most `most` tokens of it. Prefixes are copied from other slots."""
        for other in self._slots:
            if other is not slot and other.finite and (shared := other.shared(slot.tokens, slot.owner)) >= MIN_SHARED:
                drafter.copy(other.index, slot.index, shared)
        drafter.catch_up(slot.index, slot.tokens, window, most)
        self.launched = True

    def release(self, slot: Slot) -> None:
        """Take a slot from its request. The caches keep their tokens, unless they may contain NaN."""
        slot.used = next(self._clock)
        if not slot.finite:
            self.clear(slot)

    def forget(self, slot: Slot) -> None:
        """Drop the text of a slot."""
        if not slot.finite:
            self.clear(slot)
        slot.empty()
        for drafter in self._drafters.values():
            drafter.truncate(slot.index, 0)

    def clear(self, slot: Slot) -> None:
        """Zero a slot's caches, which may contain NaN. Masking does not remove NaN, because 0 * NaN is NaN."""
        self._target.clear(slot.index)
        self._snapshots.drop(slot)
        for drafter in self._drafters.values():
            drafter.clear(slot.index)
        slot.empty()
        slot.finite = True

    def move(self, source: Slot, gap: Slot, free: Sequence[Slot]) -> None:
        """Move a slot's content to the free slot `gap`. The gap's content moves to another free slot if less is lost there."""
        evictions = self._evictions([], None)
        spare = min(free, key=evictions.__getitem__)
        self.evicted += evictions[spare].lost
        if evictions[gap].worth and spare is not gap:
            self._copy(gap, spare)
            spare.tokens, spare.owner, spare.cached = gap.tokens, gap.owner, gap.cached
            spare.reused, spare.used = gap.reused, gap.used
        self._copy(source, gap)
        source.index, gap.index = gap.index, source.index
        self._slots[source.index], self._slots[gap.index] = source, gap
        self.forget(gap)
        if not source.finite:
            self.clear(gap)  # the source's old entries there may contain NaN

    def _copy(self, source: Slot, target: Slot) -> None:
        """Overwrite a slot with the content of another."""
        self._target.copy(source.index, target.index, source.cached)
        for drafter in self._drafters.values():
            drafter.truncate(target.index, 0)
            drafter.copy(source.index, target.index, len(source.tokens))
        self.launched = True

    def prefill(self, slot: Slot) -> None:
        """Read the next chunk of a prompt into the target's cache."""
        end = slot.cached + self._chunk - slot.cached % self._chunk  # so that equal prefixes are read in equal chunks
        if self._target.places and slot.cached + MIN_SHARED <= slot.branch < end:
            end = slot.branch
        chunk = slot.tokens[slot.cached : min(end, len(slot.tokens) - 1)]
        self._target.write(np.array([chunk], dtype=np.int64), np.array([slot.cached], dtype=np.int64), slot.index)
        slot.cached += len(chunk)
        self.launched = True
        if slot.cached == end:
            self._snapshots.take(slot, self, shared=end == slot.branch)
        if not slot.unread:
            self.synchronize()  # the time of the prompt ends here

    def restore(self, slot: Slot) -> None:
        """Read the tokens again that a failed round has lost: with recurrent layers, all since the last snapshot.

        Raises:
            EngineError: the backend failed again.
        """
        slot.cached = self._usable(slot, slot.cached)
        self._snapshots.restore(slot)
        while slot.unread:
            self.prefill(slot)

    def synchronize(self) -> None:
        """Wait for launches outside of rounds."""
        if self.launched:
            self._target.device.synchronize()
            self.launched = False
