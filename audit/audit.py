"""`outrider verify`: evidence that a bundle emits what its target alone would, and that the evidence means something.

1. Arithmetic: what the sampler graphs decide, in plain and in speculative rounds, the float64 reference decides too.
2. Greedy: the speculative text is the plain text, for every k.
3. Company: where a bundle takes several requests at once, each gets the text that it gets alone, greedy or by a seed.
4. Sampled: tokens at several places of the text, speculative against plain, are of one distribution.
5. Support: no token is emitted that truncation excludes.
6. Negative controls: the same test finds each of four wrong samplers, and one that accepts every n-gram; and passes the right
   one written down again.
7. Counters: every drafted and every emitted token is accounted for.

The first looks at one decision at a time, so it sees a wrong graph that is wrong in plain decoding too; the fourth sees
what no single decision shows, such as drafted tokens that were not drawn from the q that they claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from outrider.audit.controls import ReferenceRounds, Restless, WatchedRounds
from outrider.audit.prompts import PROMPTS, REPEATING
from outrider.audit.report import Arithmetic, Audit, Control, Counters, Sampled
from outrider.audit.statistics import Comparison, compare
from outrider.audit.texts import LENGTH, compare_company, compare_greedy, count_sampled
from outrider.errors import EngineError
from outrider.progress import SILENT, Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy import AUTO, MODEL, NGRAM
from outrider.runtime.reference import Fault

DRAWS = 500
FALSE_ALARM = 1e-4  # probability that a right bundle fails on chance, over all comparisons together
SAMPLED_TOKENS = 5
PLACES = {"first": 0, "second": 1, "third": 2, "last": -1}  # of the sampled tokens

# Hot and cold, with and without each kind of truncation, by both rules; each on one of the prompts.
SAMPLED = (
    (SamplingParams(temperature=0.7, rule="rejection"), PROMPTS[4]),
    (SamplingParams(temperature=0.7, top_p=0.9, rule="rejection"), PROMPTS[8]),
    (SamplingParams(temperature=1.0, top_k=20, rule="rejection"), PROMPTS[2]),
    (SamplingParams(temperature=1.3, top_p=0.95, min_p=0.05, rule="rejection"), PROMPTS[6]),
    (
        SamplingParams(temperature=1.0, rule="exact-match", repetition_penalty=1.2, frequency_penalty=0.5, min_new_tokens=3),
        PROMPTS[0],
    ),
)
CONTROLLED = SAMPLED[1]
LOOKED_UP = (SamplingParams(temperature=1.0, rule="rejection"), REPEATING)  # drafted from the text alone
# What greedy texts without edits leave out: those have graphs of their own.
EDITED = (SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5), PROMPTS[0])

Tokens = npt.NDArray[np.int64]
Watched = TypeVar("Watched", bound=WatchedRounds)


def audit(outrider: Outrider, *, draws: int = DRAWS, progress: Progress = SILENT) -> Audit:
    """Audit a loaded bundle, with the slots that it was loaded for. The same bundle on the same machine gives the same report.

    Args:
        draws: sampled texts for each setting and k; more find smaller differences.

    Raises:
        EngineError: a run failed.
    """
    _check_capacity(outrider)
    counters, arithmetic = Counters(), Arithmetic()
    with _installed(outrider, _made(WatchedRounds, outrider)) as watched:
        greedy = compare_greedy(outrider, watched, PROMPTS, counters, progress)
        count_sampled(outrider, watched, (*SAMPLED, EDITED), counters)
        company = None
        if len(outrider.loop.texts) > 1:
            company = compare_company(outrider, watched, PROMPTS, SAMPLED, counters, progress)
    arithmetic.add(watched)
    controlled = 2 + (1 + len(Fault)) * (MODEL in outrider.drafters)
    compared = len(SAMPLED) * (len(outrider.build.k) + 2) + 1 + controlled
    significance = FALSE_ALARM / (2 * len(PLACES) * compared)  # two criteria at each place
    sampled, controls = [], []
    progress.stage("drawing texts", draws * (compared + len(SAMPLED) + 2))
    for number, (params, text) in enumerate((*SAMPLED, LOOKED_UP)):
        cell = Cell(outrider, params, outrider.text.encode(text, chat=False), number, significance, progress)
        watched = _made(WatchedRounds, outrider)
        plain = cell.draw(watched, 0, 2 * draws)
        looked_up = (params, text) == LOOKED_UP
        ways: list[int | str] = [NGRAM] if looked_up else [*outrider.build.k, AUTO]
        drawn = {k: cell.draw(watched, k, draws) for k in ways}
        arithmetic.add(watched)
        sampled += [Sampled(_named(params), k, cell.compare(plain, tokens)) for k, tokens in drawn.items()]
        if not looked_up:
            sampled.append(Sampled(_named(params), None, cell.compare(plain, np.concatenate(list(drawn.values())))))
        sampled[-1].emitted, sampled[-1].excluded = watched.emitted, watched.excluded
        way: int | str = NGRAM if looked_up else outrider.default_k
        faults: tuple[Fault | None, ...] = (None, Fault.ALWAYS_ACCEPT) if looked_up else ()
        if (params, text) == CONTROLLED and MODEL in outrider.drafters:
            faults = (None, *Fault)
        for fault in faults:
            faulty = _made(ReferenceRounds, outrider)
            faulty.fault = fault
            found = cell.compare(plain, cell.draw(faulty, way, draws))
            sample = Sampled(_named(params), way, found, faulty.emitted, faulty.excluded)
            controls.append(Control(fault.value if fault else None, sample))
    return Audit(arithmetic, greedy, company, sampled, controls, counters)


def _check_capacity(outrider: Outrider) -> None:
    needed = max(len(outrider.text.encode(text, chat=False)) for text in (*PROMPTS, REPEATING)) + LENGTH
    if needed > outrider.build.capacity:
        raise EngineError(
            f"the audit's texts need a capacity of {needed}; the bundle has {outrider.build.capacity}",
            f"build it with --capacity {needed} or more",
        )


def _made(kind: type[Watched], outrider: Outrider) -> Watched:
    return kind(outrider.loop.rounds)


@contextmanager
def _installed(outrider: Outrider, rounds: WatchedRounds) -> Iterator[WatchedRounds]:
    """These rounds in the loop, and choices by chance where k is not given, for a while."""
    usual = outrider.loop.rounds, outrider.policy
    outrider.loop.rounds, outrider.policy = rounds, Restless(outrider.policy)
    try:
        yield rounds
    finally:
        outrider.loop.rounds, outrider.policy = usual


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting on one prompt."""

    outrider: Outrider
    params: SamplingParams
    prompt: list[int]
    number: int  # of the setting, for its seeds
    significance: float
    progress: Progress

    def compare(self, plain: Tokens, drawn: Tokens) -> list[Comparison]:
        """Both samples at each place."""
        return [compare(place, plain[:, at], drawn[:, at], self.significance) for place, at in PLACES.items()]

    def draw(self, rounds: WatchedRounds, k: int | str, draws: int) -> Tokens:
        """The tokens of so many short texts, [draws, SAMPLED_TOKENS]; after an early end stand -1 and, last, the end.

        Every text has a seed of its own, also across settings and k, so the samples are independent.
        """
        loop, text = self.outrider.loop, self.outrider.loop.texts[0]
        way = k if isinstance(k, int) else 2**15 + (k == NGRAM)
        drawn = np.full((draws, SAMPLED_TOKENS), -1, dtype=np.int64)
        with _installed(self.outrider, rounds):
            request = self.outrider.request(self.params, self.prompt)
            given = (self.outrider.build.k[-1], NGRAM) if k == NGRAM else (k, None)
            chooser = self.outrider.chooser(request, *given)
            loop.start(self.prompt, request, chooser, SAMPLED_TOKENS)
            for index in range(draws):
                params = replace(self.params, seed=(self.number << 48) + (way << 32) + index)
                request = self.outrider.request(params, self.prompt)
                text.begin(self.prompt, request, kept=len(self.prompt))
                tokens: list[int] = []
                while len(tokens) < SAMPLED_TOKENS and not set(tokens) & set(request.end_ids):
                    tokens += loop.round(text, SAMPLED_TOKENS - len(tokens)).tokens
                end = next((at + 1 for at, token in enumerate(tokens) if token in request.end_ids), len(tokens))
                drawn[index, :end] = tokens[:end]
                drawn[index, -1] = tokens[end - 1]
                self.progress.advance(1)
        return drawn


def _named(params: SamplingParams) -> str:
    """The settings that are not the usual ones."""
    usual = SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p")
    named = [f"{name} {getattr(params, name)}" for name in names if getattr(params, name) != getattr(usual, name)]
    named += ["rule exact-match"] if params.exact else []
    return ", ".join(named) + (", penalties" if params.repetition_penalty != 1 else "")
