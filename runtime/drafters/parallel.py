"""Drafting by a model that proposes several tokens in one pass (PARD, An et al. 2025, arXiv 2504.18583)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from outrider.bundle.manifest import READS_MASKS
from outrider.engines.arrays import Floats
from outrider.engines.contract import step_rows
from outrider.engines.device import Buffer, Layout
from outrider.engines.samplers import DRAFT_SAMPLERS
from outrider.runtime.drafters.base import Resources
from outrider.runtime.drafters.cached import WINDOWS, top_probability
from outrider.runtime.drafters.step import StepDrafter
from outrider.runtime.policy.costs import Costs
from outrider.runtime.rounds.buffers import RoundBuffers, Shape


class ParallelDrafter(StepDrafter):
    """A parallel draft: a language model trained to continue a text that ends with mask tokens.

    Its pass reads the context, and a mask for every drafted token but the first. The last row of the context gives the logits
    of the first token, and each mask those of the token after it. Cache entries of masks are never reused, so the next context
    is all tokens that the round emitted.
    """

    name = "parallel"
    label = "parallel draft"
    prior = 0.5
    one_pass = True
    windows = WINDOWS
    role = "parallel-draft"
    engines: ClassVar[tuple[str, ...]] = (role, *DRAFT_SAMPLERS)

    def __init__(self, resources: Resources):
        super().__init__(resources)
        self._max_k = resources.k[-1]

    @classmethod
    def contexts(cls, k: Sequence[int]) -> list[int]:
        return step_rows(k)

    def _kept(self, drafted: list[int]) -> list[int]:
        return []

    def _after_context(self, last: int, drafted: int) -> list[int]:
        return [self._session.mask_token] * (drafted - 1)

    def _first_rows(self, context: int, drafted: int) -> int:
        return context + len(self._after_context(0, drafted))

    def _most_logits(self, max_k: int) -> list[int]:
        return [max_k if self._session.skips_logits else self._first_rows(self._contexts[-1], max_k)]

    def _place(self, row: int, shape: Shape) -> tuple[int, int, int]:
        rows = shape.drafted if self._session.skips_logits else self._first_rows(shape.context, shape.drafted)
        return 0, rows - shape.drafted + row, rows

    @classmethod
    def cost(cls, costs: Costs, drafted: int, end: int, greedy: bool, begun: int = 0) -> float:
        if not drafted:
            return 0.0
        read = max(drafted, begun)
        context = cls.typical_context(costs.k, read // 2)  # if drafting pays, about half of the tokens are accepted
        rows = context + read + READS_MASKS[cls.role][-1]
        return costs.step(cls.role, rows, end) + drafted * costs.sampler(DRAFT_SAMPLERS[greedy], 1)

    def agreement(self, prompt: list[int], tokens: list[int]) -> tuple[list[bool], list[float]]:
        """Draft the answer in blocks of the largest k; see `DeviceDrafter.agreement`."""
        session, text = self._session, prompt + tokens
        agrees, confidences = [False] * max(self.shift + 1 - len(prompt), 0), [0.0] * max(self.shift + 1 - len(prompt), 0)
        read = 0  # entries
        for begin in range(len(prompt) + len(agrees), len(text), self._max_k):
            entries = text[self.shift : begin]
            while len(entries) - read > self._max_k:
                chunk = entries[read : min(read + self._chunk, len(entries) - 1)]
                session.write(np.array([self.context_ids(chunk)]), np.array([read]))
                read += len(chunk)
            block = text[begin : begin + self._max_k]
            if len(entries) + len(self._after_context(0, len(block))) > session.capacity:
                block = block[:-1]  # the cache has no room for the last token's mask
                if not block:
                    break
            ids = [*self.context_ids(entries[read:]), *self._after_context(text[begin - 1], len(block))]
            rows, sure = self._block(ids, read, text[begin - 1 : begin + len(block) - 1])
            agrees += (rows.argmax(-1) == np.array(block)).tolist()
            confidences += sure
            read = len(entries)
        self._begin(0)
        missing = len(tokens) - len(agrees)
        return agrees + [False] * missing, confidences + [0.0] * missing

    def _block(self, ids: list[int], position: int, before: list[int]) -> tuple[Floats, list[float]]:
        """Return the logits [D, V] and the confidences of a block, whose tokens follow those in `before`."""
        rows = self._session.run(np.array([ids], dtype=np.int64), np.array([position]))[0, -len(before) :]
        return rows, [round(top_probability(row, np.empty_like(row)), 4) for row in rows]


class ParallelHeadDrafter(ParallelDrafter):
    """A draft head that proposes several tokens in one pass (P-EAGLE, arXiv 2602.01469).

    Entry i is computed from the target's feature i and the token i + 1. Masks have their own feature.
    """

    name = "parallel-head"
    label = "parallel draft head"
    windows = ()  # its entries must have the positions of the target's features
    role = "parallel-head"
    engines: ClassVar[tuple[str, ...]] = (role, *DRAFT_SAMPLERS)
    shift = 1

    def layout(self, batch: int, max_k: int) -> Layout:
        return {**super().layout(batch, max_k), self._tensor("spare feature"): ((batch,), "int64")}

    def attach(self, buffers: RoundBuffers) -> None:
        super().attach(buffers)
        buffers.inputs.host[self._tensor("spare feature")][:] = self._session.spare_feature

    def _feature_positions(self, row: int, shape: Shape) -> Buffer:
        return self._buffers.inputs.device[self._tensor("spare feature")].part(0, shape.batch)
