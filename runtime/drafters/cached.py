"""Drafting with a model that has a KV cache: its content, and the cost of its passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from outrider.bundle.manifest import Manifest
from outrider.engines.samplers import DRAFT_SAMPLERS
from outrider.runtime.drafters.base import DeviceDrafter, Resources
from outrider.runtime.policy.costs import Costs
from outrider.runtime.rounds.sampling import top_probability


class CachedDrafter(DeviceDrafter):
    """A drafter whose model has a KV cache. Entry i belongs to the confirmed token i + `shift`."""

    role: ClassVar[str]  # of the model
    shift: ClassVar[int] = 0

    def __init__(self, resources: Resources):
        super().__init__(resources)
        self._session = resources.sessions[self.role]
        self._chunk = resources.max_prompt_chunk
        # By slot: the token of each cache entry, confirmed or drafted, and how many entries are known to be confirmed.
        self._written: list[list[int]] = [[] for _ in range(resources.slots)]
        self._agreed = [0] * resources.slots
        self._contexts = self.contexts(resources.k)

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

    def truncate(self, slot: int, length: int) -> None:
        self._keep(slot, max(length - self.shift, 0))

    def _keep(self, slot: int, entries: int) -> None:
        del self._written[slot][entries:]
        self._agreed[slot] = min(self._agreed[slot], entries)

    def copy(self, source: int, target: int, length: int) -> None:
        entries = min(len(self._written[source]), length - self.shift)
        if entries > len(self._written[target]):
            self._session.copy(source, target, entries)
            self._written[target] = self._written[source][:entries]
            self._agreed[target] = min(self._agreed[source], entries)

    def clear(self, slot: int) -> None:
        self._session.clear(slot)
        self._keep(slot, 0)

    def pending(self, slot: int, tokens: list[int]) -> int:
        return max(self.missing(slot, tokens) - self._longest_context(len(tokens) - self.shift, self._contexts), 0)

    def missing(self, slot: int, tokens: list[int]) -> int:
        written, agreed, shift = self._written[slot], self._agreed[slot], self.shift
        entries = len(tokens) - shift
        end = min(len(written), entries)
        while agreed < end and written[agreed] == tokens[agreed + shift]:
            agreed += 1
        self._agreed[slot] = agreed
        return entries - agreed

    def catch_up(self, slot: int, tokens: list[int], most: int | None = None) -> None:
        """Write the entries that a round's first step does not write, or at most `most` of them."""
        pending = self.pending(slot, tokens)
        first = self._agreed[slot]
        end = first + (pending if most is None else min(pending, most))
        for at in range(first, end, self._chunk):
            chunk = tokens[at + self.shift : min(at + self._chunk, end) + self.shift]
            del self._written[slot][at:]
            self._session.write(np.array([self.context_ids(chunk)]), np.array([at]), slot)
            self._written[slot] += chunk

    def commit(self, slot: int, tokens: list[int], drafted: list[int]) -> None:
        if drafted:
            at = self._agreed[slot]
            self._written[slot][at:] = [*tokens[at + self.shift :], *self._kept(drafted)]
        else:  # entries that the round wrote for this slot belong to no token
            self._keep(slot, max(len(tokens) - self.shift - self._contexts[-1], 0))

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
        self._keep(0, 0)
        return agrees, confidences
