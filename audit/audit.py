"""`outrider verify`: evidence that a bundle emits what its target alone would, and that the evidence means something.

1. Greedy: the speculative text is the plain text, for every k.
2. Sampled: tokens at several places of the text, speculative against plain, are of one distribution.
3. Support: no token is emitted that truncation excludes.
4. Negative controls: the same test finds each of four wrong samplers, and passes the right one written down again.
5. Counters: every drafted and every emitted token is accounted for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from outrider.audit.controls import ReferenceSampler, WatchedSampler
from outrider.audit.prompts import PROMPTS
from outrider.audit.reference import Fault
from outrider.audit.report import Audit, Control, Counters, Greedy, NearTie, Sampled
from outrider.audit.statistics import Comparison, compare
from outrider.engines.progress import SILENT, Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.loop import prefill
from outrider.runtime.params import SamplingParams

DRAWS = 500
FALSE_ALARM = 1e-4  # probability that a right bundle fails on chance, over all comparisons together
GREEDY_TOKENS = 64  # of each prompt's continuation
SAMPLED_TOKENS = 5
PLACES = {"first": 0, "second": 1, "third": 2, "last": -1}  # of the sampled tokens

# Hot and cold, with and without each kind of truncation, by both rules; each on one of the prompts.
SAMPLED = (
    (SamplingParams(temperature=0.7), PROMPTS[4]),
    (SamplingParams(temperature=0.7, top_p=0.9), PROMPTS[8]),
    (SamplingParams(temperature=1.0, top_k=20), PROMPTS[2]),
    (SamplingParams(temperature=1.3, top_p=0.95, min_p=0.05), PROMPTS[6]),
    (SamplingParams(temperature=1.0, rule="exact-match"), PROMPTS[0]),
)
CONTROLLED = SAMPLED[1]

Tokens = npt.NDArray[np.int64]


def audit(outrider: Outrider, *, draws: int = DRAWS, progress: Progress = SILENT) -> Audit:
    """Audit a loaded bundle. The same bundle on the same machine gives the same report.

    Args:
        draws: sampled texts for each setting and k; more find smaller differences.

    Raises:
        EngineError: a run failed.
    """
    counters = Counters()
    greedy = _greedy(outrider, counters, progress)
    _count_sampled(outrider, counters)
    compared = len(SAMPLED) * (len(outrider.build.k) + 1) + 1 + len(Fault)
    significance = FALSE_ALARM / (2 * len(PLACES) * compared)  # two criteria at each place
    sampled, controls = [], []
    progress.stage("drawing texts", draws * (compared + len(SAMPLED)))
    for number, (params, text) in enumerate(SAMPLED):
        cell = Cell(outrider, params, outrider.text.encode(text, chat=False), number, significance, progress)
        watched = cell.watched()
        plain = cell.draw(watched, 0, 2 * draws)
        drawn = {k: cell.draw(watched, k, draws) for k in outrider.build.k}
        sampled += [Sampled(_named(params), k, cell.compare(plain, tokens)) for k, tokens in drawn.items()]
        together = cell.compare(plain, np.concatenate(list(drawn.values())))
        sampled.append(Sampled(_named(params), None, together, watched.emitted, watched.excluded))
        if (params, text) == CONTROLLED:
            for fault in (None, *Fault):
                faulty = cell.reference(fault)
                found = cell.compare(plain, cell.draw(faulty, outrider.default_k, draws))
                sample = Sampled(_named(params), outrider.default_k, found, faulty.emitted, faulty.excluded)
                controls.append(Control(fault.value if fault else None, sample))
    return Audit(greedy, sampled, controls, counters)


def _greedy(outrider: Outrider, counters: Counters, progress: Progress) -> Greedy:
    found = Greedy()
    progress.stage("comparing greedy texts", len(PROMPTS) * (1 + len(outrider.build.k)))
    params = SamplingParams(max_new_tokens=GREEDY_TOKENS)
    for text in PROMPTS:
        prompt = outrider.text.encode(text, chat=False)
        plain = _generate(outrider, prompt, params, 0, counters)
        progress.advance(1)
        for k in outrider.build.k:
            found.compared += 1
            answer = _generate(outrider, prompt, params, k, counters)
            progress.advance(1)
            if answer == plain:
                continue
            place = next(at for at in range(len(plain) + 1) if plain[at : at + 1] != answer[at : at + 1])
            context = prompt + plain[:place]
            choices = {_choice(outrider, context, len(prompt), rows) for rows in (1, k + 1)}
            tie = NearTie(text, k, place, plain[place], answer[place])
            (found.near_ties if choices == {plain[place], answer[place]} else found.differences).append(tie)
    return found


def _choice(outrider: Outrider, context: list[int], start: int, rows: int) -> int:
    """The target's most likely token after a context of which all from `start` on was read in passes of `rows` rows."""
    session = outrider.sessions["target"]
    first = start - 1 + (len(context) - start + 1) % rows
    prefill(session, context[:first], outrider.build.max_prompt_chunk)
    for at in range(first, len(context), rows):
        logits = session.run(np.array([context[at : at + rows]], dtype=np.int64), np.array([at], dtype=np.int64))
    return int(logits[0, -1].argmax())


