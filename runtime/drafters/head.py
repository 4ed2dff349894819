"""Drafting by a head that reads hidden states of the target (EAGLE-3)."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engines.contract import step_rows
from outrider.engines.device import Buffer, Layout
from outrider.engines.samplers import DRAFT_SAMPLERS
from outrider.runtime.drafters.step import StepDrafter
from outrider.runtime.rounds.buffers import Lane, Shape


class HeadDrafter(StepDrafter):
    """A draft head, whose cache entries are valid only if computed from the target's features.

    Entry i is computed from the target's feature i and the token i + 1. Draft steps read the head's own output instead, so
    their entries are not kept: after a round, the context is all tokens that the round emitted.
    """

    name = "head"
    label = "draft head"
    prior = 0.7
    role = "head"
    engines = (role, *DRAFT_SAMPLERS)
    shift = 1
    overwritten = True

    @classmethod
    def contexts(cls, k: Sequence[int]) -> list[int]:
        return step_rows(k)

    def _kept(self, drafted: list[int]) -> list[int]:
        return []

    def layout(self, batch: int, max_k: int) -> Layout:
        next_features = {self._tensor("next feature", row): ((batch,), "int64") for row in range(max_k)}
        return {**super().layout(batch, max_k), **next_features}

    def fill(self, lanes: Sequence[Lane], shape: Shape) -> None:
        super().fill(lanes, shape)
        host = self._buffers.inputs.host
        for step in range(shape.drafted):
            places = host[self._tensor("next feature", step)]
            for index, lane in enumerate(lanes):
                places[index] = len(lane.tokens) - self.shift + step if lane.steps else self._session.spare_feature

    def _feature_positions(self, row: int, shape: Shape) -> Buffer:
        return self._buffers.inputs.device[self._tensor("next feature", row)].part(0, shape.batch)
