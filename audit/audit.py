"""`outrider verify`: checks that a bundle emits what its target alone would, and that the checks can detect errors.

1. Arithmetic: the float64 reference agrees with the decisions of the sampler graphs, in plain and in speculative rounds.
2. Greedy: the speculative text is the plain text, for every k; also under the masks of grammars that force, forbid and branch.
3. Batched: if a bundle runs several requests at once, each gets the same text as alone, greedy or with a seed.
4. Sampled: tokens at several places of the text have the same distribution in speculative and in plain decoding.
5. Support: no token is emitted that truncation excludes.
6. Negative controls: the same test detects each of four wrong samplers, and one that accepts every proposal from the host; and
   it passes a second implementation of the right sampler.
7. Counters: every drafted and every emitted token is accounted for.

The first part checks single decisions, so it also detects a graph that is wrong in plain decoding. The fourth detects errors
that no single decision shows, such as drafted tokens that were not drawn from their claimed distribution q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.audit.controls import RandomPolicy, ReferenceWatch, Watch
from outrider.audit.prompts import PROMPTS, REPEATING
from outrider.audit.report import Arithmetic, Audit, Control, Counters, Sampled
from outrider.audit.statistics import Comparison, compare
from outrider.audit.texts import LENGTH, DraftingMode, answers, compare_batched, compare_greedy, count_sampled
from outrider.errors import EngineError
from outrider.progress import SILENT, Progress
from outrider.runtime import drafters
from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import AUTO
from outrider.runtime.rounds.reference import Fault
from outrider.runtime.scheduler import Scheduler

DRAWS = 500
MORE_DRAWS = 4  # factor for a wrong sampler that was not detected
FALSE_ALARM = 1e-4  # probability that a correct bundle fails by chance, over all comparisons together
SAMPLED_TOKENS = 5
PLACES = {"first": 0, "second": 1, "third": 2, "last": -1}  # of the sampled tokens

# High and low temperatures, with and without each kind of truncation, with both rules; each on one prompt.
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
PROPOSED = (SamplingParams(temperature=1.0, rule="rejection"), REPEATING)  # for drafters on the host
# Greedy texts without edits use their own graphs; this text uses the others.
EDITED = (SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5), PROMPTS[0])

# Grammars that force, forbid and branch, for bundles with an end-of-text token.
MASKED = tuple(
    (SamplingParams(structured_outputs=structured), PROMPTS[0])
    for structured in (
        StructuredOutputs(
            choice=["I am sorry to hear that. Please tell me the number of your order.", "I am glad", "We are closed"]
        ),
        StructuredOutputs(regex="[^e]{20,60}"),
        StructuredOutputs(json={"type": "object", "properties": {"order": {"type": "integer"}, "late": {"type": "boolean"}}}),
    )
)
WORDS = SamplingParams(temperature=1.0, rule="rejection", structured_outputs=StructuredOutputs(regex="( [a-z]{1,5}){3,20}"))
MASKED_SAMPLED = ((WORDS, PROMPTS[8]),)

Tokens = npt.NDArray[np.int64]
PromptSettings = tuple[tuple[SamplingParams, str], ...]


class Scope(NamedTuple):
    """The texts and settings that an audit compares."""

    prompts: Sequence[str] = PROMPTS
    masked: PromptSettings = MASKED
    sampled: PromptSettings = SAMPLED
    length: int = LENGTH  # tokens of each text that is compared as a whole
    controls: bool = True  # whether to draw from wrong samplers as well

    def texts(self, settings: Sequence[tuple[SamplingParams, str]]) -> PromptSettings:
        """Return settings for texts of the full length."""
        return tuple((replace(params, max_new_tokens=self.length), text) for params, text in settings)


EVERYTHING = Scope()


class Plan(NamedTuple):
    """The draws at one setting, which are compared with plain decoding."""

    params: SamplingParams
    prompt: str
    modes: Sequence[DraftingMode]
    control: DraftingMode  # for the samplers below
    faults: Sequence[Fault | None]


def plans(outrider: Outrider, scope: Scope) -> list[Plan]:
    """Return the draws of an audit.

    At each setting: every k of the first drafter, all drafters at random, and the default k of other drafters on the device.
    At one setting: the largest k of each drafter on the host.

    Wrong samplers run with the drafter that is accepted most often: with one that is never accepted, some of them are right.
    """
    k, first, on_device = outrider.build.k, outrider.drafters[0], drafters.on_device(outrider.drafters)
    usual = [*(DraftingMode(each, first) for each in k), DraftingMode(AUTO, None)]
    controlled = max(on_device, key=lambda name: outrider.build.acceptance.get(name, 0.0), default=first)
    control = DraftingMode(outrider.default_k, controlled)
    planned = [
        Plan(*setting, usual, control, (None, *Fault) if setting == CONTROLLED and on_device else ())
        for setting in (*scope.sampled, *masked(outrider, MASKED_SAMPLED))
    ]
    for name in outrider.drafters:
        mode = DraftingMode(outrider.default_k if name in on_device else k[-1], name)
        if name not in on_device:
            planned.append(Plan(*PROPOSED, [mode], mode, (None, Fault.ALWAYS_ACCEPT)))
        elif name != first:
            planned += [Plan(*setting, [mode], mode, ()) for setting in scope.sampled]
    return planned if scope.controls else [plan._replace(faults=()) for plan in planned]


def masked(outrider: Outrider, settings: PromptSettings) -> PromptSettings:
    """Return the settings, which have grammars, if the bundle can follow a grammar."""
    return settings if outrider.manifest.generation.eos_token_ids else ()


def audit(outrider: Outrider, *, draws: int = DRAWS, scope: Scope = EVERYTHING, progress: Progress = SILENT) -> Audit:
    """Audit a loaded bundle, using all of its slots. The same bundle on the same machine gives the same report.

    Args:
        draws: sampled texts for each setting and k; more find smaller differences.
        scope: what to compare. A smaller scope proves less.

    Raises:
        EngineError: a run failed.
    """
    _check_capacity(outrider, scope)
    counters, arithmetic, watch = Counters(), Arithmetic(), Watch()
    watched = outrider.observed(watch, RandomPolicy(outrider.adaptive_policy()))
    cases = scope.texts([*((SamplingParams(), text) for text in scope.prompts), *masked(outrider, scope.masked)])
    greedy = compare_greedy(watched, watch, cases, counters, progress)
    count_sampled(watched, watch, scope.texts((*scope.sampled, EDITED)), counters)
    batched = None
    if len(outrider.decoder.slots) > 1:
        drawn = scope.texts((*scope.sampled, *masked(outrider, MASKED_SAMPLED)))
        batched = compare_batched(watched, watch, cases, drawn, counters, progress)
    arithmetic.add(watch)
    planned = plans(outrider, scope)
    compared = sum(len(plan.modes) + (len(plan.modes) > 1) + len(plan.faults) for plan in planned)
    significance = FALSE_ALARM / (2 * len(PLACES) * compared)  # two criteria at each place
    sampled: list[Sampled] = []
    controls: list[Control] = []
    progress.stage("drawing texts", draws * sum(2 + len(plan.modes) + len(plan.faults) for plan in planned))
    for number, plan in enumerate(planned):
        prompt = outrider.text.encode(plan.prompt, chat=False)
        cell = Cell(outrider, plan.params, prompt, number, significance, progress)
        plain = _sample(cell, plan, draws, arithmetic, sampled)
        controls += [_control(cell, plan, fault, draws, plain) for fault in plan.faults]
    return Audit(arithmetic, greedy, batched, sampled, controls, counters)


def _sample(cell: Cell, plan: Plan, draws: int, arithmetic: Arithmetic, sampled: list[Sampled]) -> Tokens:
    """Draw a plan's texts, and compare each mode and all modes together with plain decoding. Return the plain texts."""
    watch = Watch()
    plain = cell.draw(watch, DraftingMode(0, None), 2 * draws)
    drawn = {mode: cell.draw(watch, mode, draws) for mode in plan.modes}
    arithmetic.add(watch)
    name = _named(plan.params)
    sampled += [Sampled(name, _shown(plan, mode), cell.compare(plain, tokens)) for mode, tokens in drawn.items()]
    if len(drawn) > 1:
        sampled.append(Sampled(name, None, cell.compare(plain, np.concatenate(list(drawn.values())))))
    sampled[-1].emitted, sampled[-1].excluded = watch.emitted, watch.excluded
    return plain


