"""Drafting by a head that fills a block of mask tokens in one pass (DFlash, Chen et al. 2026, arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from outrider.engines.arrays import Floats
from outrider.engines.contract import BLOCK_STATE, CONTEXT, LOGITS
from outrider.engines.device import Buffer, Device, Engine, Launch, Layout
from outrider.engines.graph_session import GraphSession
from outrider.engines.samplers import DRAFT_SAMPLERS, MARKOV
from outrider.runtime.drafters.parallel import ParallelHeadDrafter
from outrider.runtime.policy.costs import Costs
from outrider.runtime.rounds.buffers import Lane, RoundBuffers, Shape


class BlockDrafter(ParallelHeadDrafter):
    """A block head, which computes its cache entries from the target's features alone.

    Its pass reads the features of the context, and then the block: the last confirmed token and the mask tokens. There is a
    mask for every drafted token, or for all but the first if the head samples from the last confirmed token's row. The block's
    entries are never reused. `shift` is 1 because the last confirmed token has no feature yet.

    DSpark has a Markov head and a confidence head: each token's logits get a bias by the token before, and the confidence is
    the predicted probability that the token is accepted.
    """

    name = "block"
    label = "block head"
    role = "block-head"
    engines: ClassVar[tuple[str, ...]] = (role, *DRAFT_SAMPLERS, MARKOV)

    def context_ids(self, tokens: list[int]) -> list[int]:
        return [CONTEXT] * len(tokens)

    def _after_context(self, last: int, drafted: int) -> list[int]:
        return [last, *[self._session.mask_token] * (drafted - self._session.from_anchor)]

    @classmethod
    def cost(cls, costs: Costs, drafted: int, end: int, greedy: bool, begun: int = 0) -> float:
        return super().cost(costs, drafted, end, greedy, begun) + drafted * costs.sampler(MARKOV, 1)

    # Markov and confidence heads

    def layout(self, batch: int, max_k: int) -> Layout:
        return {**super().layout(batch, max_k), self._tensor("anchor"): ((batch,), "int64")}

    def attach(self, buffers: RoundBuffers) -> None:
        super().attach(buffers)
        self._markov = buffers.samplers.get(MARKOV)
        self._heads: dict[int, _HeadBuffers] = {}  # by drafted token

    def fill(self, lanes: Sequence[Lane], shape: Shape) -> None:
        super().fill(lanes, shape)
        anchors = self._buffers.inputs.host[self._tensor("anchor")]
        anchors[: len(lanes)] = [lane.tokens[-1] if lane.sampling is not None else 0 for lane in lanes]

    def _source(self, row: int, shape: Shape) -> tuple[int, ...]:
        place = super()._source(row, shape)
        return place if self._markov is None else (*place, shape.context)  # the state lies after the context's

    def _last_logits(self, row: int, shape: Shape) -> tuple[Buffer, list[Launch]]:
        logits, before = super()._last_logits(row, shape)
        if self._markov is None:
            return logits, before
        assert isinstance(self._session, GraphSession)
        batch, buffers, own = shape.batch, self._buffers, self._heads_of(row)
        rows = self._first_rows(shape.context, shape.drafted)
        states = self._session.block_state(batch, rows)
        width = states.shape[2]
        at = (rows - shape.drafted + row) * width
        copy = buffers.device.copy_columns(own.state.part(0, batch, width), 0, states.part(0, batch, rows * width), at, width)
        anchor = buffers.inputs.device[self._tensor("anchor")].part(0, batch, 1)
        token = buffers.token(row - 1, shape)[0] if row else anchor
        bias = buffers.cached(
            (self.name, MARKOV, row, *super()._source(row, shape), batch),
            lambda: own.bind(self._markov, logits, token, batch),
        )
        return own.biased.part(0, batch, 1, self._session.vocab_rows), [*before, copy, bias]

    def _heads_of(self, row: int) -> _HeadBuffers:
        assert isinstance(self._session, GraphSession)
        if row not in self._heads:
            width = self._session.block_state(1, 1).shape[2]
            self._heads[row] = _HeadBuffers(self._buffers.device, self._buffers.batch, self._session.vocab_rows, width)
        return self._heads[row]

    def confidence(self, row: int, shape: Shape) -> float:
        if self._markov is None:
            return super().confidence(row, shape)
        return float(self._heads_of(row).confidence.view()[0])

    def _block(self, ids: list[int], position: int, before: list[int]) -> tuple[Floats, list[float]]:
        logits, confidences = super()._block(ids, position, before)
        if self._markov is None:
            return logits, confidences
        assert isinstance(self._session, GraphSession)
        device, own = self._buffers.device, self._heads_of(0)
        states = device.read(self._session.block_state(1, len(ids)))[0, -len(before) :]
        row = device.zeros((1, 1, logits.shape[1]), "float32", "a pass")
        token = device.zeros((1, 1), "int64", "a pass")
        launch, biased, confidences = own.bind(self._markov, row, token, 1), np.empty_like(logits), []
        for index, each in enumerate(before):
            device.write(row, logits[None, None, index])
            device.write(token, np.array([[each]]))
            device.write(own.state.part(0, 1, states.shape[1]), np.ascontiguousarray(states[[index]]))
            launch()
            biased[index] = device.read(own.biased.part(0, 1, logits.shape[1]))[0]
            confidences.append(round(float(device.read(own.confidence)[0]), 4))
        return biased, confidences


class _HeadBuffers:
    """The buffers of the Markov and confidence heads for one drafted token."""

    def __init__(self, device: Device, batch: int, vocab_rows: int, width: int):
        def zeros(*shape: int) -> Buffer:
            return device.zeros(shape, "float32", "the buffers of a round")

        self.state, self.biased, self.confidence = zeros(batch, width), zeros(batch, vocab_rows), zeros(batch)

    def bind(self, markov: Engine | None, logits: Buffer, before: Buffer, batch: int) -> Launch:
        """Bind a run over the logits [B, 1, V] of a row, after the tokens [B, 1]."""
        assert markov is not None
        (_, width), (_, vocab_rows) = self.state.shape, self.biased.shape
        return markov.bind(
            {
                LOGITS: logits,
                BLOCK_STATE: self.state.part(0, batch, 1, width),
                "before": before,
                "biased": self.biased.part(0, batch, 1, vocab_rows),
                "confidence": self.confidence.part(0, batch, 1),
            }
        )
