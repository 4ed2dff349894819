"""Drafting with a model that has a KV cache: its content, and the cost of its passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from outrider.bundle.manifest import Manifest
from outrider.engines.arrays import Floats
from outrider.engines.samplers import DRAFT_SAMPLERS
from outrider.runtime.drafters.base import DeviceDrafter, Reading, Resources
from outrider.runtime.policy.costs import Costs

WINDOWS: tuple[int, ...] = (16, 64, 128, 256)  # of models that read tokens alone


class CachedDrafter(DeviceDrafter):
    """A drafter whose model has a KV cache. Entry i belongs to the confirmed token i + `shift` + a slot's offset.

    A slot whose model has read only the end of a text has an offset. Positions begin at the offset, too: a pass attends to all
    entries before its position, and tokens that were left out have none. A longer window is therefore read anew.
    """

    role: ClassVar[str]  # of the model
    shift: ClassVar[int] = 0

    def __init__(self, resources: Resources):
        super().__init__(resources)
        self._session = resources.sessions[self.role]
        self._chunk = resources.max_prompt_chunk
        # By slot: the token of each cache entry, confirmed or drafted, and how many entries are known to be confirmed.
        self._written: list[list[int]] = [[] for _ in range(resources.slots)]
        self._agreed = [0] * resources.slots
        self._current = [False] * resources.slots  # whether the last round's first step wrote all that was missing
        self._offsets = [0] * resources.slots
        self._windows = [0] * resources.slots  # the windows that slots began with; 0 is all
        self._contexts = self.contexts(resources.k)
        self._usable = [each for each in self.windows if each > self._contexts[-1]] if resources.windowed else []

    @classmethod
    def available(cls, manifest: Manifest) -> bool:
        return cls.role in manifest.models

    @classmethod
    @abstractmethod
    def contexts(cls, k: Sequence[int]) -> list[int]:
        """Return the possible numbers of context rows in a round's first step, ascending, given the built k."""

    @classmethod
    def typical_context(cls, k: Sequence[int], drafted: int) -> int:
        """Return the context rows after a round in which all of `drafted` tokens may have been accepted."""
        contexts = cls.contexts(k)
        return next((rows for rows in contexts if rows > drafted), contexts[-1])

    def can_draft(self, length: int, batched: bool) -> bool:
        return length - self.shift >= self._contexts[-1 if batched else 0]

    @abstractmethod
    def context_ids(self, tokens: list[int]) -> list[int]:
        """Return the input ids of the rows whose entries belong to these tokens."""

    def written(self, slot: int) -> list[int]:
        """Return the token of each entry of a slot's cache, confirmed or drafted."""
        return self._written[slot]

    def offset(self, slot: int) -> int:
        """Return how many tokens of its text a slot's cache leaves out at the beginning."""
        return self._offsets[slot]

    def truncate(self, slot: int, length: int) -> None:
        if not self._covers(slot, length):
            self._begin(slot)
        self._keep(slot, max(self._entries(slot, length), 0))

    def _entries(self, slot: int, length: int) -> int:
        """Return the number of entries that a text of `length` tokens has in a slot's cache."""
        return length - self.shift - self._offsets[slot]

    def _covers(self, slot: int, length: int) -> bool:
        """Return whether a text of `length` tokens has a whole window after a slot's offset, and so a round's context, too."""
        return self._entries(slot, length) >= self._windows[slot]

    def _begin(self, slot: int, offset: int = 0, window: int = 0) -> None:
        """Forget what a slot's cache holds. Its next entries begin at `offset`."""
        self._keep(slot, 0)
        self._offsets[slot], self._windows[slot] = offset, window

    def _keep(self, slot: int, entries: int) -> None:
        del self._written[slot][entries:]
        self._agreed[slot] = min(self._agreed[slot], entries)

    def copy(self, source: int, target: int, length: int) -> None:
        entries = min(len(self._written[source]), self._entries(source, length))
        held = self._offsets[target] + len(self._written[target]) if self._written[target] else 0
        if self._offsets[source] and (held or not self._covers(source, length)):
            return  # the end of a text takes the place of nothing, or a reading of all of it would never finish
        if entries > 0 and self._offsets[source] + entries > held:
            self._session.copy(source, target, entries)
            self._written[target] = self._written[source][:entries]
            self._agreed[target] = min(self._agreed[source], entries)
            self._offsets[target], self._windows[target] = self._offsets[source], self._windows[source]

    def clear(self, slot: int) -> None:
        self._session.clear(slot)
        self._begin(slot)

    def pending(self, slot: int, tokens: list[int]) -> int:
        entries = self._entries(slot, len(tokens))
        return max(self._before_context(entries) - (entries - self.missing(slot, tokens)), 0)

    def readings(self, slot: int, tokens: list[int]) -> list[Reading]:
        current, pending = self._windows[slot], self.pending(slot, tokens)
        if current:
            others = [Reading(0, self._before_context(len(tokens) - self.shift))]
            pending = min(pending, self._before_context(current))
        else:
            others = [Reading(window, self._before_context(window)) for window in self._usable if window < pending]
        return [Reading(current, pending), *others]

    def _before_context(self, entries: int) -> int:
        """Return how many of a text's entries precede the ones that a round's first step writes."""
        return entries - self._longest_context(entries, self._contexts)

    def missing(self, slot: int, tokens: list[int]) -> int:
        written, agreed, shift = self._written[slot], self._agreed[slot], self.shift + self._offsets[slot]
        entries = len(tokens) - shift
        end = min(len(written), entries)
        while agreed < end and written[agreed] == tokens[agreed + shift]:
            agreed += 1
        self._agreed[slot] = agreed
        return entries - agreed

    def catch_up(self, slot: int, tokens: list[int], window: int, most: int) -> None:
        """Write up to `most` of the entries that a round's first step does not write."""
        pending = self.pending(slot, tokens)
        if self._windows[slot] not in (0, window) or pending > window > 0:
            offset = max(len(tokens) - self.shift - window, 0) if window else 0
            self._begin(slot, offset, window if offset else 0)
            pending = self.pending(slot, tokens)
        first, shift = self._agreed[slot], self.shift + self._offsets[slot]
        end = first + min(pending, most)
        for at in range(first, end, self._chunk):
            chunk = tokens[at + shift : min(at + self._chunk, end) + shift]
            del self._written[slot][at:]
            self._session.write(np.array([self.context_ids(chunk)]), np.array([at]), slot)
            self._written[slot] += chunk

    def commit(self, slot: int, tokens: list[int], drafted: list[int]) -> None:
        if drafted or self._current[slot]:
            at = self._agreed[slot]
            self._written[slot][at:] = [*tokens[self.shift + self._offsets[slot] + at :], *self._kept(drafted)]
        else:  # entries that the round wrote for this slot belong to no token
            self._keep(slot, max(self._entries(slot, len(tokens)) - self._contexts[-1], 0))

    @abstractmethod
    def _kept(self, drafted: list[int]) -> list[int]:
        """Return the drafted tokens whose entries stay valid if the tokens are accepted."""

    # Costs

    @classmethod
    def unread(cls, tokens: int, k: Sequence[int]) -> int:
        entries = tokens - cls.shift
        return max(entries - cls._longest_context(entries, cls.contexts(k)), 0)

    @staticmethod
    def _longest_context(entries: int, contexts: Sequence[int]) -> int:
        return max((rows for rows in contexts if rows <= entries), default=0)

    @classmethod
    def cost(cls, costs: Costs, drafted: int, end: int, greedy: bool, begun: int = 0) -> float:
        if not drafted:
            return 0.0
        context = cls.typical_context(costs.k, drafted)
        steps = costs.step(cls.role, context, end) + (drafted - 1) * costs.step(cls.role, 1, end)
        return steps + drafted * costs.sampler(DRAFT_SAMPLERS[greedy], 1)

    @classmethod
    def catch_up_cost(cls, costs: Costs, tokens: int, end: int) -> float:
        whole, rest = divmod(max(tokens, 0), costs.chunk)
        return (whole and whole * costs.step(cls.role, costs.chunk, end)) + (rest and costs.step(cls.role, rest, end))

    @classmethod
    def upkeep(cls, costs: Costs, end: int) -> float:
        contexts = cls.contexts(costs.k)  # such rounds make the next context longer
        return costs.step(cls.role, contexts[-1], end) - costs.step(cls.role, contexts[0], end)

    def agreement(self, prompt: list[int], tokens: list[int]) -> tuple[list[bool], list[float]]:
        session, text = self._session, prompt + tokens
        begin = len(prompt) - 1 - self.shift  # the entry that predicts the first token
        agrees, confidences = [False] * max(-begin, 0), [0.0] * max(-begin, 0)  # cannot be drafted
        entries = text[self.shift : -1]
        for at in range(0, len(entries), self._chunk):
            chunk = entries[at : at + self._chunk]
            ids, position = np.array([chunk], dtype=np.int64), np.array([at], dtype=np.int64)
            if at + len(chunk) <= begin:
                session.write(ids, position)
                continue
            rows = session.run(ids, position)[0, max(begin - at, 0) :]
            expected = np.array(tokens[len(agrees) : len(agrees) + len(rows)])
            agrees += (rows.argmax(-1) == expected).tolist()
            confidences += [round(top_probability(row, np.empty_like(row)), 4) for row in rows]
        self._begin(0)
        return agrees, confidences


def top_probability(logits: Floats, scratch: Floats) -> float:
    """Return softmax's probability of the most likely token, 1 / sum(exp(x - max x)); both arrays are float32 [V]."""
    np.subtract(logits, logits.max(), out=scratch)
    return float(1 / np.exp(scratch, out=scratch).sum())