def _control(cell: Cell, plan: Plan, fault: Fault | None, draws: int, plain: Tokens) -> Control:
    """Draw texts with a faulty sampler, or with the correct reference, and compare them with the plain texts.

    If the draft's distribution is close to the target's, some faults change little. If a fault is not detected, more texts are
    drawn once.
    """
    watch, drawn = ReferenceWatch(fault), np.empty((0, SAMPLED_TOKENS), dtype=np.int64)
    for total in (draws, MORE_DRAWS * draws):
        drawn = np.concatenate([drawn, cell.draw(watch, plan.control, total - len(drawn), first=len(drawn))])
        comparisons = cell.compare(plain, drawn)
        sample = Sampled(_named(plan.params), _shown(plan, plan.control), comparisons, watch.emitted, watch.excluded)
        control = Control(fault.value if fault else None, sample)
        if control.passed or fault is None:
            break
    return control


def _shown(plan: Plan, mode: DraftingMode) -> int | str:
    """Return the name of a mode in a report: its k, or its drafter if the plan has only one mode."""
    return mode.k if len(plan.modes) > 1 or mode.drafter is None else mode.drafter


def _check_capacity(outrider: Outrider, scope: Scope) -> None:
    needed = max(len(outrider.text.encode(text, chat=False)) for text in (*scope.prompts, REPEATING)) + scope.length
    if needed > outrider.build.capacity:
        raise EngineError(
            f"the audit's texts need a capacity of {needed}; the bundle has {outrider.build.capacity}",
            f"build it with --capacity {needed} or more",
        )


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
        """Compare two samples at each place."""
        return [compare(place, plain[:, at], drawn[:, at], self.significance) for place, at in PLACES.items()]

    def draw(self, watch: Watch, mode: DraftingMode, draws: int, first: int = 0) -> Tokens:
        """Return the tokens of `draws` short texts, [draws, SAMPLED_TOKENS]. Texts that end early are padded with -1, but the
        last column always has the final token.

        Every text has its own seed, across all settings and modes, so the samples are independent. `first` is the number of
        texts drawn before.
        """
        mode_id = 2**15  # k = auto
        if isinstance(mode.k, int):
            mode_id = mode.k + (mode.drafter is not None and 2**10 * self.outrider.drafters.index(mode.drafter))
        if self.outrider.memory is not None:  # with one text that is not drawn, a sampler that copies it is found
            self.outrider.memory.clear()
            answers(Scheduler(self.outrider, k=0), [(self.prompt, SamplingParams(max_new_tokens=SAMPLED_TOKENS))])
        observed = self.outrider.observed(watch, RandomPolicy(self.outrider.adaptive_policy()))
        scheduler = Scheduler(observed, max_waiting=draws, k=mode.k, drafter=mode.drafter)
        drawn = np.full((draws, SAMPLED_TOKENS), -1, dtype=np.int64)
        together = 1 if mode.k == AUTO else 8 * len(observed.decoder.slots)  # only a sequence alone stops drafting early
        for begin in range(0, draws, together):
            rows = range(begin, min(begin + together, draws))
            seeds = [(self.number << 48) + (mode_id << 32) + first + row for row in rows]
            params = [replace(self.params, seed=seed, max_new_tokens=SAMPLED_TOKENS) for seed in seeds]
            for row, answer in zip(rows, answers(scheduler, [(self.prompt, each) for each in params]), strict=True):
                drawn[row, : len(answer.tokens)] = answer.tokens
                drawn[row, -1] = answer.tokens[-1]
            self.progress.advance(len(rows))
        return drawn


def _named(params: SamplingParams) -> str:
    """Return the settings that differ from the defaults, as text."""
    usual = SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p")
    named = [f"{name} {getattr(params, name)}" for name in names if getattr(params, name) != getattr(usual, name)]
    named += ["rule exact-match"] if params.exact else []
    named += ["a grammar"] if params.structured_outputs is not None else []
    return ", ".join(named) + (", penalties" if params.repetition_penalty != 1 else "")
