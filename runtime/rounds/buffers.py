"""A round's lanes, its shape, and its buffers at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from outrider.engines.device import Arena, Buffer, Device, Engine, Launch, Layout, host_buffer
from outrider.engines.samplers import DECIDED, EDITS, SETTINGS
from outrider.engines.session import Session
from outrider.errors import EngineError
from outrider.runtime.policy.early_stop import EarlyStop
from outrider.runtime.rounds.sampling import SamplingState

VERIFIER = -1
MAX_CACHED = 512  # launches or lists of them; each holds an engine's bindings
Array = npt.NDArray[Any]
Made = TypeVar("Made")


class Lane(NamedTuple):
    """One sequence in the batch of a round."""

    tokens: list[int]  # the confirmed ones
    sampling: SamplingState | None  # None for a padding lane
    drafter: str  # the round's drafter on the device, or one that proposed tokens on the host
    k: int  # tokens to draft
    proposed: list[int]  # the drafted tokens, if they were proposed on the host
    position: int  # the cache entry that the target's first row writes
    missing: int = 0  # confirmed tokens that the drafter on the device has not processed

    @property
    def steps(self) -> int:
        """The number of tokens to draft on the device."""
        return 0 if self.proposed else self.k


class Shape(NamedTuple):
    """Identifies the launches of a round: rounds of equal shapes have the same launches."""

    first: int  # slot of the first lane
    batch: int  # lanes, in consecutive slots
    drafter: str
    context: int  # confirmed tokens that the drafter's first step reads
    drafted: int  # tokens to draft on the device
    rows: int  # of the target's pass
    window: int
    greedy: bool  # whether its samplers need no settings, random numbers or candidates
    edits: int  # entries in the table of edits
    candidates: int  # from which top_k and top_p choose
    top: int | None  # number of most likely tokens to report; None reports no logprobs


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of a round. Samplers have a status."""

    launch: Launch
    status: Array | None = None  # int64 [B], on the host
    row: int = VERIFIER  # of the drafted token
    waits: bool = False  # for what an earlier step began in other processes


class RoundState:
    """A running round."""

    def __init__(self, lanes: Sequence[Lane], shape: Shape, stop: EarlyStop | None):
        self.lanes = lanes
        self.shape = shape
        self.stop = stop
        self.active = [index for index, lane in enumerate(lanes) if lane.sampling is not None]  # not failed
        self.failed: dict[int, EngineError] = {}
        # The number of valid rows of each lane with a grammar.
        self.rows = {at: 1 for at in self.active if getattr(lanes[at].sampling, "grammar", None) is not None}
        self.confidences: list[float] = []
        self.waits_at = 0  # the step that it waits before, if it has begun a pass elsewhere
        self.stops_with: int | None = None  # rows of the target's pass, if drafting stops after the last step

    def fail(self, index: int, error: EngineError) -> None:
        """Exclude a lane from the rest of the round."""
        self.active.remove(index)
        self.failed[index] = error

    def decided(self, step: Step) -> bool:
        """Return whether a step's sampler has decided for all active lanes."""
        status = step.status
        return status is None or all(status[index] == DECIDED for index in self.active)


