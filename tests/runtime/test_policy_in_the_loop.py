"""k chosen live in the loop: no token depends on it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.early_stop import EarlyStop
from outrider.tests.runtime.policies import NGRAM, adaptive, costs

PROMPT = "Customer: Hi, I would like to book a table for two in San Jose."


def tokens(outrider: Outrider, prompt: str = PROMPT, **asked: Any) -> list[int]:
    given = {name: asked.pop(name) for name in ("k", "drafter") if name in asked}
    params = SamplingParams(**{"max_new_tokens": 90, **asked})
    return [token for event in outrider.generate(prompt, params, **given) for token in event.token_ids]


WAYS: list[dict[str, Any]] = [
    {"k": "auto"},
    {"k": "auto", "drafter": "model"},
    {"k": "auto", "drafter": "ngram"},
    {"k": 1, "drafter": "ngram"},
    {"k": 8, "drafter": "ngram"},
]


HOW: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.4},
]


@pytest.fixture(scope="module")
def plain(trained: Outrider) -> Callable[[int], list[int]]:
    """Plain decoding's text by the number of its parameters."""
    return functools.cache(lambda number: tokens(trained, k=0, **HOW[number]))


@pytest.mark.in_turn(runs=lambda case: (WAYS.index(case["way"]) - HOW.index(case["params"])) % 2 == 0)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("params", HOW, ids=str)
def test_the_text_is_plain_decodings_whatever_was_chosen(
    trained: Outrider, plain: Callable[[int], list[int]], way: dict[str, Any], params: dict[str, Any]
) -> None:
    """A seed fixes the answer, though what is chosen depends on how long rounds took."""
    for _ in range(2):
        assert tokens(trained, **way, **params) == plain(HOW.index(params))


@pytest.mark.parametrize("jitter", [pytest.param(seed, marks=pytest.mark.slow) if seed > 1 else seed for seed in range(6)])
def test_the_times_of_rounds_change_k_and_nothing_else(trained: Outrider, jitter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is ours: rounds seem to take now this long, now that, and k goes up and down; the text stays. The same times
    give the same choices."""
    params = SamplingParams(temperature=0.9, seed=11, max_new_tokens=150)

    def run() -> tuple[list[int], list[int]]:
        """The text, and the tokens drafted in each round."""
        chance, now = random.Random(jitter), [0.0]

        def clock() -> float:
            now[0] += chance.choice([0.001, 0.01, 0.1])
            return now[0]

        monkeypatch.setattr(trained.decoder, "clock", clock)
        monkeypatch.setattr(trained, "policy", trained.adaptive_policy())
        text, drafted = list[int](), [0]
        for event in trained.generate(PROMPT, params):
            text += event.token_ids
            drafted.append(event.stats.drafted)
        return text, [after - before for before, after in pairwise(drafted)]

    text, chosen = run()
    assert text == tokens(trained, k=0, temperature=0.9, seed=11, max_new_tokens=150)
    assert len(set(chosen)) > 2
    assert run() == (text, chosen)


def test_a_seed_with_the_rule_of_rejection_keeps_to_one_k(trained: Outrider) -> None:
    asked: dict[str, Any] = {"temperature": 0.9, "seed": 11, "rule": "rejection"}
    assert tokens(trained, **asked) == tokens(trained, k=trained.default_k, **asked)


def test_ngrams_are_found_in_the_prompt_and_accepted(trained: Outrider) -> None:
    prompt = "Customer: I need a flight. Agent: " * 6
    events = list(trained.generate(prompt, SamplingParams(max_new_tokens=60), k=8, drafter="ngram"))
    stats = events[-1].stats
    assert stats.rounds_by_drafter == {NGRAM: stats.drafting_rounds}
    assert stats.drafting_rounds > 0
    assert stats.accepted_by_drafter[NGRAM] == stats.accepted > 0
    assert sum(stats.histogram) == stats.drafting_rounds
    assert sum(count * at for at, count in enumerate(stats.histogram)) == stats.accepted


def test_a_round_stops_drafting_where_the_draft_is_unsure(trained: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of ours that makes drafting worth while, whatever machine this is."""
    monkeypatch.setattr(trained, "policy", adaptive(costs(draft=0.5), early_stopping=True))
    now = [0.0]

    def clock() -> float:
        now[0] += 0.006
        return now[0]

    monkeypatch.setattr(trained.decoder, "clock", clock)
    asked: list[tuple[float, bool]] = []
    after = EarlyStop.after

    def noted(self: EarlyStop, confidences: Sequence[float]) -> int | None:
        rows = after(self, confidences)
        asked.append((confidences[-1], rows is None))
        return rows

    monkeypatch.setattr(EarlyStop, "after", noted)
    for _ in range(3):
        events = list(trained.generate(PROMPT, SamplingParams(max_new_tokens=120), drafter="model"))
    drafted = events[-1].stats.drafted_at
    assert len(drafted) > 1
    assert drafted[0] > drafted[-1]
    stopped, went_on = ([confidence for confidence, on in asked if on == which] for which in (False, True))
    assert sum(stopped) / len(stopped) < sum(went_on) / len(went_on)
