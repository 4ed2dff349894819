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
from collections.abc import Callable

import numpy as np

from outrider.engines.contract import CANDIDATES, FINE, NOT_FINITE
from outrider.engines.device import Device, Engine, Launch
from outrider.engines.errors import EngineError, OutriderWarning
from outrider.engines.session import Session
from outrider.runtime import reference
from outrider.runtime.launches import VERIFIER, Launches, Shape, Step
from outrider.runtime.request import ACCEPTING, DRAFTING, DRAWING, Logprobs, Request

MOST_RECORDED = 64  # rounds kept recorded; each holds some memory of the device


class Rounds:
    """One sequence's rounds. `seconds` is what their launches took, waiting for them included."""

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
        tokens: list[int],
        request: Request,
        count: int,
        rows: int,
        given: list[int] | None = None,
        shorter: Callable[[int], int | None] | None = None,
    ) -> tuple[list[int], list[int], list[Logprobs] | None]:
        """Draft `count` tokens after the confirmed `tokens`, and decide on them by one pass of `rows` rows; rows beyond
        the drafted tokens are padding that nobody looks at.

        Args:
            given: the drafted tokens, where the draft is not asked for them.
            shorter: asked after so many drafted tokens, on a device that does not run ahead: the rows of the pass if these
                are to be all, or None to go on.

        Returns:
            the drafted tokens; the accepted ones and the target's own after them; and their logprobs where the request
            asks for them.

        Raises:
            EngineError: the rows do not fit the cache, logits are not finite numbers, or the backend failed.
        """
        shape = self.launches.shape(tokens, request, count, rows, given is not None)
        self.launches.fill(tokens, request, shape, given or [])
        shape = self._launch(shape, request, shorter if self.device.synchronous else None)
        out = self.launches.out.host
        emitted: list[int] = out["tokens"].reshape(-1)[: int(out["accepted"][0]) + 1].tolist()
        drafted: list[int] = given or out["drafted"][0, : shape.drafted].tolist()
        top = request.params.logprobs
        return drafted, emitted, None if top is None else self.launches.logprobs(len(emitted), top)

    def _launch(self, shape: Shape, request: Request, shorter: Callable[[int], int | None] | None) -> Shape:
        """The round; and where top_k or top_p reach beyond the candidates, on from there with more, until all is decided.

        Returns:
            what it was in the end.
        """
        steps, first = self.launches.steps(shape), 0
        while (at := self._advance(shape, steps, first, shorter)) is not None:
            row, status = steps[at].row, steps[at].status
            assert status is not None
            if status[0] == FINE:
                shape = self.launches.shorten(shape, row + 1, self._shortened)
                steps, first, shorter = self.launches.steps(shape), at + 1, None
                continue
            if status[0] == NOT_FINITE:
                raise EngineError(
                    "the model's logits are not finite numbers (NaN or infinity)",
                    "check the checkpoint; an fp16 export may overflow where fp32 or bf16 does not",
                )
            if shape.candidates < self.launches.most_candidates:
                more = (size for size in CANDIDATES if shape.candidates < size)
                shape = shape._replace(candidates=min(next(more, self.launches.vocab_rows), self.launches.most_candidates))
                steps, first = self.launches.steps(shape), at
            else:
                self._decide(row, shape, request)
                first = at + 1
        return shape

    def _advance(self, shape: Shape, steps: list[Step], first: int, shorter: Callable[[int], int | None] | None) -> int | None:
        """Launch the steps from `first` on, and return the first that did not decide, or that is to draft the last token,
        if there is one."""
        if self.device.synchronous:
            for at, step in enumerate(steps[first:], first):
                started = time.perf_counter()
                step.launch()
                self.seconds += time.perf_counter() - started
                if step.status is not None and step.status[0] != FINE:
                    return at
                if shorter is not None and 0 <= step.row < shape.drafted - 1 and (rows := shorter(step.row + 1)):
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
        undecided = next((at for at, step in later if step.status is not None and step.status[0] != FINE), None)
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
        while len(self._recorded) >= MOST_RECORDED:
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

    def _decide(self, row: int, shape: Shape, request: Request) -> None:
        """What a sampler's graph could not decide, because TensorRT's TopK takes no more candidates: on the host, exactly,
        and slowly. Nearly flat distributions alone come here."""
        settings = reference.named_settings(request.settings[0])
        edits = reference.edits_of(*request.table())
        launches = self.launches
        drafted = launches.drafted(shape)
        if shape.given:
            settings |= {"exact_match": 1.0}
        if row == VERIFIER:
            uniforms = request.uniforms(request.emitted, shape.drafted + 1)[:, ACCEPTING.start : DRAWING.stop]
            logits, q = launches.target_logits(shape.rows).astype(np.float64), launches.q(shape.drafted).astype(np.float64)
            tokens = reference.verify(logits, drafted[: shape.drafted], q, settings, uniforms, edits)
            launches.put_verdict(shape.rows, tokens)
        else:
            p = reference.draft(launches.draft_logits(row), launches.vocab_rows, settings, edits, drafted[:row])
            uniforms = request.uniforms(request.emitted + row, 1)[0, DRAWING if request.exact else DRAFTING]
            launches.put_drafted(row, reference.draw(p, uniforms), p.astype(np.float32))