def _count_sampled(outrider: Outrider, counters: Counters) -> None:
    """Some sampled texts by the public interface, for the counters' sake."""
    for params, text in SAMPLED:
        prompt = outrider.text.encode(text, chat=False)
        for k in outrider.build.k:
            _generate(outrider, prompt, replace(params, max_new_tokens=GREEDY_TOKENS, seed=k), k, counters)


def _generate(outrider: Outrider, prompt: list[int], params: SamplingParams, k: int, counters: Counters) -> list[int]:
    """One generation's tokens; its counters are counted again from what its events show."""
    tokens: list[int] = []
    drafted = accepted = rejected = unexamined = 0
    balanced = True
    for event in outrider.generate(prompt, params, k=k):
        tokens += event.token_ids
        checked = event.stats.drafted - drafted
        kept = sum(event.from_draft)
        own = len(event.token_ids) - kept
        refused = own if kept < checked else 0
        balanced &= own == 1 or (own == 0 and event.finish_reason is not None)
        balanced &= kept + refused <= checked
        drafted, accepted, rejected = drafted + checked, accepted + kept, rejected + refused
        unexamined += checked - kept - refused
    stats = event.stats
    balanced &= (stats.accepted, stats.rejected, stats.unexamined) == (accepted, rejected, unexamined)
    balanced &= stats.drafted == accepted + rejected + unexamined == sum(stats.drafted_at)
    balanced &= stats.emitted == len(tokens) == accepted + stats.own
    counters.generations += 1
    counters.unbalanced += not balanced
    counters.drafted += drafted
    counters.accepted += accepted
    counters.rejected += rejected
    counters.unexamined += unexamined
    counters.emitted += len(tokens)
    counters.own += stats.own
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

    def watched(self) -> WatchedSampler:
        """The bundle's own samplers."""
        return WatchedSampler(self.outrider.samplers, self.outrider.vocab_rows, self.outrider.build.k[-1] + 1)

    def reference(self, fault: Fault | None) -> ReferenceSampler:
        """The reference, with that fault."""
        sampler = ReferenceSampler(self.outrider.samplers, self.outrider.vocab_rows, self.outrider.build.k[-1] + 1)
        sampler.fault = fault
        return sampler

    def compare(self, plain: Tokens, drawn: Tokens) -> list[Comparison]:
        """Both samples at each place."""
        return [compare(place, plain[:, at], drawn[:, at], self.significance) for place, at in PLACES.items()]

    def draw(self, sampler: WatchedSampler, k: int, draws: int) -> Tokens:
        """The tokens of so many short texts, [draws, SAMPLED_TOKENS]; after an early end stand -1 and, last, the end.

        Every text has a seed of its own, also across settings and k, so the samples are independent.
        """
        loop = self.outrider.loop
        usual, loop.sampler = loop.sampler, sampler
        drawn = np.full((draws, SAMPLED_TOKENS), -1, dtype=np.int64)
        try:
            loop.start(self.prompt, self.outrider.request(self.params, self.prompt), k)
            for index in range(draws):
                params = replace(self.params, seed=(self.number << 48) + (k << 32) + index)
                request = self.outrider.request(params, self.prompt)
                loop.restart(self.prompt, request)
                tokens: list[int] = []
                while len(tokens) < SAMPLED_TOKENS and not set(tokens) & set(request.end_ids):
                    tokens += loop.round(k, SAMPLED_TOKENS - len(tokens)).tokens
                end = next((at + 1 for at, token in enumerate(tokens) if token in request.end_ids), len(tokens))
                drawn[index, :end] = tokens[:end]
                drawn[index, -1] = tokens[end - 1]
                self.progress.advance(1)
        finally:
            loop.sampler = usual
        return drawn


def _named(params: SamplingParams) -> str:
    """The settings that are not the usual ones."""
    usual = SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "rule")
    return ", ".join(f"{name} {getattr(params, name)}" for name in names if getattr(params, name) != getattr(usual, name))
