"""Rounds on an asynchronous device: many launches with one wait, recorded if possible."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from outrider.engines.device import Launch
from outrider.errors import EngineError, OutriderWarning
from outrider.runtime.rounds.buffers import VERIFIER, Array, RoundState, Shape, Step
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.masks import mask_row

MAX_RECORDED = 64  # recorded segments; each holds some device memory
RECORD_AT = 3  # runs after which a segment is recorded: recording takes two more, and many shapes never recur


class Segment(NamedTuple):
    """Steps that run without the host: a whole round, or the steps before or after masks are written."""

    shape: Shape
    begin: int
    end: int


class Recorder:
    """Launches the steps of rounds, and records frequent ones. `seconds` is the time spent, waiting included."""

    def __init__(self, launches: Launches, enabled: bool):
        """Use these launches; `enabled` says whether their engines can be recorded."""
        self.enabled = enabled
        self.seconds = 0.0
        self._device, self._launches = launches.device, launches
        self._recorded: dict[Segment, Launch] = {}  # in the order of their last use
        self._seen: Counter[Segment] = Counter()  # runs of segments that are not recorded

    @property
    def recorded(self) -> Mapping[Segment, Launch]:
        """Return the replays of the recorded segments, in the order of their last use."""
        return MappingProxyType(self._recorded)

    def advance(self, state: RoundState, begin: int) -> int | None:
        """Launch the steps from `begin` on. Return the first step whose sampler did not decide for an active lane; None if all
        have decided."""
        shape, steps, fresh = state.shape, self._launches.steps(state.shape), begin == 0
        verifier = next(at for at, step in enumerate(steps) if step.status is not None and step.row == VERIFIER)
        # The target's pass changes recurrent states, so it must not be launched twice; masks are applied after it.
        waits = [verifier - 1] * (self._launches.target.recurrence is not None) + [verifier] * bool(state.rows)
        for end in [*(end for end in waits if end > begin), len(steps)]:
            segment, started = Segment(shape, begin, end), time.perf_counter()
            replayed = fresh and self._replay(segment)
            if not replayed:
                self._launch(steps[begin:end])
            self.seconds += time.perf_counter() - started
            if (undecided := next((at for at in range(begin, end) if not state.decided(steps[at])), None)) is not None:
                return undecided
            if fresh and self.enabled and not replayed:
                self._seen[segment] += 1
                if self._seen[segment] == RECORD_AT:
                    self._record(segment, steps[begin:end])
            if end == verifier:
                mask_row(self._launches, state, VERIFIER)
            begin = end
        return None

    def _launch(self, steps: Sequence[Step]) -> None:
        for step in steps:
            step.launch()
        self._launches.outputs.download()
        self._device.synchronize()

    def _replay(self, segment: Segment) -> bool:
        """Replay a segment if it is recorded, and return whether it is."""
        replay = self._recorded.pop(segment, None) if self.enabled else None
        if replay is None:
            return False
        self._recorded[segment] = replay
        replay()
        self._device.synchronize()
        return True

    def _record(self, segment: Segment, steps: Sequence[Step]) -> None:
        """Record steps that have just run, and check that the replay gives the same results."""
        while len(self._recorded) >= MAX_RECORDED:
            least_recent = next(iter(self._recorded))
            del self._recorded[least_recent], self._seen[least_recent]
        decided = self._outcome(segment.shape)
        try:
            replay = self._device.capture([*(step.launch for step in steps), self._launches.outputs.download])
            replay()
            self._device.synchronize()
            if any((now != before).any() for now, before in zip(self._outcome(segment.shape), decided, strict=True)):
                raise EngineError("the recorded round gave a different result", "please report this as a bug")
        except EngineError as error:
            warnings.warn(
                f"a round of k = {segment.shape.drafted} runs as plain launches: {error}", OutriderWarning, stacklevel=2
            )

            def replay() -> None:
                self._launch(steps)

            replay()
        self._recorded[segment] = replay

    def _outcome(self, shape: Shape) -> list[Array]:
        """Return the outputs of a round. Tokens beyond those that a lane drafts are zeroed: they depend on what earlier rounds
        left in the caches."""
        outcome = {name: values.copy() for name, values in self._launches.outputs.host.items()}
        width, counts = self._launches.max_k + 1, self._launches.inputs.host["drafted_count"]
        for lane, count in enumerate(counts[: shape.batch]):
            outcome["drafted"][lane * width + count : (lane + 1) * width] = 0
        return [*outcome.values()]
