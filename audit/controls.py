"""Observers of rounds: one checks the bundle's decisions, the other replaces them with correct or faulty ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np

from outrider.engines.arrays import Floats
from outrider.runtime.drafters import companions, on_device
from outrider.runtime.drafters.base import Reading
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import PLAIN, Choice
from outrider.runtime.policy.early_stop import EarlyStop
from outrider.runtime.policy.policy import Policy, SequenceView
from outrider.runtime.rounds.buffers import Lane, Shape
from outrider.runtime.rounds.host_sampler import draft_probabilities, target_rows
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.logprobs import Logprobs
from outrider.runtime.rounds.reference import TOLERANCE, Fault, draft, draw, edit, edits_of, excluded, named_settings, verify
from outrider.runtime.rounds.rounds import RoundResult
from outrider.runtime.rounds.sampling import ACCEPTING, DRAFTING, DRAWING

CHECKED = 4  # the reference checks every fourth decision
CLOSE = 1e-4  # the tolerance of a probability in fp32
# Tolerances of a random number: fp32 may round it, times a sum, to the other side of a token's boundary. An unlikely token is
# narrower than the largest one.
NUDGES = (0.0, *(sign * size for size in (1e-7, 2e-7, 4e-7, 8e-7) for sign in (1, -1)))


class Watch:
    """Counts emitted tokens, emitted tokens that truncation excludes, and decisions that differ from the reference's."""

    def __init__(self) -> None:
        self.emitted = 0
        self.excluded = 0
        self.checked = 0
        self.disagreed = 0
        self.decided: list[tuple[int, list[int]]] = []  # for each result: tokens drafted, tokens emitted
        self._runs = 0

    def __call__(self, launches: Launches, shape: Shape, index: int, lane: Lane, result: RoundResult) -> RoundResult:
        sampling = lane.sampling
        assert sampling is not None
        view = Decision(launches, shape, index, lane)
        if lane.steps:
            for row in range(len(result.drafted)):
                if self._check_this():
                    self.disagreed += not any(view.drawn_so(result.drafted, row, *each) for each in view.readings())
        emitted = self.decide(view, result.drafted, result.tokens)
        settings, edits = named_settings(sampling.settings[0]), edits_of(*sampling.table())
        self.emitted += len(emitted)
        self.decided.append((len(result.drafted), emitted))
        logits = view.target_logits(len(emitted))
        for row, token in enumerate(emitted):
            x = edit(logits[row].astype(np.float64), settings, edits, emitted[:row], row)
            self.excluded += excluded(x, settings, token)
        if result.logprobs is not None and self._check_this():
            self.disagreed += view.wrong(result.logprobs, emitted)
        return result._replace(tokens=emitted)

    def decide(self, view: Decision, drafted: list[int], emitted: list[int]) -> list[int]:
        """Return the tokens to emit. The graph has decided on `emitted`."""
        if self._check_this():
            self.disagreed += not any(emitted == view.reference(drafted, *each) for each in view.readings())
        return emitted

    def _check_this(self) -> bool:
        self._runs += 1
        due = self._runs % CHECKED == 0
        self.checked += due
        return due


