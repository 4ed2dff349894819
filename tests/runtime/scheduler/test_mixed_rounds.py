"""Rounds in which each sequence has its own drafter and its own number of drafted tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.audit.controls import Watch
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import Choice
from outrider.runtime.policy.policy import Policy, SequenceView
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.rounds import RoundResult, Rounds
from outrider.runtime.scheduler import Scheduler
from outrider.tests.runtime.scheduler.schedules import PROMPTS, Alone, Arrival, check, play

ARRIVALS: list[Arrival] = [(at % 3, at % 5, at // 2 % 5, 20 + at, 9 if at == 4 else None) for at in range(9)]
REPEATED: list[Arrival] = [(0, 3, 0, 40, None), (1, 5, 0, 40, None), (2, 6, 0, 40, None), (2, 3, 1, 40, None)]  # for n-grams


class Mixing(Policy):
    """Lets each sequence draft by the model or by a proposal, in any length."""

    names = ["model"]  # noqa: RUF012

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, sequences: Sequence[SequenceView]) -> Choice:
        return Choice("model", 4)

    def each(self, choice: Choice, sequences: Sequence[SequenceView]) -> list[Choice]:
        return [Choice(self._random.choice([*each.offers] or self.names), self._random.randint(0, 4)) for each in sequences]


@pytest.fixture(scope="module")
def drafted(batched: Outrider, alone: Alone) -> list[tuple[list[int], list[int]]]:
    """Greedy texts, and what the draft model proposed after each in rounds that were checked to be right."""
    seen: list[tuple[list[int], list[int]]] = []
    mixed = [0]
    run = Rounds.run

    def noted(self: Rounds, lanes: list[Lane], *rest: Any, **named: Any) -> list[Any]:
        results = run(self, lanes, *rest, **named)
        mixed[0] += any(lane.steps for lane in lanes) and any(lane.proposed for lane in lanes)
        for lane, result in zip(lanes, results, strict=True):
            if lane.steps and lane.sampling is not None and lane.sampling.greedy and isinstance(result, RoundResult):
                seen.append((list(lane.tokens), result.drafted))
        return results

    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.audit.controls.CHECKED", 1)
        patch.setattr(Rounds, "run", noted)
        for seed, arrivals in enumerate((ARRIVALS, REPEATED, REPEATED)):
            policy = Mixing(seed)
            check(play(Scheduler(batched.observed(watch, policy), policy=policy), arrivals), alone)
        scheduler = Scheduler(batched.observed(watch, Mixing()), policy=Mixing())
        for prompt in (3, 5, 6, 3):  # without a seed, the draft's tokens are judged by rejection, and proposals by exact match
            params = SamplingParams(max_new_tokens=40, temperature=1.0)
            scheduler.submit(batched.text.encode(PROMPTS[prompt], chat=False), params)
        while scheduler.busy:
            scheduler.step()
    assert mixed[0] > 10
    assert watch.checked > 300
    assert watch.disagreed == 0
    return seen


def test_the_draft_proposes_what_it_would_after_reading_the_text_anew(
    drafted: list[tuple[list[int], list[int]]], bundle: Path
) -> None:
    """Whatever others drafted in the rounds before, and in how many of them a sequence drafted nothing."""
    session, same = Outrider.load(bundle).sessions["draft"], 0
    for text, proposed in drafted:
        ids = np.array([text + proposed[:-1]])
        chunks = [session.run(ids[:, at : at + 16], np.array([at]))[0].argmax(-1) for at in range(0, ids.shape[1], 16)]
        same += np.concatenate(chunks)[len(text) - 1 :].tolist() == proposed
    assert len(drafted) > 20
    assert same == len(drafted)
