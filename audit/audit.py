"""`outrider verify`: evidence that a bundle emits what its target alone would, and that the evidence means something.

1. Arithmetic: what the sampler graphs decide, in plain and in speculative rounds, the float64 reference decides too.
2. Greedy: the speculative text is the plain text, for every k.
3. Sampled: tokens at several places of the text, speculative against plain, are of one distribution.
4. Support: no token is emitted that truncation excludes.
5. Negative controls: the same test finds each of four wrong samplers, and passes the right one written down again.
6. Counters: every drafted and every emitted token is accounted for.

The first looks at one decision at a time, so it sees a wrong graph that is wrong in plain decoding too; the third sees
what no single decision shows, such as drafted tokens that were not drawn from the q that they claim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from outrider.audit.controls import ReferenceRounds, Restless, WatchedRounds
from outrider.audit.prompts import PROMPTS
from outrider.audit.report import Arithmetic, Audit, Control, Counters, Greedy, NearTie, Sampled
from outrider.audit.statistics import Comparison, compare
from outrider.engines.errors import EngineError
from outrider.engines.progress import SILENT, Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.loop import prefill
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy import AUTO, MODEL, NGRAM
from outrider.runtime.reference import Fault

DRAWS = 500
FALSE_ALARM = 1e-4  # probability that a right bundle fails on chance, over all comparisons together
GREEDY_TOKENS = 64  # of each prompt's continuation
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
# What greedy texts without edits leave out: those have graphs of their own.
EDITED = (SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5), PROMPTS[0])

Tokens = npt.NDArray[np.int64]
Watched = TypeVar("Watched", bound=WatchedRounds)


def audit(outrider: Outrider, *, draws: int = DRAWS, progress: Progress = SILENT) -> Audit:
    """Audit a loaded bundle. The same bundle on the same machine gives the same report.

    Args:
        draws: sampled texts for each setting and k; more find smaller differences.

    Raises:
        EngineError: a run failed.
    """
    _check_capacity(outrider)
    counters, arithmetic = Counters(), Arithmetic()
    with _installed(outrider, _made(WatchedRounds, outrider)) as watched:
        greedy = _greedy(outrider, watched, counters, progress)
        _count_sampled(outrider, watched, counters)
    arithmetic.add(watched)
    compared = len(SAMPLED) * (len(outrider.build.k) + 2) + 1 + len(Fault)
    significance = FALSE_ALARM / (2 * len(PLACES) * compared)  # two criteria at each place
    sampled, controls = [], []
    progress.stage("drawing texts", draws * (compared + len(SAMPLED)))
    for number, (params, text) in enumerate(SAMPLED):
        cell = Cell(outrider, params, outrider.text.encode(text, chat=False), number, significance, progress)
        watched = _made(WatchedRounds, outrider)
        plain = cell.draw(watched, 0, 2 * draws)
        ways: list[int | str] = [*outrider.build.k, AUTO]
        drawn = {k: cell.draw(watched, k, draws) for k in ways}
        arithmetic.add(watched)
        sampled += [Sampled(_named(params), k, cell.compare(plain, tokens)) for k, tokens in drawn.items()]
        together = cell.compare(plain, np.concatenate(list(drawn.values())))
        sampled.append(Sampled(_named(params), None, together, watched.emitted, watched.excluded))
        if (params, text) == CONTROLLED and MODEL in outrider.drafters:
            for fault in (None, *Fault):
                faulty = _made(ReferenceRounds, outrider)
                faulty.fault = fault
                found = cell.compare(plain, cell.draw(faulty, outrider.default_k, draws))
                sample = Sampled(_named(params), outrider.default_k, found, faulty.emitted, faulty.excluded)
                controls.append(Control(fault.value if fault else None, sample))
    return Audit(arithmetic, greedy, sampled, controls, counters)


def _check_capacity(outrider: Outrider) -> None:
    needed = max(len(outrider.text.encode(text, chat=False)) for text in PROMPTS) + GREEDY_TOKENS
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


def _greedy(outrider: Outrider, watched: WatchedRounds, counters: Counters, progress: Progress) -> Greedy:
    found = Greedy()
    progress.stage("comparing greedy texts", len(PROMPTS) * (1 + len(_ways(outrider))))
    params = SamplingParams(max_new_tokens=GREEDY_TOKENS)
    for text in PROMPTS:
        prompt = outrider.text.encode(text, chat=False)
        plain = _generate(outrider, watched, prompt, params, (0, None), counters)
        progress.advance(1)
        for way in _ways(outrider):
            found.compared += 1
            answer = _generate(outrider, watched, prompt, params, way, counters)
            progress.advance(1)
            if answer == plain:
                continue
            place = next(at for at, (one, other) in enumerate(zip_longest(plain, answer)) if one != other)
            ours, theirs = (tokens[place] if place < len(tokens) else -1 for tokens in (plain, answer))
            k, drafter = way
            choices = _choices(
                outrider, prompt + plain[:place], len(prompt), k if isinstance(k, int) else max(outrider.build.k)
            )
            tie = NearTie(text, f"{drafter}, k = {k}", place, ours, theirs)
            (found.near_ties if {ours, theirs} <= choices else found.differences).append(tie)
    return found


def _choices(outrider: Outrider, context: list[int], start: int, k: int) -> set[int]:
    """The target's most likely tokens after a context, in any row of any pass that plain decoding or a round of at most k
    drafted tokens may make; all passes from the prompt's end on have as many rows."""
    session = outrider.sessions["target"]
    found = set()
    for rows in {1, *(size + 1 for size in outrider.build.k if size <= k)}:
        for row in range(rows):
            end = len(context) + rows - 1 - row
            if end > session.capacity:
                continue
            first = start - 1 + (end - start + 1) % rows
            padded = context + context[-1:] * (end - len(context))
            prefill(session, context[:first], outrider.build.max_prompt_chunk)
            for at in range(first, end, rows):
                logits = session.run(np.array([padded[at : at + rows]], dtype=np.int64), np.array([at], dtype=np.int64))
            found.add(int(logits[0, row].argmax()))
    return found


