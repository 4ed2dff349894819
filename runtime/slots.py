"""The slots of the caches: what each holds, and how a request gets one, reads its prompt into it, and leaves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING

import numpy as np

from outrider.engines.session import Session
from outrider.runtime.drafters.base import Drafter

if TYPE_CHECKING:
    from outrider.runtime.request import Request

MIN_SHARED = 16  # tokens at the beginning of a text that are worth keeping or copying
COMPARED = 64  # tokens at a time


class Slot:
    """A place in the caches, and the tokens whose entries it holds.

    `tokens` are those of the request that has the slot or had it last; the first `cached` of them are in the target's cache, at
    their own index. Whatever a rejected token left behind them is overwritten by the next round, which writes from a smaller
    position.
    """

    def __init__(self, index: int):
        self.index = index
        self.finite = True  # whether all logits computed from the caches were finite so far
        self.empty()

    def empty(self) -> None:
        """Forget the text."""
        self.tokens: list[int] = []
        self.cached = 0
        self.reused = 0  # how many tokens at the beginning several requests had in common
        self.used = 0  # when the text was used last, by a count of such events

    def shared(self, prompt: list[int]) -> int:
        """Return how many tokens at the beginning of a prompt the slot's caches hold."""
        limit, at, tokens = min(self.cached, len(prompt)), 0, self.tokens
        while at < limit and tokens[at : at + COMPARED] == prompt[at : at + COMPARED]:
            at += COMPARED
        return next((index for index in range(at, limit) if tokens[index] != prompt[index]), limit)

    @property
    def unread(self) -> int:
        """The number of confirmed tokens that the target has yet to read; the last one is left to the next round."""
        return max(len(self.tokens) - 1 - self.cached, 0)


class Slots:
    """The slots of a bundle's caches, the target's and the drafters' alike, by index."""

    def __init__(self, target: Session, drafters: Mapping[str, Drafter], max_prompt_chunk: int):
        """Set up empty slots; a prompt is read in chunks of at most so many tokens."""
        self._target = target
        self._drafters = drafters
        self._chunk = max_prompt_chunk
        self._slots = [Slot(index) for index in range(target.batch)]
        self._clock = count(1)
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
        """Give a request the free slot in which it does least harm, with what any slot holds of its prompt.

        What the prompt goes on from is not lost, and neither is what another slot holds. If some slots lose nothing worth
        keeping, it is the one of these that holds most of the prompt; otherwise the one that was used least recently, where
        the beginnings that several requests had in common are overwritten last.
        """
        held = sorted(self._slots, key=lambda slot: slot.tokens[: slot.cached])  # what has most in common is adjacent
        elsewhere = dict.fromkeys(held, 0)
        for one, other in pairwise(held):
            common = one.shared(other.tokens[: other.cached])
            elsewhere[one] = max(elsewhere[one], self._target.usable(other.index, common))
            elsewhere[other] = max(elsewhere[other], self._target.usable(one.index, common))

        def harm(slot: Slot) -> tuple[int, int, int]:
            kept = max(self._reusable(slot, request.prompt), elsewhere[slot])
            if slot.cached - kept < MIN_SHARED:
                return 0, -self._reusable(slot, request.prompt), slot.used
            return 1 + (kept < slot.reused), slot.used, slot.cached - kept

        slot = min(free, key=harm)
        harmed, _, lost = harm(slot)
        self.begin(slot, request)
        request.stats.evicted_tokens = lost if harmed else 0
        request.stats.cached_tokens = slot.cached
        self.share(request)
        return slot

    def _reusable(self, slot: Slot, prompt: list[int]) -> int:
        """Return how many tokens at the beginning of a prompt the target need not read again after them in a slot. Recurrent
        layers can only go on from where their state is: most often from the end of the text."""
        return self._target.usable(slot.index, min(slot.shared(prompt), len(prompt) - 1))

    def begin(self, slot: Slot, request: Request) -> None:
        """Give a slot to a request, which goes on from what its caches hold of the prompt."""
        shared, slot.cached = slot.shared(request.tokens), self._reusable(slot, request.tokens)
        for drafter in self._drafters.values():
            drafter.truncate(slot.index, shared)
        slot.tokens, slot.finite = request.tokens, False
        slot.reused = slot.cached if slot.cached >= MIN_SHARED else 0
        request.slot = slot

    def share(self, request: Request) -> None:
        """Copy what another slot holds of a prompt that is still to be read. The other may be reading the same prompt."""
        slot = request.slot
        assert slot is not None
        others = [other for other in self._slots if other is not slot]
        source = max(others, key=lambda other: self._reusable(other, slot.tokens), default=slot)
        length = self._reusable(source, slot.tokens)
        copied = length - slot.cached
        if copied < MIN_SHARED:
            return
        self._target.copy(source.index, slot.index, length)
        for drafter in self._drafters.values():
            drafter.copy(source.index, slot.index, length)
        self.launched = True
        slot.cached = slot.reused = length
        source.reused, source.used = max(source.reused, length), next(self._clock)
        request.stats.cached_tokens += copied
        request.stats.copied_tokens += copied

    def catch_up(self, slot: Slot, drafter: Drafter, chunks: int | None) -> None:
        """Let a drafter process a text, or at most so many chunks of it, after what it has processed of it in other slots."""
        for other in self._slots:
            if other is not slot and (shared := other.shared(slot.tokens)) >= MIN_SHARED:
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
        for drafter in self._drafters.values():
            drafter.clear(slot.index)
        slot.empty()
        slot.finite = True

    def move(self, source: Slot, target: Slot) -> None:
        """Move what a slot holds to another one, whose own content is lost."""
        self._target.copy(source.index, target.index, source.cached)
        for drafter in self._drafters.values():
            drafter.truncate(target.index, 0)
            drafter.copy(source.index, target.index, len(source.tokens))
            drafter.truncate(source.index, 0)
        self.launched = True
        source.index, target.index = target.index, source.index
        self._slots[source.index], self._slots[target.index] = source, target
        target.empty()
        if not source.finite:
            self.clear(target)  # the entries that the source left there may contain NaN

    def prefill(self, slot: Slot) -> None:
        """Read the next chunk of a prompt into the target's cache."""
        chunk = slot.tokens[slot.cached : min(slot.cached + self._chunk, len(slot.tokens) - 1)]
        self._target.write(np.array([chunk], dtype=np.int64), np.array([slot.cached], dtype=np.int64), slot.index)
        slot.cached += len(chunk)
        self.launched = True
        if not slot.unread:
            self.synchronize()  # the time of the prompt ends here

    def restore(self, slot: Slot) -> None:
        """Read a text again as far as a failed round has lost it: all of it, if the target has recurrent layers.

        Raises:
            EngineError: the backend failed again.
        """
        slot.cached = self._target.usable(slot.index, slot.cached)
        while slot.unread:
            self.prefill(slot)

    def synchronize(self) -> None:
        """Wait for what was launched outside rounds; a round itself needs one wait and no more."""
        if self.launched:
            self._target.device.synchronize()
            self.launched = False
