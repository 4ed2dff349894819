"""Drafting by a head that fills a block of mask tokens in one pass (DFlash, Chen et al. 2026, arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from outrider.engines.arrays import Floats
from outrider.engines.contract import BLOCK_STATE, CONTEXT, DRAFT_SAMPLERS, LOGITS, MARKOV
from outrider.engines.device import Buffer, Launch, Layout
from outrider.engines.session import GraphSession
from outrider.runtime.buffers import Lane, Shape
from outrider.runtime.drafters.parallel import ParallelHeadDrafter

if TYPE_CHECKING:
    from outrider.runtime.costs import Costs
    from outrider.runtime.launches import Launches


class BlockDrafter(ParallelHeadDrafter):
    """A block head, whose entries are made from the target's features alone.

    Its one pass of a round reads the features of the context, and the block: the last confirmed token, and a mask for every
    drafted token, or for every one but the first in a head that samples from that token's row. Entries of the block are never
    reused. `shift` is 1 because the last confirmed token has no feature yet.

    With heads of its own (DSpark), each token's logits get a bias by the token before, and the probability that the token is
    accepted is theirs.
    """

    name = "block"
    label = "block head"
    role = "block-head"
    engines: ClassVar[tuple[str, ...]] = (role, *DRAFT_SAMPLERS, MARKOV)

    def context_ids(self, tokens: list[int]) -> list[int]:
        return [CONTEXT] * len(tokens)

    def _behind(self, last: int, drafted: int) -> list[int]:
        return [last, *[self._session.mask_token] * (drafted - self._session.from_anchor)]

    @classmethod
    def cost(cls, costs: Costs, drafted: int, end: int, greedy: bool, begun: int = 0) -> float:
        return super().cost(costs, drafted, end, greedy, begun) + drafted * costs.sampler(MARKOV, 1)

    # Heads of its own

    def layout(self, batch: int, max_k: int) -> Layout:
        return {**super().layout(batch, max_k), self._tensor("anchor"): ((batch,), "int64")}

    def attach(self, launches: Launches) -> None:
        super().attach(launches)
        self._markov = launches.samplers.get(MARKOV)
        self._biased: dict[tuple[int, int, int, int], tuple[Buffer, Buffer, list[Launch]]] = {}

    def fill(self, lanes: Sequence[Lane], shape: Shape) -> None:
        super().fill(lanes, shape)
        anchors = self._launches.inputs.host[self._tensor("anchor")]
        anchors[: len(lanes)] = [lane.tokens[-1] if lane.sampling is not None else 0 for lane in lanes]

    def _last_logits(self, row: int, shape: Shape) -> tuple[Buffer, list[Launch]]:
        if self._markov is None:
            return super()._last_logits(row, shape)
        biased, _, launches = self._bias(row, shape)
        return biased, launches

    def _bias(self, row: int, shape: Shape) -> tuple[Buffer, Buffer, list[Launch]]:
        """The biased logits [B, 1, V] and the confidences [B, 1] of a drafted token, and the launches that bring them there."""
        batch, launches, session = shape.batch, self._launches, self._session
        rows = self._first_rows(shape.context, shape.drafted)
        # A round of one sequence that ends early keeps its buffers; with more sequences, rows lie elsewhere in each shape.
        key = row, shape.context, shape.drafted if batch > 1 else 0, batch
        if key not in self._biased:
            assert isinstance(session, GraphSession)
            assert self._markov is not None
            logits, before = super()._last_logits(row, shape)
            states = session.block_state(batch, rows)
            width = states.shape[2]
            zeros = launches.device.zeros
            state = zeros((batch, 1, width), "float32", "the buffers of a round")
            biased = zeros((batch, 1, session.vocab_rows), "float32", "the buffers of a round")
            confidence = zeros((batch, 1), "float32", "the buffers of a round")
            last = launches.inputs.device[self._tensor("anchor")].part(0, batch, 1)
            at = (rows - shape.drafted + row) * width
            copy = launches.device.copy_columns(state.part(0, batch, width), 0, states.part(0, batch, rows * width), at, width)
            tensors = {
                LOGITS: logits,
                BLOCK_STATE: state,
                "before": launches.token(row - 1, shape)[0] if row else last,
                "biased": biased,
                "confidence": confidence,
            }
            self._biased[key] = biased, confidence, [*before, copy, self._markov.bind(tensors)]
        return self._biased[key]

    def confidence(self, row: int, shape: Shape) -> float:
        if self._markov is None:
            return super().confidence(row, shape)
        return float(self._bias(row, shape)[1].view()[0, 0])

    def _block(self, ids: list[int], position: int, before: list[int]) -> tuple[Floats, list[float]]:
        logits, confidences = super()._block(ids, position, before)
        if self._markov is None:
            return logits, confidences
        session, device, count = self._session, self._launches.device, len(before)
        assert isinstance(session, GraphSession)
        states = device.read(session.block_state(1, len(ids)))[0, -count:]
        given = {
            LOGITS: (logits[:, None], "float32"),
            BLOCK_STATE: (states[:, None], "float32"),
            "before": (np.array(before)[:, None], "int64"),
        }
        biased, confidences = np.empty_like(logits), []
        for row in range(count):
            tensors = {name: device.zeros((1, *values.shape[1:]), kind, "a pass") for name, (values, kind) in given.items()}
            tensors["biased"] = device.zeros((1, 1, session.vocab_rows), "float32", "a pass")
            tensors["confidence"] = device.zeros((1, 1), "float32", "a pass")
            for name, (values, _) in given.items():
                device.write(tensors[name], np.ascontiguousarray(values[row : row + 1]))
            self._markov.bind(tensors)()
            biased[row] = device.read(tensors["biased"])[0, 0]
            confidences.append(round(float(device.read(tensors["confidence"])[0, 0]), 4))
        return biased, confidences
