"""One round on the device: its launches in order, repeated where a sampler could not decide, recorded where possible.

    upload      what the host knows: last tokens, positions, random numbers          one copy
    draft       a step of the drafter and its sampler, as often as asked             a token goes from each to the next
    verify      the target's pass over the last confirmed token and the drafted ones
    decide      the verifier
    download    the accepted tokens, the target's own, and every sampler's status    one copy, one wait

Nothing in between comes to the host, so a device that can record launches replays a whole round as one. Only the masks of a
grammar are the host's work: before the verifier, and before each draft sampler where launches are done when they return. Such a
round is two recordings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outrider.engines.device import Device
from outrider.errors import EngineError
from outrider.runtime.policy.choice import NONE
from outrider.runtime.policy.early_stop import EarlyStop
from outrider.runtime.rounds.buffers import Lane, RoundState, Shape
from outrider.runtime.rounds.host_sampler import resolve
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.logprobs import Logprobs
from outrider.runtime.rounds.masks import mask_row
from outrider.runtime.rounds.recording import Recorder


class RoundResult(NamedTuple):
    """What a round decided for one sequence."""

    drafter: str  # a drafter's name, or `NONE` where nothing was drafted
    drafted: list[int]
    tokens: list[int]  # the accepted ones, and one of the target's own
    logprobs: list[Logprobs] | None  # of each token, where the request asks for them
    confidences: Sequence[float] = ()  # the drafter's, in the drafted tokens, where it might have stopped behind them

    @property
    def accepted(self) -> int:
        """The number of drafted tokens that were accepted."""
        return len(self.tokens) - 1


class Observer(Protocol):
    """Sees each result while the buffers still hold the numbers that it was decided from, and may replace it."""

    def __call__(self, launches: Launches, shape: Shape, index: int, lane: Lane, result: RoundResult) -> RoundResult:
        """Return the result to use for the lane with this index."""


class Rounds:
    """Runs rounds of the sequences in the sessions' slots."""

    def __init__(self, device: Device, launches: Launches, *, record: bool, observer: Observer | None = None):
        """Run rounds over these launches; `record` says whether their engines may be recorded."""
        self.device = device
        self.launches = launches
        self.recorder = Recorder(launches, record)
        self.observer = observer
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The time that launches took, waiting included."""
        return self._seconds + self.recorder.seconds

    def run(
        self, lanes: Sequence[Lane], rows: int, *, first: int = 0, drafter: str = NONE, stop: EarlyStop | None = None
    ) -> list[RoundResult | EngineError | None]:
        """Draft tokens after the confirmed ones of each lane, and decide on them by one target pass of `rows` rows. Rows
        beyond the drafted tokens are padding, and their logits are not used.

        Args:
            lanes: one for each slot from `first` on.
            drafter: the drafter of all lanes that draft.
            stop: where drafting may end early; used with one lane, on a device whose launches are done when they return.

        Returns:
            for each lane its result, or why there is none; None for a slot that takes no part.

        Raises:
            EngineError: the rows do not fit the cache, or the backend failed.
        """
        shape = self.launches.shape(lanes, first, rows, drafter)
        self.launches.fill(lanes, shape)
        state = RoundState(lanes, shape, stop if self.device.synchronous else None)
        self._decide(state)
        return [state.failed.get(index) or self._result(state, index) for index in range(len(lanes))]

    def _result(self, state: RoundState, index: int) -> RoundResult | None:
        lane, shape, launches = state.lanes[index], state.shape, self.launches
        if lane.sampling is None:
            return None
        tokens, count, top = launches.emitted(shape, index), min(lane.k, shape.drafted), lane.sampling.params.logprobs
        tokens = tokens[: state.rows.get(index)]
        drafted = lane.proposed
        if launches.on_device(shape) is not None:
            begin = index * (launches.max_k + 1)
            drafted = launches.outputs.host["drafted"][begin : begin + count].tolist()
        logprobs = None if top is None else launches.logprobs.of(shape, index, len(tokens), top)
        name = lane.drafter if count else NONE
        result = RoundResult(name, drafted if count else [], tokens, logprobs, state.confidences)
        return result if self.observer is None else self.observer(launches, shape, index, lane, result)

    def _decide(self, state: RoundState) -> None:
        """Launch a round's steps until all is decided."""
        advance = self._advance if self.device.synchronous else self.recorder.advance
        begin = 0
        while state.active and (at := advance(state, begin)) is not None:
            row = self.launches.steps(state.shape)[at].row
            if state.stops_with is not None:
                state.shape = self.launches.shorten(state.shape, row + 1, state.stops_with)
                state.stop = state.stops_with = None
                begin = at + 1
            else:
                begin = resolve(self.launches, state, at)

    def _advance(self, state: RoundState, begin: int) -> int | None:
        """Launch the steps from `begin` on, one by one, and return the first whose sampler did not decide for an active lane,
        or at which drafting is to stop; None once all have run and decided."""
        clock, shape, stop = time.perf_counter, state.shape, state.stop
        steps = self.launches.steps(shape)
        for at in range(begin, len(steps)):
            step = steps[at]
            if state.rows and step.status is not None:
                mask_row(self.launches, state, step.row)
            started = clock()
            step.launch()
            self._seconds += clock() - started
            if step.status is None:
                continue
            if not state.decided(step):
                return at
            if stop is not None and 0 <= step.row < shape.drafted - 1:
                drafter = self.launches.on_device(shape)
                assert drafter is not None
                state.confidences.append(drafter.confidence(step.row, shape))
                state.stops_with = stop.after(state.confidences)
                if state.stops_with is not None:
                    return at
        return None
