"""Drafting by a head that reads hidden states of the target (EAGLE-3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.runtime.drafters.step import SAMPLERS, StepDrafter

if TYPE_CHECKING:
    from outrider.runtime.costs import Costs


class HeadDrafter(StepDrafter):
    """A draft head, whose entries are right only if it made them from the target's features.

    Entry i is made from the target's feature i and the token i + 1. A draft step reads the head's own output instead, so what
    it writes is not kept: after a round, the context is all tokens that the round emitted.
    """

    name = "head"
    label = "draft head"
    prior = 0.7
    role = "head"
    engines = (role, *SAMPLERS)
    shift = 1

    @classmethod
    def contexts(cls, k: Sequence[int]) -> list[int]:
        return sorted({1, 2, *(each + 1 for each in k)})

    def _kept(self, drafted: list[int]) -> list[int]:
        return []

    @classmethod
    def upkeep(cls, costs: Costs, end: int) -> float:
        contexts = cls.contexts(costs.k)  # the tokens of such rounds make the next context longer
        return costs.step(cls.role, contexts[-1], end) - costs.step(cls.role, contexts[0], end)
