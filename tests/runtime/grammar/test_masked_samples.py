"""Sampling under a grammar's mask: the distribution of choices, and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.reference import named_settings, warp
from outrider.runtime.rounds.sampling import SamplingState
from outrider.tests.runtime.grammar.grammars import NOTHING, run, text
from outrider.tests.support import prefill

CHOICES = [" I", " We", " The", " Yes", " No"]
CHOSEN = {
    "choices": StructuredOutputs(choice=CHOICES),
    "a dead end": StructuredOutputs(grammar=f'start: " I" | " We" NOTHING | " The" | " Yes" | " No"\n{NOTHING}'),
}
FAILED = "(a dead end)"
BEFORE, HEAT = "the quick", 0.2  # the tiny pair is random: at a higher temperature the choices would be nearly as likely


def distribution(outrider: Outrider, k: int, structured: StructuredOutputs, heat: float = HEAT) -> list[int]:
    """How often each choice is drawn with 600 seeds, and how often none is."""
    drawn = []
    for seed in range(600):
        params = SamplingParams(temperature=heat, max_new_tokens=12, seed=seed, rule="rejection", structured_outputs=structured)
        try:
            drawn.append(text(list(outrider.generate(BEFORE, params, k=k))))
        except GrammarError:
            drawn.append(FAILED)
    return [drawn.count(each) for each in [*CHOICES, FAILED]]


def expected(outrider: Outrider, structured: StructuredOutputs) -> list[float]:
    """The probability of each choice under the mask, and of none: the product of its tokens' masked probabilities, over all
    spellings."""
    state = SamplingState(SamplingParams(temperature=HEAT), [], [], outrider.vocab_rows)
    prompt = outrider.text.encode(BEFORE, chat=False)
    session = outrider.engines.sessions(1)["target"]
    chances = dict.fromkeys([*CHOICES, FAILED], 0.0)
    waiting: list[tuple[list[int], float]] = [([], 1.0)]
    ends = outrider.manifest.generation.eos_token_ids
    while waiting:
        answer, chance = waiting.pop()
        matcher = outrider.grammars.begin(structured)
        try:
            matcher.advance(answer)
            (allowed,), _ = matcher.masks([])
        except GrammarError:
            chances[FAILED] += chance
            continue
        prefill(session, (prompt + answer)[:-1], 16)
        last = np.array([(prompt + answer)[-1:]], dtype=np.int64)
        logits = session.run(last, np.array([len(prompt + answer) - 1]))[0, 0].astype(np.float64)
        p = warp(np.where(allowed, logits, -np.inf), named_settings(state.settings[0]))
        for token in np.flatnonzero(p > 0).tolist():
            if token in ends:
                chances[outrider.text.decode(answer)] += chance * p[token]
            else:
                waiting.append(([*answer, token], chance * p[token]))
    return [*chances.values()]


def likely(seen: list[int], want: list[float]) -> float:
    """How likely counts are that differ from their expectation as much."""
    assert sum(want) == pytest.approx(1, abs=1e-5)
    drawn = [(each, chance) for each, chance in zip(seen, want, strict=True) if chance]
    assert sum(each for each, _ in drawn) == sum(seen)
    return float(
        scipy.stats.chisquare([each for each, _ in drawn], [chance / sum(want) * sum(seen) for _, chance in drawn]).pvalue
    )


@pytest.mark.in_turn(runs=lambda case: case["k"] == 4)
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("k", [0, 1, 4])
def test_sampled_choices_have_the_targets_distribution_under_the_mask(tiny: Outrider, k: int, name: str) -> None:
    want = expected(tiny, CHOSEN[name])
    assert (want[-1] > 0) == (name == "a dead end")
    assert likely(distribution(tiny, k, CHOSEN[name]), want) > 1e-4


@pytest.mark.parametrize("name", CHOSEN)
def test_the_test_of_the_distribution_notices_a_wrong_one(tiny: Outrider, name: str) -> None:
    """The negative control: at another temperature the same test must fail."""
    want = expected(tiny, CHOSEN[name])
    assert likely(distribution(tiny, 4, CHOSEN[name], heat=0.5 * HEAT), want) < 1e-4


def test_logprobs_are_among_the_tokens_that_the_grammar_allows(bundles: dict[str, Outrider]) -> None:
    events = run(bundles["trained"], "branches", 4, logprobs=20)
    for event in events:
        for token, logprobs in zip(event.token_ids, event.logprobs or (), strict=True):
            assert np.isfinite(logprobs.logprob)
            assert token in [each for each, _ in logprobs.top]
            assert sum(np.exp(value) for _, value in logprobs.top) == pytest.approx(1, abs=1e-3)