class RoundBuffers:
    """The buffers of rounds over the sessions' slots.

    In a round of N lanes, the tensors [N, ...] are at the start of each buffer, without gaps.
    """

    def __init__(self, device: Device, target: Session, samplers: Mapping[str, Engine], inputs: Sequence[Layout], max_k: int):
        """Allocate the buffers for rounds of up to `max_k` drafted tokens, with the inputs of drafters."""
        self.device, self.target = device, target
        self.vocab_rows = target.vocab_rows
        self.max_k = max_k
        self.batch = target.batch
        batch, rows = self.batch, max_k + 1
        one, many = ((batch,), "int64"), ((batch * rows,), "int64")
        layout: dict[str, tuple[tuple[int, ...], str]] = {"input_ids": many, "proposed": many}
        layout |= dict.fromkeys(("positions", "drafted_count", "pending", "committed"), one)
        layout["verifying"] = (batch * rows * 3,), "float32"
        for each in inputs:
            layout |= each
        self.inputs = Arena(device, layout)
        statuses = {f"status {row}": one for row in range(max_k)}
        self.outputs = Arena(device, {"accepted": one, "tokens": many, "drafted": many, "status": one, **statuses})
        self.target_logits = device.zeros((batch * rows, self.vocab_rows), "float32", "the logits of a round")
        self.q = device.zeros((rows * batch, self.vocab_rows), "float32", "the draft's probabilities")
        self._columns: dict[tuple[str, int, int], tuple[Buffer, list[Launch]]] = {}
        self.samplers = samplers
        limits = [engine.max_candidates for engine in samplers.values() if engine.max_candidates]
        self.max_candidates = min([self.vocab_rows, *limits])
        self._tables: dict[int, Arena] = {}  # by their number of edits
        self._launches: LRUCache[tuple[Any, ...], Any] = LRUCache(MAX_CACHED)

    # Launches, also for drafters

    def cached(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """Return the launch or steps with this key, and make them if necessary."""
        made: Made | None = self._launches.get(key)
        if made is None:
            made = self._launches[key] = make()
        return made

    def sampler(self, name: str, tensors: dict[str, Buffer], shape: Shape) -> Launch:
        """Bind a run of a sampler to these tensors and, unless the round is greedy, to the requests' tables."""
        if not shape.greedy:
            table = self._tables[shape.edits].device
            tensors = tensors | {
                "settings": table["settings"].part(0, shape.batch, len(SETTINGS)),
                "edit_ids": table["edit_ids"].part(0, shape.batch, shape.edits),
                "edits": table["edits"].part(0, shape.batch, shape.edits, len(EDITS)),
                "candidates": host_buffer(np.array([shape.candidates], dtype=np.int64)),
            }
        return self.samplers[name].bind(tensors)

    # Buffers that drafters write

    def drafted_matrix(self, shape: Shape) -> Buffer:
        """Return the drafted tokens [B, max_k + 1], the token of step i in column i."""
        return self.outputs.device["drafted"].part(0, shape.batch, self.max_k + 1)

    def token(self, row: int, shape: Shape) -> tuple[Buffer, list[Launch]]:
        """Return the buffer for a drafter's sampled tokens [B, 1], and the launches that copy them to the matrix."""
        return self._column("token", self.drafted_matrix(shape), row, shape.batch, 1)

    def q_row(self, row: int, shape: Shape) -> tuple[Buffer, list[Launch]]:
        """Return the buffer for the distributions [B, V] of a row's tokens, and the launches that copy them on."""
        first = row * shape.batch * self.vocab_rows
        q = self.q.part(first, shape.batch, self.vocab_rows)
        if q.address % self.device.alignment == 0:
            return q, []
        whole = self.q.part(0, 1, self.q.nbytes // self.q.itemsize)
        flat, copies = self._column("q", whole, first, 1, shape.batch * self.vocab_rows)
        return flat.part(0, shape.batch, self.vocab_rows), copies

    def _column(self, name: str, whole: Buffer, first: int, rows: int, columns: int) -> tuple[Buffer, list[Launch]]:
        """Return a tensor that an engine may write, and the launch that copies it into columns of the matrix `whole`."""
        if (name, first, rows) not in self._columns:
            own = self.device.zeros((rows, columns), whole.dtype, "the buffers of a round")
            self._columns[name, first, rows] = own, [self.device.copy_columns(whole, first, own, 0, columns)]
        return self._columns[name, first, rows]

    # What the last round computed

    def emitted(self, shape: Shape, lane: int) -> list[int]:
        """Return the accepted tokens of a lane and the target's own."""
        begin = lane * shape.rows
        tokens: list[int] = self.outputs.host["tokens"][begin : begin + int(self.outputs.host["accepted"][lane]) + 1].tolist()
        return tokens
