"""Drafting by a model that proposes several tokens in one pass (PARD, An et al. 2025, arXiv 2504.18583)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.engines.contract import DRAFT_SAMPLERS, step_rows
from outrider.runtime.buffers import Shape
from outrider.runtime.drafters.base import Resources
from outrider.runtime.drafters.step import StepDrafter, top_probability

if TYPE_CHECKING:
    from outrider.runtime.costs import Costs


class ParallelDrafter(StepDrafter):
    """A parallel draft: a language model that was trained to continue a text with mask tokens in it.

    Its one pass of a round reads the context, and a mask for every drafted token but the first. The last row of the context
    gives the logits of the first token, and each mask those of the token after it. Cache entries of masks are never
    reused, so the context of the next round consists of all tokens that this one emitted.
    """

    name = "parallel"
    label = "parallel draft"
    prior = 0.5
    one_pass = True
    role = "parallel-draft"
    engines = (role, *DRAFT_SAMPLERS)

    def __init__(self, resources: Resources):
        super().__init__(resources)
        self._filling = self._session.mask_token
        self._max_k = resources.k[-1]

    @classmethod
    def contexts(cls, k: Sequence[int]) -> list[int]:
        return step_rows(k)

    def _kept(self, drafted: list[int]) -> list[int]:
        return []

    def _first_rows(self, context: int, drafted: int) -> int:
        return context + drafted - 1

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
        context = cls.typical_context(costs.k, read // 2)  # where drafting pays, about half of the tokens are accepted
        return costs.step(cls.role, context + read - 1, end) + drafted * costs.sampler(DRAFT_SAMPLERS[greedy], 1)

    def agreement(self, prompt: list[int], tokens: list[int]) -> tuple[list[bool], list[float]]:
        """Draft the answer in blocks of the largest k, each after what precedes it; see `DeviceDrafter.agreement`."""
        session, text = self._session, prompt + tokens
        agrees: list[bool] = []
        confidences: list[float] = []
        read = 0
        for begin in range(len(prompt), len(text), self._max_k):
            while begin - read > self._max_k:
                chunk = text[read : min(read + self._chunk, begin - 1)]
                session.write(np.array([chunk]), np.array([read]))
                read += len(chunk)
            block = text[begin : begin + self._max_k]
            ids = np.array([text[read:begin] + [self._filling] * (len(block) - 1)], dtype=np.int64)
            rows = session.run(ids, np.array([read]))[0, begin - read - 1 :]
            agrees += (rows.argmax(-1) == np.array(block)).tolist()
            confidences += [round(top_probability(row, np.empty_like(row)), 4) for row in rows]
            read = begin
        self._keep(0, 0)
        return agrees, confidences
