"""Policies, costs and texts for the tests of what is chosen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.audit.controls import RandomPolicy
from outrider.bench.simulator import Trace
from outrider.bundle.manifest import Cost
from outrider.runtime.drafters.base import Proposal, Reading
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.drafters.parallel import ParallelDrafter
from outrider.runtime.generation import Outrider
from outrider.runtime.policy.acceptance import Acceptance, DraftedBy
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import NONE, Choice
from outrider.runtime.policy.policy import Observation, Offer, Policy, SequenceView
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.rounds.rounds import RoundResult

K = [1, 2, 4, 8]
MODEL, NGRAM, GRAMMAR = "model", "ngram", "grammar"


@contextmanager
def short_windows() -> Iterator[None]:
    """Let drafts that are loaded here read only the end of short texts, too."""
    with pytest.MonkeyPatch.context() as patched:
        for kind in (ModelDrafter, ParallelDrafter):
            patched.setattr(kind, "windows", (16, 24))
        yield


@contextmanager
def policy_at_random(outrider: Outrider) -> Iterator[None]:
    """Choose the drafter and k of each round at random."""
    usual, outrider.policy = outrider.policy, RandomPolicy(outrider.adaptive_policy())
    try:
        yield
    finally:
        outrider.policy = usual


def costs(draft: float = 1.0, row: float = 0.1, target: float = 6.0, acceptance: float | None = None) -> RoundCosts:
    """A pass of the target takes `target` and `row` more for each further row."""

    def table(of: Callable[[int], float]) -> list[Cost]:
        return [
            Cost(rows=rows, window=64, batch=1, median=of(rows), fastest=of(rows), slowest=of(rows), runs=1)
            for rows in (1, 2, 3, 5, 9, 16)
        ]

    made = {"target": table(lambda rows: target + row * (rows - 1)), "draft": table(lambda rows: draft * (1 + 0.01 * rows))}
    build: Any = SimpleNamespace(
        k=K, max_prompt_chunk=16, windows=[64], costs=made, acceptance={} if acceptance is None else {MODEL: acceptance}
    )
    models = {"target": SimpleNamespace(parameters=6), "draft": SimpleNamespace(parameters=1)}
    manifest: Any = SimpleNamespace(models=models)
    return RoundCosts(manifest, build)


def adaptive(table: RoundCosts, names: Sequence[str] = (MODEL,), early_stopping: bool = False) -> AdaptivePolicy:
    return AdaptivePolicy(lambda _: table, names, early_stopping)


def view(
    policy: Policy,
    length: int = 40,
    remaining: int = 1000,
    *,
    pending: int = 0,
    matched: int = 0,
    emitted: int = 1,
    acceptance: dict[DraftedBy, Acceptance] | None = None,
) -> SequenceView:
    """A sequence for which the draft model has to catch up with `pending` tokens, and n-grams have `matched` tokens."""
    offers = {MODEL: Offer([Reading(0, pending)], None)} if MODEL in policy.names else {}
    if matched:
        offers[NGRAM] = Offer([Reading(0, 0)], Proposal(list(range(1, 9)), matched))
    return SequenceView(length, emitted, remaining, True, offers, policy.begin() if acceptance is None else acceptance)


def observe(policy: Policy, choice: Choice, sequence: SequenceView, drafted: int, accepted: int, milliseconds: float) -> None:
    result = RoundResult(choice.drafter if drafted else NONE, [0] * drafted, [0] * (accepted + 1), None)
    policy.observe(Observation(choice, [sequence], [result], milliseconds))


def text(agrees: list[bool], prompt: int = 40) -> Trace:
    """A text in which no n-gram comes twice."""
    start = prompt + 10
    return Trace(
        "", list(range(prompt)), list(range(start, start + len(agrees))), {"model": agrees}, {"model": [0.5] * len(agrees)}
    )


def flips(rate: float, count: int = 400, seed: int = 0) -> list[bool]:
    chance = random.Random(seed)
    return [chance.random() < rate for _ in range(count)]
