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
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from outrider.engines.contract import CANDIDATES, DECIDED, MORE_CANDIDATES
from outrider.engines.device import Device, Launch
from outrider.errors import EngineError, OutriderWarning
from outrider.runtime.buffers import VERIFIER, Array, Lane, Shape, Step
from outrider.runtime.choice import EarlyStop
from outrider.runtime.drafters.base import NONE
from outrider.runtime.grammar import GrammarError
from outrider.runtime.host_sampler import decide_on_host, put_drafted
from outrider.runtime.launches import Launches
from outrider.runtime.masks import mask
from outrider.runtime.sampling import Logprobs

MAX_RECORDED = 64  # rounds kept recorded; each holds some memory of the device
RECORD_AT = 3  # rounds of a shape after which it is recorded: that takes two more, and many shapes are never seen again


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


class Pause(NamedTuple):
    """Where a round waits for the host to decide."""

    at: int  # the index of the last step that ran
    rows: int | None = None  # of the target's pass, if drafting ends here


class Segment(NamedTuple):
    """Steps that run without the host: all of a round, or those before or after it writes masks."""

    shape: Shape
    begin: int
    end: int


class Progress:
    """A round under way."""

    def __init__(self, lanes: Sequence[Lane], shape: Shape, stop: EarlyStop | None):
        self.lanes = lanes
        self.shape = shape
        self.stop = stop
        self.active = [index for index, lane in enumerate(lanes) if lane.sampling is not None]  # lanes that have not failed
        self.failed: dict[int, EngineError] = {}
        # How many rows count of each lane with a grammar.
        self.rows = {at: 1 for at in self.active if (state := lanes[at].sampling) is not None and state.grammar is not None}
        self.confidences: list[float] = []

    def fail(self, index: int, error: EngineError) -> None:
        """Leave a lane out of the rest of the round; the others go on."""
        self.active.remove(index)
        self.failed[index] = error

    def decided(self, step: Step) -> bool:
        """Return whether a step's sampler has decided for all lanes."""
        status = step.status
        return status is None or all(status[index] == DECIDED for index in self.active)