def _count_sampled(outrider: Outrider, watched: WatchedRounds, counters: Counters) -> None:
    """Some sampled texts by the public interface, for the counters' sake, with logprobs; and greedy ones with edits."""
    for params, text in (*SAMPLED, EDITED):
        prompt = outrider.text.encode(text, chat=False)
        for seed, way in enumerate(_ways(outrider)):
            asked = replace(params, max_new_tokens=GREEDY_TOKENS, seed=seed, logprobs=3)
            _generate(outrider, watched, prompt, asked, way, counters)


def _ways(outrider: Outrider) -> list[tuple[int | str, str | None]]:
    """Every k of the draft model, n-grams, and all of these in turn: as `Outrider.generate` takes them."""
    model: list[tuple[int | str, str | None]] = [(k, MODEL) for k in outrider.build.k if MODEL in outrider.drafters]
    return [*model, (outrider.build.k[-1], NGRAM), (AUTO, AUTO)]


def _generate(
    outrider: Outrider,
    watched: WatchedRounds,
    prompt: list[int],
    params: SamplingParams,
    way: tuple[int | str, str | None],
    counters: Counters,
) -> list[int]:
    """One generation's tokens. What each verifying pass was given and emitted says what the counters must be."""
    tokens: list[int] = []
    drafted = accepted = rejected = 0
    balanced = True
    watched.decided.clear()
    for event in outrider.generate(prompt, params, k=way[0], drafter=way[1]):
        checked, emitted = watched.decided[-1]
        kept = min(len(emitted) - 1, len(event.token_ids))
        own = len(event.token_ids) - kept
        balanced &= list(event.token_ids) == emitted[: len(event.token_ids)]
        balanced &= event.from_draft == (True,) * kept + (False,) * own
        balanced &= len(event.token_ids) == len(emitted) or event.finish_reason is not None
        tokens += event.token_ids
        drafted, accepted = drafted + checked, accepted + kept
        rejected += own if len(emitted) - 1 < checked else 0
    stats = event.stats
    own = len(tokens) - accepted
    balanced &= stats.rounds == len(watched.decided) and stats.drafted == drafted == sum(stats.drafted_at)
    balanced &= (stats.accepted, stats.rejected, stats.own) == (accepted, rejected, own)
    balanced &= stats.unexamined == drafted - accepted - rejected >= 0 and stats.emitted == len(tokens)
    counters.generations += 1
    counters.unbalanced += not balanced
    counters.drafted += drafted
    counters.accepted += accepted
    counters.rejected += rejected
    counters.unexamined += stats.unexamined
    counters.emitted += len(tokens)
    counters.own += own
    return tokens


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
        way = k if isinstance(k, int) else 2**15
        drawn = np.full((draws, SAMPLED_TOKENS), -1, dtype=np.int64)
        with _installed(self.outrider, rounds):
            request = self.outrider.request(self.params, self.prompt)
            chooser = self.outrider.chooser(request, k, None)
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
