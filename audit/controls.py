"""Rounds under watch: the bundle's own, and such as are decided by the reference, right or wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from outrider.errors import EngineError
from outrider.runtime.costs import Costs
from outrider.runtime.launches import Idle, Shape, Turn
from outrider.runtime.policy import DRAFTERS, NGRAM, PLAIN, Acceptance, Choice, Company, Member, Policy
from outrider.runtime.reference import TOLERANCE, Fault, draft, draw, edit, edits_of, excluded, named_settings, verify
from outrider.runtime.request import ACCEPTING, DRAFTING, DRAWING, Logprobs, Request
from outrider.runtime.rounds import Rounds, Verdict

CHECKED = 4  # every so many runs of a graph are decided again by the reference
CLOSE = 1e-4  # what fp32 may change of a probability


class WatchedRounds(Rounds):
    """The bundle's rounds. Counts emitted tokens, those that truncation excludes, and where the reference disagrees."""

    def __init__(self, like: Rounds):
        """Of the same engines as the rounds `like`."""
        of = like.launches
        super().__init__(of.device, of.sessions, of.samplers, of.most)
        self.emitted = 0
        self.excluded = 0
        self.checked = 0
        self.disagreed = 0
        self.decided: list[tuple[int, list[int]]] = []  # of each round: tokens drafted, tokens emitted
        self._runs = 0

    def run(
        self,
        turns: Sequence[Turn | Idle],
        rows: int,
        *,
        first: int = 0,
        given: bool = False,
        shorter: Callable[[float], int | None] | None = None,
    ) -> list[Verdict | EngineError | None]:
        found = super().run(turns, rows, first=first, given=given, shorter=shorter)
        return [
            self._watch(turn.request, each, lane) if isinstance(turn, Turn) and isinstance(each, Verdict) else each
            for lane, (turn, each) in enumerate(zip(turns, found, strict=True))
        ]

    def _launch(
        self, turns: Sequence[Turn | Idle], shape: Shape, shorter: Callable[[float], int | None] | None
    ) -> tuple[Shape, dict[int, EngineError]]:
        self._shape, failed = super()._launch(turns, shape, shorter)
        return self._shape, failed

    def _watch(self, request: Request, verdict: Verdict, lane: int) -> Verdict:
        drafted = verdict.drafted
        for row in range(0 if self._shape.given else len(drafted)):
            if self._check_this():
                self.disagreed += not any(self._drawn_so(drafted, request, row, lane, each) for each in self._readings(request))
        emitted = self.decide(request, drafted, verdict.tokens, lane)
        settings, edits = named_settings(request.settings[0]), edits_of(*request.table())
        self.emitted += len(emitted)
        self.decided.append((len(drafted), emitted))
        logits = self.launches.target_logits(self._shape, lane)
        for row, token in enumerate(emitted):
            x = edit(logits[row].astype(np.float64), settings, edits, emitted[:row], row)
            self.excluded += excluded(x, settings, token)
        if verdict.logprobs is not None and self._check_this():
            self.disagreed += self._wrong(verdict.logprobs, emitted, lane)
        return verdict._replace(tokens=emitted)

    def _drawn_so(self, drafted: list[int], request: Request, row: int, lane: int, settings: dict[str, float]) -> bool:
        """Whether the reference would draw that token, and from the same q."""
        edits = edits_of(*request.table())
        logits = self.launches.draft_logits(row, self._shape, lane).astype(np.float64)
        p = draft(logits, self.launches.vocab_rows, settings, edits, drafted[:row])
        place = request.uniforms(request.emitted + row, 1)[0]
        same_q = settings["temperature"] == 0 or np.abs(self.launches.q(row + 1, self._shape, lane)[row] - p).max() < CLOSE
        return bool(same_q) and drafted[row] == draw(p, place[DRAWING if request.exact else DRAFTING])

    def decide(self, request: Request, drafted: list[int], emitted: list[int], lane: int) -> list[int]:
        """The verdict, which the graph said is `emitted`."""
        if self._check_this():
            verdicts = (self.reference(request, drafted, lane, settings) for settings in self._readings(request))
            self.disagreed += not any(emitted == verdict for verdict in verdicts)
        return emitted

    def reference(
        self, request: Request, drafted: list[int], lane: int, settings: dict[str, float], fault: Fault | None = None
    ) -> list[int]:
        """The verdict of the reference."""
        count = len(drafted)
        return verify(
            self.launches.target_logits(self._shape, lane)[: count + 1].astype(np.float64),
            drafted,
            self.launches.q(count, self._shape, lane).astype(np.float64),
            settings,
            request.uniforms(request.emitted, count + 1)[:, ACCEPTING.start : DRAWING.stop],
            edits_of(*request.table()),
            fault,
        )

    def _wrong(self, found: list[Logprobs], tokens: list[int], lane: int) -> bool:
        """Whether a logprob is not the one of float64."""
        x = self.launches.target_logits(self._shape, lane)[: len(tokens)].astype(np.float64)
        normal = x - x.max(axis=1, keepdims=True)
        normal -= np.log(np.exp(normal).sum(axis=1, keepdims=True))
        claimed = [(row, *pair) for row, each in enumerate(found) for pair in ((tokens[row], each.logprob), *each.top)]
        return any(abs(normal[row, token] - value) > 10 * CLOSE for row, token, value in claimed)

    def _readings(self, request: Request) -> Iterator[dict[str, float]]:
        """The round's settings; and, where top_p falls on the edge of a token, as fp32 may read them."""
        settings = named_settings(request.settings[0])
        if self._shape.given:
            settings |= {"exact_match": 1.0}
        yield settings
        if settings["top_p"] < 1:
            for factor in (1 - TOLERANCE, 1 + TOLERANCE):
                yield settings | {"top_p": min(1.0, settings["top_p"] * factor)}

    def _check_this(self) -> bool:
        self._runs += 1
        due = self._runs % CHECKED == 0
        self.checked += due
        return due


