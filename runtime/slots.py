"""The slots of the caches: what each holds, and how a request gets one, reads its prompt into it, and leaves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from outrider.engines.session import Session
from outrider.runtime.drafters.base import Drafter

if TYPE_CHECKING:
    from outrider.runtime.request import Request


class Slot:
    """A place in the caches, and the tokens whose entries it holds.

    `tokens` are those of the request that has the slot or had it last; the first `cached` of them are in the target's cache, at
    their own index. Whatever a rejected token left behind them is overwritten by the next round, which writes from a smaller
    position.
    """

    def __init__(self, index: int):
        self.index = index
        self.tokens: list[int] = []
        self.cached = 0
        self.finite = True  # whether all logits computed from the caches were finite so far

    def shared(self, prompt: list[int]) -> int:
        """Return how many tokens at the beginning of a prompt the slot's caches hold."""
        limit = min(self.cached, len(prompt))
        return next((at for at in range(limit) if self.tokens[at] != prompt[at]), limit)

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

    def reusable(self, slot: Slot, prompt: list[int]) -> int:
        """Return how many tokens at the beginning of a prompt the target need not read again in a slot. Recurrent layers can
        only go on from where their state is: most often from the end of the text."""
        return self._target.usable(slot.index, min(slot.shared(prompt), len(prompt) - 1))

    def begin(self, slot: Slot, request: Request, shared: int = 0) -> None:
        """Give a slot to a request whose first `shared` tokens its caches hold."""
        for drafter in self._drafters.values():
            drafter.truncate(slot.index, shared)
        cached = self._target.usable(slot.index, min(shared, len(request.tokens) - 1))
        slot.tokens, slot.cached, slot.finite = request.tokens, cached, False
        request.slot = slot

    def release(self, slot: Slot) -> None:
        """Take a slot from its request. Its caches keep their tokens, unless they may contain NaN."""
        if not slot.finite:
            self.clear(slot)

    def forget(self, slot: Slot) -> None:
        """Let later requests overwrite a slot's caches."""
        if not slot.finite:
            self.clear(slot)
        slot.tokens, slot.cached = [], 0
        for drafter in self._drafters.values():
            drafter.truncate(slot.index, 0)

    def clear(self, slot: Slot) -> None:
        """Zero a slot's caches, which may contain NaN: a masked value still multiplies."""
        self._target.clear(slot.index)
        for drafter in self._drafters.values():
            drafter.clear(slot.index)
        slot.tokens, slot.cached, slot.finite = [], 0, True

    def move(self, source: Slot, target: Slot) -> None:
        """Move what a slot holds to another one, whose own content is lost."""
        self._target.move(source.index, target.index, source.cached)
        for drafter in self._drafters.values():
            drafter.move(source.index, target.index)
        self.launched = True
        source.index, target.index = target.index, source.index
        self._slots[source.index], self._slots[target.index] = source, target
        target.tokens, target.cached = [], 0
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