class Rounds:
    """Runs rounds of the sequences in the sessions' slots. `seconds` is the time that launches took, waiting included."""

    def __init__(self, device: Device, launches: Launches, *, record: bool, observer: Observer | None = None):
        """Run rounds over these launches; `record` says whether their engines may be recorded."""
        self.device = device
        self.launches = launches
        self.record = record
        self.seconds = 0.0
        self.observer = observer
        self._recorded: dict[Segment, Launch] = {}  # in the order of their last use
        self._seen: Counter[Segment] = Counter()  # how often those that are not recorded have run

    @property
    def recorded(self) -> Mapping[Segment, Launch]:
        """Return what runs in place of the launches of each recorded segment, in the order of their last use."""
        return MappingProxyType(self._recorded)

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
        progress = Progress(lanes, shape, stop if self.device.synchronous else None)
        self._decide(progress)
        return [progress.failed.get(index) or self._result(progress, index) for index in range(len(lanes))]

    def _result(self, progress: Progress, index: int) -> RoundResult | None:
        lane, shape, launches = progress.lanes[index], progress.shape, self.launches
        if lane.sampling is None:
            return None
        tokens, count, top = launches.emitted(shape, index), min(lane.k, shape.drafted), lane.sampling.params.logprobs
        tokens = tokens[: progress.rows.get(index)]
        drafted = lane.proposed
        if launches.on_device(shape) is not None:
            begin = index * (launches.max_k + 1)
            drafted = launches.outputs.host["drafted"][begin : begin + count].tolist()
        logprobs = None if top is None else launches.logprobs(shape, index, len(tokens), top)
        name = lane.drafter if count else NONE
        result = RoundResult(name, drafted if count else [], tokens, logprobs, progress.confidences)
        return result if self.observer is None else self.observer(launches, shape, index, lane, result)

    def _decide(self, progress: Progress) -> None:
        """Launch a round's steps until all is decided. Where top_k or top_p reach beyond the candidates, go on from there with
        more of them."""
        launches, lanes, begin = self.launches, progress.lanes, 0
        while progress.active and (pause := self._advance(progress, begin)) is not None:
            shape, steps = progress.shape, launches.steps(progress.shape)
            row, status = steps[pause.at].row, steps[pause.at].status
            begin = pause.at + 1
            if pause.rows is not None:
                progress.shape, progress.stop = launches.shorten(shape, row + 1, pause.rows), None
                continue
            assert status is not None
            drafter = launches.on_device(shape)
            if drafter is not None and drafter.overwritten and row != VERIFIER and not self.device.synchronous:
                for step in [step for step in steps[1 : pause.at] if step.status is None]:
                    step.launch()
            for index in [index for index in progress.active if status[index] not in (DECIDED, MORE_CANDIDATES)]:
                progress.fail(index, not_finite())
                if row != VERIFIER:
                    put_drafted(launches, row, shape, index, 0)  # any token will do for the passes that follow
            undecided = [index for index in progress.active if status[index] == MORE_CANDIDATES]
            if undecided and shape.candidates < launches.max_candidates:
                larger = (size for size in CANDIDATES if shape.candidates < size)
                candidates = min(next(larger, launches.vocab_rows), launches.max_candidates)
                progress.shape, begin = shape._replace(candidates=candidates), pause.at
            else:
                for index in undecided:
                    decide_on_host(launches, row, shape, index, lanes[index])

    def _mask(self, progress: Progress, row: int) -> None:
        """Write the masks of the grammars over the logits that the sampler of a row reads."""
        for index in [index for index in progress.rows if index in progress.active]:
            try:
                progress.rows[index] = mask(self.launches, row, progress.shape, index, progress.lanes[index])
            except GrammarError as error:
                progress.fail(index, error)

    def _advance(self, progress: Progress, begin: int) -> Pause | None:
        """Launch the steps from `begin` on, up to the first whose sampler did not decide for an active lane, or at which
        drafting is to stop. Return None once all have run and decided."""
        if self.device.synchronous:
            return self._advance_one_by_one(progress, begin)
        shape, steps = progress.shape, self.launches.steps(progress.shape)
        target, fresh = self._target_step(steps), begin == 0
        waits = [target] if self.launches.target.recurrence is not None else []  # its pass changes the state: never twice
        waits += [target + 1] if progress.rows else []
        for end in [*(end for end in waits if end > begin), len(steps)]:
            started = time.perf_counter()
            segment = Segment(shape, begin, end)
            replay = self._recorded.pop(segment, None) if fresh and self.record else None
            if replay is None:
                self._launch_all(steps[begin:end])
            else:
                self._recorded[segment] = replay
                replay()
                self.device.synchronize()
            self.seconds += time.perf_counter() - started
            if (pause := next((at for at in range(begin, end) if not progress.decided(steps[at])), None)) is not None:
                return Pause(pause)
            if fresh and self.record and replay is None:
                self._seen[segment] += 1
                if self._seen[segment] == RECORD_AT:
                    self._record(segment, steps[begin:end])
            if end == target + 1:
                self._mask(progress, VERIFIER)
            begin = end
        return None

    def _advance_one_by_one(self, progress: Progress, begin: int) -> Pause | None:
        clock, shape, stop = time.perf_counter, progress.shape, progress.stop
        steps = self.launches.steps(shape)
        for at in range(begin, len(steps)):
            step = steps[at]
            if progress.rows and step.status is not None:
                self._mask(progress, step.row)
            started = clock()
            step.launch()
            self.seconds += clock() - started
            if step.status is None:
                continue
            if not progress.decided(step):
                return Pause(at)
            if stop is not None and 0 <= step.row < shape.drafted - 1:
                drafter = self.launches.on_device(shape)
                assert drafter is not None
                progress.confidences.append(drafter.confidence(step.row, shape))
                if (rows := stop.after(progress.confidences)) is not None:
                    return Pause(at, rows)
        return None

    @staticmethod
    def _target_step(steps: list[Step]) -> int:
        """Return the index of the target's pass, which is before the verifier."""
        return next(at for at, step in enumerate(steps) if step.status is not None and step.row == VERIFIER) - 1

    def _launch_all(self, steps: list[Step]) -> None:
        for step in steps:
            step.launch()
        self.launches.outputs.download()
        self.device.synchronize()

    def _record(self, segment: Segment, steps: list[Step]) -> None:
        """Record steps that have just run, to be replayed from now on if the replay decides as the launches did."""
        while len(self._recorded) >= MAX_RECORDED:
            least_recent = next(iter(self._recorded))
            del self._recorded[least_recent], self._seen[least_recent]
        decided = self._outcome(segment.shape)
        try:
            replay = self.device.capture([*(step.launch for step in steps), self.launches.outputs.download])
            replay()
            self.device.synchronize()
            if any((now != before).any() for now, before in zip(self._outcome(segment.shape), decided, strict=True)):
                raise EngineError("the recorded round gave a different result", "please report this as a bug")
        except EngineError as error:
            warnings.warn(
                f"a round of k = {segment.shape.drafted} runs as plain launches: {error}", OutriderWarning, stacklevel=2
            )

            def replay() -> None:
                for step in steps:
                    step.launch()
                self.launches.outputs.download()

            self._launch_all(steps)
        self._recorded[segment] = replay

    def _outcome(self, shape: Shape) -> list[Array]:
        """Return what a round has decided. What a lane is given beyond the tokens that it drafts is left out: it depends on
        what earlier rounds have left in the caches."""
        outcome = {name: values.copy() for name, values in self.launches.outputs.host.items()}
        width, counts = self.launches.max_k + 1, self.launches.inputs.host["drafted_count"]
        for lane, count in enumerate(counts[: shape.batch]):
            outcome["drafted"][lane * width + count : (lane + 1) * width] = 0
        return [*outcome.values()]


def not_finite() -> EngineError:
    """Return the error for logits that contain NaN or infinity."""
    return EngineError(
        "the model's logits contain NaN or infinity",
        "check the checkpoint; an fp16 export may overflow where fp32 or bf16 does not",
    )
