"""One round on the device: its launches in order, recorded if possible, repeated if a sampler could not decide.

    upload      last tokens, positions and random numbers                            one copy
    draft       steps of the drafter and its sampler                                 each passes its token to the next
    verify      the target's pass over the last confirmed token and the drafted ones
    decide      the verifier
    download    the accepted tokens, the target's own, and every sampler's status    one copy, one wait

Nothing in between comes to the host, so a device that can record launches replays a whole round as one. Only the masks of
grammars are computed on the host: before the verifier and, on a synchronous device, before each draft sampler. Such a round
is two recordings.
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
    """The result of a round for one sequence."""

    drafter: str  # a drafter's name, or `NONE` if nothing was drafted
    drafted: list[int]
    tokens: list[int]  # the accepted ones, and one of the target's own
    logprobs: list[Logprobs] | None  # of each token, if the request asks for them
    confidences: Sequence[float] = ()  # the drafter's, after which it might have stopped

    @property
    def accepted(self) -> int:
        """The number of drafted tokens that were accepted."""
        return len(self.tokens) - 1


class Observer(Protocol):
    """Sees each result while the buffers still hold its inputs, and may replace it."""

    def __call__(self, launches: Launches, shape: Shape, index: int, lane: Lane, result: RoundResult) -> RoundResult:
        """Return the result to use for a lane."""


class Rounds:
    """Runs rounds over the sessions' slots."""

    def __init__(self, device: Device, launches: Launches, *, record: bool, observer: Observer | None = None):
        """Run rounds with these launches; `record` says whether their engines can be recorded."""
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
        """Draft tokens after the confirmed ones of each lane, and verify them in one target pass of `rows` rows. Rows beyond
        the drafted tokens are padding, or left out, and their logits are unused.

        Args:
            lanes: one for each slot from `first` on.
            drafter: the drafter of the lanes that draft on the device. Others may have proposals on a synchronous device.
            stop: when to stop drafting early; used for one lane on a synchronous device.

        Returns:
            for each lane its result or its error; None for a slot that takes no part.

        Raises:
            EngineError: the rows do not fit the cache, or the backend failed.
        """
        return self.finish(self.begin(lanes, rows, first=first, drafter=drafter, stop=stop))

    def begin(
        self, lanes: Sequence[Lane], rows: int, *, first: int = 0, drafter: str = NONE, stop: EarlyStop | None = None
    ) -> RoundState:
        """Do the part of `run` before its target pass is waited for; all of it, unless the target `overlaps`."""
        shape = self.launches.shape(lanes, first, rows, drafter)
        self.launches.fill(lanes, shape)
        state = RoundState(lanes, shape, stop if self.device.synchronous else None)
        self._decide(state)
        return state

    def finish(self, state: RoundState) -> list[RoundResult | EngineError | None]:
        """Do the rest of a round, and return what `run` does."""
        if state.waits_at:
            self._decide(state, state.waits_at)
        return [state.failed.get(index) or self._result(state, index) for index in range(len(state.lanes))]

    def _result(self, state: RoundState, index: int) -> RoundResult | None:
        lane, shape, launches = state.lanes[index], state.shape, self.launches
        if lane.sampling is None:
            return None
        tokens, top = launches.emitted(shape, index)[: state.rows.get(index)], lane.sampling.params.logprobs
        drafted = lane.proposed
        if lane.steps:
            begin = index * (launches.max_k + 1)
            drafted = launches.outputs.host["drafted"][begin : begin + lane.k].tolist()
        logprobs = None if top is None else launches.logprobs.of(shape, index, len(tokens), top)
        result = RoundResult(lane.drafter, drafted, tokens, logprobs, state.confidences)
        return result if self.observer is None else self.observer(launches, shape, index, lane, result)

    def _decide(self, state: RoundState, begin: int = 0) -> None:
        """Launch a round's steps from `begin` on until all samplers have decided, or up to one that waits."""
        advance = self._advance if self.device.synchronous else self.recorder.advance
        while state.active and (at := advance(state, begin)) is not None:
            row = self.launches.steps(state.shape)[at].row
            if state.stops_with is not None:
                state.shape = self.launches.shorten(state.shape, row + 1, state.stops_with)
                state.lanes = [state.lanes[0]._replace(k=row + 1)]
                state.stop = state.stops_with = None
                begin = at + 1
            else:
                begin = resolve(self.launches, state, at)

    def _advance(self, state: RoundState, begin: int) -> int | None:
        """Launch the steps from `begin` on. Return the first step whose sampler did not decide for an active lane, or after
        which drafting stops; None if all have decided."""
        clock, shape, stop = time.perf_counter, state.shape, state.stop
        steps = self.launches.steps(shape)
        for at in range(begin, len(steps)):
            step = steps[at]
            if step.waits and at > begin:
                state.waits_at = at
                return None
            if state.rows and step.status is not None:
                mask_row(self.launches, state, step.row)
                if not state.active:  # nobody would wait for a pass in other processes
                    return None
            started = clock()
            step.launch()
            self._seconds += clock() - started
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
