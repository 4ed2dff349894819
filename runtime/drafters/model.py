"""Drafting by a second, smaller language model with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.samplers import DRAFT_SAMPLERS
from outrider.runtime.drafters.cached import WINDOWS
from outrider.runtime.drafters.step import StepDrafter
from outrider.runtime.policy.costs import Costs
from outrider.runtime.rounds.buffers import Lane

CONTEXT = 2


class ModelDrafter(StepDrafter):
    """A draft model.

    Its context is the last two confirmed tokens. After a round in which every drafted token was accepted, the second-last entry
    is missing; otherwise it is overwritten by the same value. So one shape serves both cases.
    """

    name = "model"
    label = "draft model"
    prior = 0.6
    windows = WINDOWS
    role = "draft"
    engines = (role, *DRAFT_SAMPLERS)

    @classmethod
    def contexts(cls, k: Sequence[int]) -> list[int]:
        return [1, CONTEXT]

    def context_rows(self, lanes: Sequence[Lane]) -> int:
        return min(CONTEXT, len(lanes[0].tokens)) if len(lanes) == 1 else CONTEXT

    def _kept(self, drafted: list[int]) -> list[int]:
        return drafted[:-1]  # the last one was not read

    @classmethod
    def upkeep(cls, costs: Costs, end: int) -> float:
        return costs.step(cls.role, CONTEXT, end)
