"""The distribution of what the whole loop samples, on real sessions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats

from outrider.audit.controls import ReferenceWatch
from outrider.audit.texts import answers
from outrider.bundle.manifest import Generation
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.reference import Fault, named_settings, warp
from outrider.runtime.rounds.sampling import SamplingState
from outrider.runtime.scheduler import Scheduler
from outrider.tests.support import prefill, reseal

Doubles = npt.NDArray[np.float64]

# Against the exact distribution of the first three tokens, computed from the target's logits alone. If the loop is right,
# a p-value is below FALSE_ALARM with that probability; the seeds are fixed.
FALSE_ALARM = 1e-6
DRAWS = 1500
CHOSEN: dict[str, Any] = {"temperature": 0.12, "top_k": 40}  # the tiny pair is random: without this it would be nearly uniform


@pytest.fixture(scope="module")
def endless(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Outrider:
    """The tiny pair, without a token that ends the text."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("endless") / "bundle"))
    reseal(bundle, generation=Generation(eos_token_ids=[], special_tokens={}))
    return Outrider.load(bundle)


@pytest.fixture(scope="module")
def exact(endless: Outrider) -> tuple[list[int], Doubles, Doubles, Doubles]:
    """A prompt, and the exact distributions of the first three tokens after it, over all that may come before them."""
    prompt = endless.text.encode("the quick", chat=False)
    session = endless.sessions["target"]
    settings = named_settings(SamplingState(SamplingParams(**CHOSEN), prompt, [], endless.vocab_rows).settings[0])

    def after(token: int, at: int) -> Doubles:
        logits = session.run(np.array([[token]]), np.array([at]))
        return warp(logits[0, 0].astype(np.float64), settings)

    prefill(session, prompt[:-1], 16)
    first = after(prompt[-1], len(prompt) - 1)
    second, third = np.zeros(len(first)), np.zeros(len(first))
    for token, share in enumerate(first):
        if share > 0:
            then = after(token, len(prompt))
            second += share * then
            for other, part in enumerate(then):
                if part > 0:
                    third += share * part * after(other, len(prompt) + 1)
    return prompt, first, second, third


def drawn(outrider: Outrider, prompt: list[int], k: int, rule: str, seeds: range = range(DRAWS)) -> Doubles:
    """Draw texts by one scheduler. The draft has read the prompt, which its caches keep, so it drafts the first token, too."""
    params = [SamplingParams(max_new_tokens=3, seed=10_000 * k + index, rule=rule, **CHOSEN) for index in seeds]
    scheduler = Scheduler(outrider, max_waiting=len(params), k=k)
    return np.array([answer.tokens for answer in answers(scheduler, [(prompt, each) for each in params])])


def p_value(tokens: Doubles, p: Doubles) -> float:
    counts = np.bincount(tokens, minlength=len(p))
    if counts[p == 0].any():
        return 0.0
    common = p * len(tokens) >= 5
    observed, expected = (np.append(each[common], each[~common].sum()) for each in (counts, p * len(tokens)))
    known = expected > 0
    return float(scipy.stats.chisquare(observed[known], expected[known]).pvalue)


# Plain decoding and that by exact matches emit the same tokens, one by one: see test_sampling.py. Whole audits draw with k = 4.
@pytest.mark.in_turn(runs=lambda case: case["k"] == 1 and case["rule"] == "rejection")
@pytest.mark.parametrize(("k", "rule"), [(0, "rejection"), (1, "rejection"), (4, "rejection"), (4, "exact-match")])
def test_the_loop_emits_the_targets_distribution(endless: Outrider, exact: Any, k: int, rule: str) -> None:
    prompt, *distributions = exact
    tokens = drawn(endless, prompt, k, rule)
    for at, p in enumerate(distributions):
        assert p_value(tokens[:, at], p) > FALSE_ALARM


@pytest.mark.parametrize("fault", Fault)
def test_the_same_test_finds_each_wrong_sampler(endless: Outrider, exact: Any, fault: Fault) -> None:
    """With as few of its draws as show it."""
    prompt, *distributions = exact
    faulty, drew = endless.observed(ReferenceWatch(fault)), list[Doubles]()
    for first in range(0, DRAWS, DRAWS // 10):
        drew.append(drawn(faulty, prompt, 4, "rejection", range(first, first + DRAWS // 10)))
        tokens = np.concatenate(drew)
        if min(p_value(tokens[:, at], p) for at, p in enumerate(distributions)) < FALSE_ALARM / 1000:
            return
    pytest.fail("not found")