class Restless(Policy):
    """Every choice by chance, the same ones each time: what is emitted must not depend on them."""

    def __init__(self, like: Policy):
        super().__init__(like.costs, like.drafters, like.stops)

    def start(self, greedy: bool, drafters: Sequence[str] = DRAFTERS, acceptance: Acceptance | None = None) -> None:
        super().start(greedy, drafters, acceptance)
        self._chance = random.Random(0)

    def choose(self, length: int, missing: int, agreeing: int, wanted: int) -> Choice:
        drafters = [name for name in self.drafters if name != NGRAM or agreeing]
        return self._chance.choice([PLAIN, *(Choice(name, k) for name in drafters for k in self.sizes(wanted))])

    def reads(self, length: int, wanted: int) -> bool:
        return self._chance.random() < 0.5

    def worth(self, confidences: list[float], k: int, length: int) -> bool:
        return self._chance.random() < 0.7


class RestlessCompany(Company):
    """The same for several requests."""

    def __init__(
        self,
        policy: Policy,
        costs: Callable[[int], Costs],
        drafters: Sequence[str] = DRAFTERS,
        k: int | None = None,
        seed: int = 0,
    ):
        super().__init__(policy, costs, drafters, k)
        self._chance = random.Random(seed)

    def choose(self, members: Sequence[Member]) -> Choice:
        if self._k is not None:
            return super().choose(members)
        sizes = self._policy.sizes(max(member.wanted for member in members))
        return self._chance.choice([PLAIN, *(Choice(name, k) for name in self._allowed for k in sizes)])


class ReferenceRounds(WatchedRounds):
    """Drafts by the bundle's graph and decides by the reference, with a fault or, to prove the reference, without.

    The caches hold every drafted token whatever is decided, so the verdict may be replaced after the round.
    """

    fault: Fault | None = None

    def decide(self, request: Request, drafted: list[int], emitted: list[int], lane: int) -> list[int]:
        return self.reference(request, drafted, lane, next(self._readings(request)), self.fault)
