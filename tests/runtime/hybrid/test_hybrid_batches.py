"""The same promise with many requests at once: the states of slots, and snapshots that others continue from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.audit.controls import RandomPolicy
from outrider.errors import EngineError, OutriderError
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.rounds import Rounds
from outrider.runtime.scheduler import Scheduler
from outrider.tests.runtime.hybrid.hybrids import CHUNK, SHORT, WHOLE, alone
from outrider.tests.runtime.test_golden import FEW, PROMPTS
from outrider.tests.support import Made

SAMPLED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, repetition_penalty=1.2),
]


@pytest.fixture(scope="module", params=[pytest.param("int4", marks=pytest.mark.slow), WHOLE, SHORT])
def batched(request: pytest.FixtureRequest, bundles: Made[Path]) -> tuple[Outrider, Outrider]:
    """A bundle with all of its slots, and with one."""
    return Outrider.load(bundles[request.param], slots=None), Outrider.load(bundles[request.param])


def answer(scheduler: Scheduler, requests: list[tuple[list[int], SamplingParams]], cancelled: set[int]) -> list[list[int]]:
    """Serve requests, some of which are cancelled after a few tokens, and return the texts."""
    submitted = [scheduler.submit(prompt, params) for prompt, params in requests]
    texts: list[list[int]] = [[] for _ in requests]
    while scheduler.busy:
        for request, event in scheduler.step():
            if isinstance(event, OutriderError):
                raise event
            index = submitted.index(request)
            texts[index] += getattr(event, "token_ids", [])
            if index in cancelled and len(texts[index]) > 5:
                scheduler.cancel(request)
    return texts


@pytest.mark.parametrize("policy", ["auto", "at random"])
def test_many_at_once_get_what_each_gets_alone(batched: tuple[Outrider, Outrider], policy: str) -> None:
    """With requests that come and go, prompts longer than a chunk, and texts that continue where another one ended."""
    many, single = batched
    if policy == "at random":
        many.policy = RandomPolicy(many.adaptive_policy())
    prompts = [many.text.encode(PROMPTS[name], chat=False) for name in FEW]
    requests = [
        (prompts[index % len(prompts)], replace(SAMPLED[index % len(SAMPLED)], max_new_tokens=20 + 3 * index))
        for index in range(8)
    ]
    scheduler = Scheduler(many, max_waiting=16)
    texts = answer(scheduler, requests, cancelled={1, 4})
    for index, ((prompt, params), text) in enumerate(zip(requests, texts, strict=True)):
        want = alone(single, prompt, params)
        assert text == want[: len(text)]
        assert index in (1, 4) or len(text) == len(want)
    # What a slot holds can be continued only at the end of its text.
    (prompt, params), text = requests[-1], texts[-1]
    longer = prompt + text + prompts[0]
    again = scheduler.submit(longer, SamplingParams(max_new_tokens=12))
    branch = scheduler.submit(prompt[:3] + prompts[1], SamplingParams(max_new_tokens=12))
    got: dict[int, list[int]] = {id(again): [], id(branch): []}
    while scheduler.busy:
        for request, event in scheduler.step():
            got[id(request)] += getattr(event, "token_ids", [])
    assert got[id(again)] == alone(single, longer, SamplingParams(max_new_tokens=12))
    assert got[id(branch)] == alone(single, prompt[:3] + prompts[1], SamplingParams(max_new_tokens=12))
    assert again.stats.cached_tokens == len(prompt) + len(text) - 1
    assert branch.stats.cached_tokens == 0


def test_a_failed_round_is_run_again_for_each_request_alone(
    batched: tuple[Outrider, Outrider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state before the round is gone, so the texts are read again."""
    many, single = batched
    run = Rounds.run
    failures: list[int] = []

    def failing(self: Rounds, lanes: Sequence[Lane], *rest: Any, **named: Any) -> object:
        results = run(self, lanes, *rest, **named)
        if len(lanes) > 1 and len(lanes[0].tokens) > 50 and not failures:
            failures.append(len(lanes))
            raise EngineError("it broke", "hint it")
        return results

    monkeypatch.setattr(Rounds, "run", failing)
    requests = [(many.text.encode(PROMPTS[name], chat=False), SamplingParams(max_new_tokens=60)) for name in FEW]
    texts = answer(Scheduler(many, k=2), requests, cancelled=set())
    assert failures
    assert texts == [alone(single, *request) for request in requests]


SYSTEM = PROMPTS["longer than a chunk"]
USERS = ("Then", "But the dog", "Customer: Hi", "Question: Tom has 5 apples. How many")