class Decision:
    """The inputs of a round's decision on one lane."""

    def __init__(self, launches: Launches, shape: Shape, index: int, lane: Lane):
        assert lane.sampling is not None
        self._launches, self._shape, self._index, self._sampling = launches, shape, index, lane.sampling
        self._proposed = bool(lane.proposed)

    def target_logits(self, rows: int) -> Floats:
        """Return the target's logits [rows, V]."""
        return self._launches.device.read(target_rows(self._launches, self._shape, self._index, rows))

    def drawn_so(self, drafted: list[int], row: int, settings: dict[str, float], nudge: float) -> bool:
        """Return whether the reference has the same q for this row, and draws the same token from it."""
        launches, shape, sampling = self._launches, self._shape, self._sampling
        drafter = launches.on_device(shape)
        assert drafter is not None
        edits = edits_of(*sampling.table())
        logits = drafter.logits(row, shape, self._index).astype(np.float64)
        p = draft(logits, launches.vocab_rows, settings, edits, drafted[:row])
        uniforms = sampling.uniforms(sampling.emitted + row, 1)[0].astype(np.float64) + nudge
        q = draft_probabilities(launches, shape, self._index, row + 1)[row]
        same_q = settings["temperature"] == 0 or np.abs(q - p).max() < CLOSE
        return bool(same_q) and drafted[row] == draw(p, uniforms[DRAWING if sampling.exact else DRAFTING])

    def reference(self, drafted: list[int], settings: dict[str, float], nudge: float, fault: Fault | None = None) -> list[int]:
        """Return the tokens that the reference emits."""
        count, sampling = len(drafted), self._sampling
        return verify(
            self.target_logits(count + 1).astype(np.float64),
            drafted,
            draft_probabilities(self._launches, self._shape, self._index, count).astype(np.float64),
            settings,
            sampling.uniforms(sampling.emitted, count + 1)[:, ACCEPTING.start : DRAWING.stop].astype(np.float64) + nudge,
            edits_of(*sampling.table()),
            fault,
        )

    def wrong(self, logprobs: list[Logprobs], tokens: list[int]) -> bool:
        """Return whether a logprob differs from the one computed in float64."""
        x = self.target_logits(len(tokens)).astype(np.float64)
        normal = x - x.max(axis=1, keepdims=True)
        normal -= np.log(np.exp(normal).sum(axis=1, keepdims=True))
        claimed = [(row, *pair) for row, each in enumerate(logprobs) for pair in ((tokens[row], each.logprob), *each.top)]
        return any(abs(normal[row, token] - value) > 10 * CLOSE for row, token, value in claimed)

    def readings(self) -> Iterator[tuple[dict[str, float], float]]:
        """Return the round's settings with 0 to add to its random numbers, and variants that fp32 cannot distinguish from them:
        other random numbers, and another top_p."""
        settings = named_settings(self._sampling.settings[0])
        if self._proposed:
            settings |= {"exact_match": 1.0}
        variants = [settings]
        if settings["top_p"] < 1:
            others = [settings["top_p"] * factor for factor in (1 - TOLERANCE, 1 + TOLERANCE)]
            variants += [settings | {"top_p": min(1.0, top_p)} for top_p in others]
        return itertools.product(variants, NUDGES)


class ReferenceWatch(Watch):
    """Replaces each decision with the reference's, with a fault or, to check the reference itself, without one.

    The caches hold every drafted token whatever the decision, so a result can be replaced after the round.
    """

    def __init__(self, fault: Fault | None):
        super().__init__()
        self._fault = fault

    def decide(self, view: Decision, drafted: list[int], emitted: list[int]) -> list[int]:
        return view.reference(drafted, *next(view.readings()), self._fault)


class RandomPolicy(AdaptivePolicy):
    """Chooses at random, but the same in each run. The emitted tokens must not depend on the choices."""

    def __init__(self, like: AdaptivePolicy, seed: int = 0):
        super().__init__(like.times.costs, like.names, like.may_stop, like.ragged)
        self._random = random.Random(seed)

    def choose(self, sequences: Sequence[SequenceView]) -> Choice:
        names = {name for sequence in sequences for name in sequence.offers}
        sizes = self.sizes(max(sequence.remaining for sequence in sequences))
        return self._random.choice(
            [PLAIN, *(Choice(name, k) for name in (*self.names, *companions()) if name in names for k in sizes)]
        )

    def each(self, choice: Choice, sequences: Sequence[SequenceView]) -> list[Choice]:
        own = Policy.each(self, choice, sequences)
        if len(own) == 1:
            return own
        if self.may_stop or choice.drafter not in on_device([choice.drafter]):  # each has a drafter of its own
            offers = [[name for name, offer in each.offers.items() if offer.proposal is not None] for each in sequences]
            names = [self._random.choice([each.drafter, *others]) for each, others in zip(own, offers, strict=True)]
            own = [each._replace(drafter=name) for each, name in zip(own, names, strict=True)]
        return [each._replace(k=self._random.randint(0, each.k)) for each in own]

    def reading(self, choice: Choice, sequence: SequenceView) -> Reading | None:
        current, *others = sequence.offers[choice.drafter].readings
        begins = current.pending or self._random.random() < 0.2
        return self._random.choice([current, *others]) if others and begins else current

    def early_stop(self, choice: Choice, sequence: SequenceView) -> EarlyStop | None:
        if not self.may_stop:
            return None
        stop = self.stopping_rule(choice, sequence)
        return stop._replace(least=[math.inf if self._random.random() > 0.7 else -math.inf for _ in stop.least])
