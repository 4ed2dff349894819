"""One round: which launches, in which order, again where a sampler could not decide, recorded where a device can.

    upload      what the host knows: last tokens, positions, random numbers          one copy
    draft       a step of the draft model, then the drafter, as often as asked       a token goes from each to the next
    verify      the target's pass over the last confirmed token and the drafted ones
    decide      the verifier
    download    what was accepted, the tokens, and every sampler's status            one copy, one wait

Nothing in between comes to the host, so a device that can record launches replays a whole round as one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from outrider.engines.contract import CANDIDATES, DECIDED, MORE_CANDIDATES
from outrider.engines.device import Device, Engine, Launch
from outrider.engines.session import Session
from outrider.errors import EngineError, OutriderWarning
from outrider.runtime import reference
from outrider.runtime.launches import VERIFIER, Idle, Launches, Shape, Step, Turn
from outrider.runtime.request import ACCEPTING, DRAFTING, DRAWING, Logprobs

MAX_RECORDED = 64  # rounds kept recorded; each holds some memory of the device


class Verdict(NamedTuple):
    """What a round decided for one sequence."""

    drafted: list[int]
    tokens: list[int]  # the accepted ones, and the target's own after them
    logprobs: list[Logprobs] | None  # of each, where the request asks for them


class Rounds:
    """The rounds of the sequences in the sessions' slots. `seconds` is what their launches took, waiting included."""

    def __init__(self, device: Device, sessions: dict[str, Session], samplers: dict[str, Engine], most: int):
        """`most` is the largest number of tokens to draft."""
        self.device = device
        self.launches = Launches(device, sessions, samplers, most)
        # False is plain launches, for who wants to compare the two.
        self.record = all(engine.recordable for engine in (*samplers.values(), *(each.engine for each in sessions.values())))
        self.seconds = 0.0
        self._shortened = 0  # rows of the pass, where a round drafts less than it could
        self._recorded: dict[Shape, Launch] = {}

    def run(
        self,
        turns: Sequence[Turn | Idle],
        rows: int,
        *,
        first: int = 0,
        given: bool = False,
        shorter: Callable[[float], int | None] | None = None,
    ) -> list[Verdict | EngineError | None]:
        """Draft tokens after the confirmed ones of each turn, and decide on them by one pass of `rows` rows; rows beyond
        the drafted tokens are padding that nobody looks at.

        Args:
            turns: of the slots from `first` on.
            given: whether the turns bring their drafted tokens, and the draft is not asked for them.
            shorter: told how sure the draft was of each token but the last, where there is one turn, on a device that does not
                run ahead. It gives the rows of the pass if these tokens are to be all, or None to go on.

        Returns:
            of each turn what was decided, or why nothing could be: its logits were not finite numbers.

        Raises:
            EngineError: the rows do not fit the cache, or the backend failed.
        """
        count = max(turn.k for turn in turns if isinstance(turn, Turn))
        shape = self.launches.shape(turns, first, count, rows, given)
        self.launches.fill(turns, shape)
        shape, failed = self._launch(turns, shape, shorter if self.device.synchronous else None)
        return [
            None if isinstance(turn, Idle) else failed.get(lane) or self._verdict(turn, shape, lane)
            for lane, turn in enumerate(turns)
        ]

    def _verdict(self, turn: Turn, shape: Shape, lane: int) -> Verdict:
        emitted = self.launches.emitted(shape, lane)
        count, top = min(turn.k, shape.drafted), turn.request.params.logprobs
        begin = lane * (self.launches.most + 1)
        drafted = turn.given if shape.given else self.launches.out.host["drafted"][begin : begin + count].tolist()
        return Verdict(drafted, emitted, None if top is None else self.launches.logprobs(shape, lane, len(emitted), top))

    def _launch(
        self, turns: Sequence[Turn | Idle], shape: Shape, shorter: Callable[[float], int | None] | None
    ) -> tuple[Shape, dict[int, EngineError]]:
        """The round; and where top_k or top_p reach beyond the candidates, on from there with more, until all is decided.

        Returns:
            what it was in the end, and which turns failed.
        """
        steps, first = self.launches.steps(shape), 0
        lanes = [lane for lane, turn in enumerate(turns) if isinstance(turn, Turn)]
        failed: dict[int, EngineError] = {}
        while (at := self._advance(shape, steps, first, lanes, shorter)) is not None:
            row, status = steps[at].row, steps[at].status
            assert status is not None
            undecided = [lane for lane in lanes if status[lane] != DECIDED]
            if not undecided:
                shape = self.launches.shorten(shape, row + 1, self._shortened)
                steps, first, shorter = self.launches.steps(shape), at + 1, None
                continue
            wide = [lane for lane in undecided if status[lane] == MORE_CANDIDATES]
            for lane in undecided:
                if lane not in wide:
                    lanes.remove(lane)  # the others go on
                    failed[lane] = EngineError(
                        "the model's logits are not finite numbers (NaN or infinity)",
                        "check the checkpoint; an fp16 export may overflow where fp32 or bf16 does not",
                    )
                    if row != VERIFIER:
                        self.launches.put_drafted(row, shape, lane, 0)  # some token, for the passes that come
            if not lanes:
                break
            first = at + 1
            if wide and shape.candidates < self.launches.max_candidates:
                more = (size for size in CANDIDATES if shape.candidates < size)
                shape = shape._replace(candidates=min(next(more, self.launches.vocab_rows), self.launches.max_candidates))
                steps, first = self.launches.steps(shape), at
            else:
                for lane in wide:
                    self._decide(row, shape, lane, turns[lane])
        return shape, failed

    def _advance(
        self,
        shape: Shape,
        steps: list[Step],
        first: int,
        lanes: list[int],
        shorter: Callable[[float], int | None] | None,
    ) -> int | None:
        """Launch the steps from `first` on, and return the first that did not decide for one of the `lanes`, or that is to
        draft the last token, if there is one."""

        def decided(step: Step) -> bool:
            return step.status is None or all(step.status[lane] == DECIDED for lane in lanes)

        if self.device.synchronous:
            for at, step in enumerate(steps[first:], first):
                started = time.perf_counter()
                step.launch()
                self.seconds += time.perf_counter() - started
                if not decided(step):
                    return at
                if shorter is None or not 0 <= step.row < shape.drafted - 1:
                    continue
                if rows := shorter(self.launches.confidence(step.row, shape)):
                    self._shortened = rows
                    return at
            return None
        started = time.perf_counter()
        if first == 0 and self.record and shape in self._recorded:
            self._recorded[shape]()
            self.device.synchronize()
        else:
            self._launch_all(steps[first:])
        self.seconds += time.perf_counter() - started
        later = list(enumerate(steps))[first:]
        undecided = next((at for at, step in later if not decided(step)), None)
        if first == 0 and undecided is None and self.record and shape not in self._recorded:
            self._record(shape, steps)
        return undecided

    def _launch_all(self, steps: list[Step]) -> None:
        for step in steps:
            step.launch()
        self.launches.out.download()
        self.device.synchronize()

    def _record(self, shape: Shape, steps: list[Step]) -> None:
        """Record a round that has just run; from now on it is replayed, if the replay decides as the launches did."""
        while len(self._recorded) >= MAX_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        decided = [values.copy() for values in self.launches.out.host.values()]
        try:
            replay = self.device.capture([*(step.launch for step in steps), self.launches.out.download])
            replay()
            self.device.synchronize()
            if any((now != before).any() for now, before in zip(self.launches.out.host.values(), decided, strict=True)):
                raise EngineError("its replay decided otherwise than the launches themselves", "report it, please")
        except EngineError as error:
            warnings.warn(f"a round of k = {shape.drafted} runs as plain launches: {error}", OutriderWarning, stacklevel=2)

            def replay() -> None:
                for step in steps:
                    step.launch()
                self.launches.out.download()

            self._launch_all(steps)
        self._recorded[shape] = replay

    def _decide(self, row: int, shape: Shape, lane: int, turn: Turn | Idle) -> None:
        """What a sampler's graph could not decide, because TensorRT's TopK takes no more candidates: on the host, exactly,
        and slowly. Nearly flat distributions alone come here."""
        assert isinstance(turn, Turn)
        request, launches = turn.request, self.launches
        settings = reference.named_settings(request.settings[0])
        edits = reference.edits_of(*request.table())
        drafted = launches.drafted(shape, lane)
        if shape.given:
            settings |= {"exact_match": 1.0}
        if row == VERIFIER:
            count = min(turn.k, shape.drafted)
            uniforms = request.uniforms(request.emitted, count + 1)[:, ACCEPTING.start : DRAWING.stop]
            logits = launches.target_logits(shape, lane).astype(np.float64)
            q = launches.q(count, shape, lane).astype(np.float64)
            tokens = reference.verify(logits, drafted[:count], q, settings, uniforms, edits)
            launches.put_verdict(shape, lane, tokens)
        else:
            p = reference.draft(launches.draft_logits(row, shape, lane), launches.vocab_rows, settings, edits, drafted[:row])
            uniforms = request.uniforms(request.emitted + row, 1)[0, DRAWING if request.exact else DRAFTING]
            launches.put_drafted(row, shape, lane, reference.draw(p, uniforms), p.astype(np.float32))
