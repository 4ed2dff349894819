"""The slots of the caches: what each holds, and how a request gets one, reads its prompt into it, and leaves it."""

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

MIN_SHARED = 16  # tokens at the beginning of a text that are worth keeping or copying


class Eviction(NamedTuple):
    """What is lost if another text is read in a slot; the slot with the least is overwritten first."""

    worth: int  # 0: nothing worth keeping, 1: what one request had, 2: what several requests had in common
    held: int  # of that text by the slot, negated, if nothing worth keeping is lost
    used: int  # when it was used last
    lost: int  # tokens


class Slots:
    """The slots of a bundle's caches, the target's and the drafters' alike, by index."""

    def __init__(self, target: Session, drafters: Mapping[str, Drafter], max_prompt_chunk: int):
        """Set up empty slots; a prompt is read in chunks of at most so many tokens."""
        self._target = target
        self._drafters = drafters
        self._snapshots = Snapshots(target)
        self._chunk = max_prompt_chunk
        self._slots = [Slot(index) for index in range(target.batch)]
        self._clock = count(1)
        self.across_owners = False  # whether texts of one owner may go on from those of another
        self.evicted = 0  # tokens that were worth keeping and were overwritten, so far
        self.launched = False  # whether something was launched outside of rounds that may still run

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def between(self, first: int, last: int) -> list[Slot]:
        """Return the slots from one index to another, both included."""
        return self._slots[first : last + 1]

    def admit(self, request: Request, free: Sequence[Slot]) -> Slot:
        """Give a request the free slot in which it does least harm, with what any slot holds of its prompt."""
        harm = self._harm(request.tokens, self._owner(request))
        slot = min(free, key=harm.__getitem__)
        self.evicted += harm[slot].lost
        self.begin(slot, request)
        if not request.stats.emitted:
            request.stats.cached_tokens = slot.cached
        self.share(request)
        return slot

    def _owner(self, request: Request) -> Hashable:
        return None if self.across_owners else request.owner

    def _harm(self, prompt: list[int], owner: Hashable) -> dict[Slot, Eviction]:
        """Return what it does to each slot's content if a prompt is read there. What the prompt goes on from is not lost, and
        neither is what another slot holds."""
        # What has most in common is adjacent.
        held = sorted(self._slots, key=lambda slot: (hash(slot.owner), slot.tokens[: slot.cached]))
        kept = {slot: self.reusable(slot, prompt, owner) for slot in held}
        reusable = dict(kept)
        for one, other in pairwise(held):
            common = one.shared(other.tokens[: other.cached], other.owner)
            kept[one] = max(kept[one], self._usable(other, common))
            kept[other] = max(kept[other], self._usable(one, common))
        return {
            slot: Eviction(1 + (kept[slot] < slot.reused), 0, slot.used, slot.cached - kept[slot])
            if slot.cached - kept[slot] >= MIN_SHARED
            else Eviction(0, -reusable[slot], slot.used, 0)
            for slot in held
        }

    def reusable(self, slot: Slot, prompt: list[int], owner: Hashable) -> int:
        """Return how many tokens at the beginning of an owner's prompt the target need not read again, as a slot holds them."""
        length = max(min(slot.shared(prompt, owner), len(prompt) - 1), 0)
        if not slot.finite:  # a token that leads to NaN spoils all of its chunk, so only whole chunks may be shared
            length -= length % self._chunk
        return self._usable(slot, length)

    def _usable(self, slot: Slot, length: int) -> int:
        """Return after how many of the first `length` tokens in a slot's cache another text can go on. Recurrent layers can
        only go on from where their state is, most often the end of the text, or where there is a snapshot of it."""
        return max(self._target.usable(slot.index, length), self._snapshots.longest(slot, length))

    def begin(self, slot: Slot, request: Request) -> None:
        """Give a slot to a request, which goes on from what its caches hold of the prompt."""
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
        """Copy what another slot holds of a prompt that is still to be read. The other may be reading the same prompt."""
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

    def catch_up(self, slot: Slot, drafter: Drafter, chunks: int | None) -> None:
        """Let a drafter process a text, or at most so many chunks of it, after what it has processed of it in other slots."""
        for other in self._slots:
            if other is not slot and other.finite and (shared := other.shared(slot.tokens, slot.owner)) >= MIN_SHARED:
                drafter.copy(other.index, slot.index, shared)
        drafter.catch_up(slot.index, slot.tokens, chunks)
        self.launched = True

    def release(self, slot: Slot) -> None:
        """Take a slot from its request. Its caches keep their tokens, unless they may contain NaN."""
        slot.used = next(self._clock)
        if not slot.finite:
            self.clear(slot)

    def forget(self, slot: Slot) -> None:
        """Let later requests overwrite a slot's caches."""
        if not slot.finite:
            self.clear(slot)
        slot.empty()
        for drafter in self._drafters.values():
            drafter.truncate(slot.index, 0)

    def clear(self, slot: Slot) -> None:
        """Zero a slot's caches, which may contain NaN: a masked value still multiplies."""
        self._target.clear(slot.index)
        self._snapshots.drop(slot)
        for drafter in self._drafters.values():
            drafter.clear(slot.index)
        slot.empty()
        slot.finite = True

    def move(self, source: Slot, gap: Slot, free: Sequence[Slot]) -> None:
        """Move what a slot holds to a free one, whose own content goes to another free one if less is lost there."""
        harm = self._harm([], None)
        spare = min(free, key=harm.__getitem__)
        self.evicted += harm[spare].lost
        if harm[gap].worth and spare is not gap:
            self._copy(gap, spare)
            spare.tokens, spare.owner, spare.cached = gap.tokens, gap.owner, gap.cached
            spare.reused, spare.used = gap.reused, gap.used
        self._copy(source, gap)
        source.index, gap.index = gap.index, source.index
        self._slots[source.index], self._slots[gap.index] = source, gap
        self.forget(gap)
        if not source.finite:
            self.clear(gap)  # the entries that the source left there may contain NaN

    def _copy(self, source: Slot, target: Slot) -> None:
        """Copy all that a slot holds over what another one holds."""
        self._target.copy(source.index, target.index, source.cached)
        for drafter in self._drafters.values():
            drafter.truncate(target.index, 0)
            drafter.copy(source.index, target.index, len(source.tokens))
        self.launched = True

    def prefill(self, slot: Slot) -> None:
        """Read the next chunk of a prompt into the target's cache."""
        end = slot.cached + self._chunk - slot.cached % self._chunk  # so that equal beginnings are read in equal chunks
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
        """Read a text again as far as a failed round has lost it: with recurrent layers from the last snapshot on.

        Raises:
            EngineError: the backend failed again.
        """
        slot.cached = self._usable(slot, slot.cached)
        self._snapshots.restore(slot)
        while slot.unread:
            self.prefill(slot)

    def synchronize(self) -> None:
        """Wait for what was launched outside rounds; a round itself needs one wait and no more."""
        if self.launched:
            self._target.device.synchronize()
            self.launched = False