def prefixed(many: Outrider) -> list[tuple[list[int], SamplingParams]]:
    """Requests whose prompts begin with the same tokens."""
    return [
        (many.text.encode(SYSTEM + user, chat=False), replace(params, max_new_tokens=20))
        for user, params in zip(USERS, [*SAMPLED, SAMPLED[0]], strict=True)
    ]


@pytest.mark.in_turn(runs=lambda case: case["batched"] in ("fp32", SHORT) or case["k"] in (0, "auto"))
@pytest.mark.parametrize("k", [0, 4, "auto", "at random"])
def test_a_shared_prefix_is_continued_from_a_snapshot(batched: tuple[Outrider, Outrider], k: int | str) -> None:
    """One after the other: the second request continues from the last chunk before its own tokens, later ones from these."""
    many, single = batched
    requests, shared = prefixed(many), len(many.text.encode(SYSTEM, chat=False))
    policy = RandomPolicy(many.adaptive_policy()) if k == "at random" else None
    scheduler, cached = Scheduler(many, k="auto" if policy else k, policy=policy), []
    for prompt, params in requests:
        request, got = scheduler.submit(prompt, params), list[int]()
        while scheduler.busy:
            for _, event in scheduler.step():
                got += getattr(event, "token_ids", [])
        assert got == alone(single, prompt, params)
        cached.append(request.stats.cached_tokens)
    assert cached[0] == 0
    assert shared - CHUNK < cached[1] <= shared
    assert min(cached[2:]) >= shared - 1


@pytest.mark.in_turn(runs=lambda case: case["batched"] in ("fp32", SHORT) or case["k"] in (4, "at random"))
@pytest.mark.parametrize("k", [0, 4, "auto", "at random"])
def test_requests_that_come_together_share_a_prefix(batched: tuple[Outrider, Outrider], k: int | str) -> None:
    many, single = batched
    requests = prefixed(many)
    policy = RandomPolicy(many.adaptive_policy()) if k == "at random" else None
    scheduler = Scheduler(many, k="auto" if policy else k, policy=policy)
    texts = answer(scheduler, requests, cancelled={0})
    for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
        want = alone(single, *request)
        assert text == want[: len(text)]
        assert index == 0 or len(text) == len(want)


def test_nothing_continues_from_the_snapshots_of_a_request_that_fails(
    batched: tuple[Outrider, Outrider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states may be what it failed for, and another slot has the keys and values that belong to them."""
    many, _ = batched
    prompt, params = prefixed(many)[0]
    scheduler, run = Scheduler(many, k=0), Rounds.run
    failing, other = (scheduler.submit(prompt, params) for _ in range(2))

    def faulty(self: Rounds, lanes: Sequence[Lane], *rest: Any, **named: Any) -> object:
        if any(lane.tokens is failing.tokens for lane in lanes):
            raise EngineError("it broke", "hint it")
        return run(self, lanes, *rest, **named)

    monkeypatch.setattr(Rounds, "run", faulty)
    failed = []
    while scheduler.busy:
        failed += [request for request, result in scheduler.step() if isinstance(result, EngineError)]
    assert failed == [failing]
    assert other.finish_reason == "length"
    again = scheduler.submit(prompt, params)
    while scheduler.busy:
        scheduler.step()
    assert again.stats.cached_tokens == 0


@pytest.mark.parametrize("fault", ["no state", "that of another place"])
def test_a_wrong_state_changes_tokens(batched: tuple[Outrider, Outrider], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above would notice. Some places have states that are nearly the right one, others those of another text."""
    many, single = batched
    target = many.sessions["target"]
    target.run(np.random.default_rng(0).integers(0, 300, (1, CHUNK)), np.array([0]), 0, certain=[CHUNK])
    for place in range(target.places):
        target.snapshot(0, place)
    restore, wrong = target.restore, 1

    def faulty(place: int, slot: int, position: int) -> None:
        restore((place + wrong) % target.places, slot, position)
        if fault == "no state":
            target.restart(slot)
            target.assume(np.array([position]), slot)

    monkeypatch.setattr(target, "restore", faulty)
    want = [alone(single, *request) for request in prefixed(many)]
    noticed = False
    for wrong in range(1, 2 if fault == "no state" else target.places):  # noqa: B007  # `faulty` reads it
        scheduler, texts = Scheduler(many, k=0), []
        for request in prefixed(many):
            texts += answer(scheduler, [request], cancelled=set())
        noticed = noticed or texts != want
    assert noticed
