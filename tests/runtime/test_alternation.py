"""Two halves of the requests, which alternate over stages that run in other processes; here these are in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.backends.open import open_bundle, open_engines
from outrider.errors import EngineError, StageError
from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.grammar.matcher import LocalMatcher
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event, Request
from outrider.runtime.rounds.buffers import RoundState
from outrider.runtime.rounds.rounds import Rounds
from outrider.runtime.scheduler import Scheduler
from outrider.tests.runtime.local_stages import LocalChain, LocalStages
from outrider.tests.support import build

TEXTS = ("Once upon a time", "Customer: Hi, I would like", "T", "The old man walked along the road,")
LIMIT = 24
Alone = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alternation") / "bundle"
    return build(trained_export, folder, stages="2", k=[1, 4], capacity=127, batch=len(TEXTS))


@pytest.fixture(scope="module")
def whole(bundle: Path) -> Outrider:
    """All stages in turn."""
    return Outrider.load(bundle)


@pytest.fixture(scope="module")
def alone(whole: Outrider) -> Alone:
    return cache(lambda text: [token for event in whole.generate(text, params(), k=0) for token in event.token_ids])


@pytest.fixture(params=[False, True], ids=["early", "late"])
def halves(bundle: Path, whole: Outrider, request: pytest.FixtureRequest) -> tuple[Outrider, LocalChain]:
    """Stages that run a pass as soon as they have it, or when it is waited for."""
    engines, stages = open_engines(bundle, *open_bundle(bundle)), LocalStages(request.param)
    engines.elsewhere = stages
    return Outrider(engines, whole.text, len(TEXTS)), stages.chains[-1]


def params(limit: int = LIMIT) -> SamplingParams:
    return SamplingParams(max_new_tokens=limit)


def submitted(scheduler: Scheduler) -> dict[str, Request]:
    encode = scheduler.bundle.text.encode
    return {text: scheduler.submit(encode(text, chat=False), params()) for text in TEXTS}


def steps(scheduler: Scheduler, most: int = 1000) -> Iterator[tuple[Request, Any]]:
    for _ in range(most):
        if scheduler.busy:
            yield from scheduler.step()


def answers(requests: dict[str, Request]) -> dict[str, list[int]]:
    return {text: request.tokens[len(request.prompt) :][:LIMIT] for text, request in requests.items()}


def two_under_way(halves: tuple[Outrider, LocalChain]) -> tuple[Scheduler, dict[str, Request]]:
    """Submit requests, and run until a round has begun beside another one, and a few more steps."""
    outrider, chain = halves
    scheduler, chain.overlapping = Scheduler(outrider, k=4), 0
    requests = submitted(scheduler)
    while chain.overlapping < 3:
        scheduler.step()
    return scheduler, requests


def test_each_step_begins_a_round_while_another_is_under_way_unless_it_reads_a_prompt(
    halves: tuple[Outrider, LocalChain], alone: Alone
) -> None:
    outrider, chain = halves
    scheduler = Scheduler(outrider, k=0)
    requests = submitted(scheduler)
    overlapping: list[int] = []
    while all(request.finish_reason is None for request in requests.values()):
        scheduler.step()
        overlapping.append(chain.overlapping)
    reading = len(TEXTS) - 1  # one has a single token, which is not read before the first round
    assert overlapping == [*[0] * reading, *range(1, len(overlapping) - reading + 1)]
    assert len(overlapping) - reading >= 2 * (LIMIT - reading - 1)
    assert all(isinstance(event, Event) for _, event in steps(scheduler))
    assert answers(requests) == {text: alone(text) for text in TEXTS}


def test_drafts_of_both_halves_are_accepted(halves: tuple[Outrider, LocalChain]) -> None:
    """Texts would be the same without."""
    scheduler = Scheduler(halves[0], k=4)
    requests = submitted(scheduler)
    assert all(isinstance(event, Event) for _, event in steps(scheduler))
    assert [text for text, request in requests.items() if request.stats.accepted < 4] == []


def test_a_request_is_cancelled_while_its_round_is_under_way(halves: tuple[Outrider, LocalChain], alone: Alone) -> None:
    """Another one gets its slot, and the others lose no token."""
    outrider, _ = halves
    for at in range(len(TEXTS)):
        scheduler, requests = two_under_way(halves)
        stats, cancelled = [request.stats for request in requests.values()], requests.pop(TEXTS[at])
        counted = sum(each.engine_seconds for each in stats)
        scheduler.cancel(cancelled)
        assert sum(each.engine_seconds for each in stats) > counted  # of the round that ends there
        requests[TEXTS[at]] = scheduler.submit(outrider.text.encode(TEXTS[at], chat=False), params())
        for request, event in steps(scheduler):
            assert isinstance(event, Event)
            assert request is not cancelled
        assert answers(requests) == {text: alone(text) for text in requests}


@pytest.mark.parametrize("k", [0, 4])
def test_requests_whose_grammars_are_late_leave_a_half_and_come_back(
    halves: tuple[Outrider, LocalChain], alone: Alone, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """A pass also writes to the slots between those that take part, so no other pass may be using those."""
    chance = random.Random(3)
    monkeypatch.setattr(Request, "ready", lambda *_, **__: chance.random() < 0.5)
    outrider, chain = halves
    for _ in range(3):
        scheduler = Scheduler(outrider, k=k)
        requests = submitted(scheduler)
        assert all(isinstance(event, Event) for _, event in steps(scheduler))
        assert answers(requests) == {text: alone(text) for text in TEXTS}
    assert chain.overlapping > 5


def test_a_grammar_that_fails_at_a_drafted_token_leaves_no_pass_under_way(
    halves: tuple[Outrider, LocalChain], alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stages would answer the pass of another round with it."""
    outrider, _ = halves
    masks = LocalMatcher.masks

    def failing(self: LocalMatcher, drafted: Sequence[int]) -> Any:
        if drafted:
            raise GrammarError("it broke", "hint it")
        return masks(self, drafted)

    monkeypatch.setattr(LocalMatcher, "masks", failing)
    scheduler, grammar = Scheduler(outrider, k=4, drafter="model"), StructuredOutputs(regex="[a-z ]{9,}")
    scheduler.submit([5, 6, 7], replace(params(), structured_outputs=grammar))
    *_, (_, last) = steps(scheduler)
    assert str(last) == "it broke"
    requests = submitted(scheduler)
    assert all(isinstance(event, Event) for _, event in steps(scheduler))
    assert answers(requests) == {text: alone(text) for text in TEXTS}


@pytest.mark.parametrize("fails", [9, 10])
def test_a_half_that_fails_runs_again_when_the_other_has_ended(
    halves: tuple[Outrider, LocalChain], alone: Alone, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    outrider, _ = halves
    finish, calls = Rounds.finish, list[RoundState]()

    def failing(self: Rounds, state: RoundState) -> object:
        decided = finish(self, state)
        calls.append(state)
        if len(calls) == fails:
            raise EngineError("it broke", "hint it")
        return decided

    monkeypatch.setattr(Rounds, "finish", failing)
    scheduler = Scheduler(outrider, k=0)
    requests = submitted(scheduler)
    assert all(isinstance(event, Event) for _, event in steps(scheduler))
    assert len(calls) > fails
    assert answers(requests) == {text: alone(text) for text in TEXTS}


def test_stages_that_die_are_the_same_error_for_both_halves(halves: tuple[Outrider, LocalChain]) -> None:
    _, chain = halves
    scheduler, requests = two_under_way(halves)
    chain.failure = EngineError("stage 1 died", "start it")
    failed = [*steps(scheduler)]
    assert {request for request, _ in failed} == {*requests.values()}
    assert [str(event) for _, event in failed] == ["stage 1 died"] * len(TEXTS)
    assert not scheduler.busy


def test_a_stage_that_dies_while_all_requests_are_cancelled_is_not_forgotten(halves: tuple[Outrider, LocalChain]) -> None:
    _, chain = halves
    scheduler, requests = two_under_way(halves)
    chain.failure = StageError("stage 1 died", "start it")
    slots = [request.slot for request in requests.values()]
    for request in requests.values():
        scheduler.cancel(request)
    assert scheduler.lost is chain.failure
    assert scheduler.busy, "or the server would wait for a request, which would get the error"
    assert all(slot is None or slot.finite for slot in slots), "slots whose passes failed are cleared"
    chain.failure = None
    scheduler.reset()
    assert not scheduler.busy


@pytest.mark.parametrize("resets", [False, True])
def test_rounds_that_nobody_waits_for_end_before_the_caches_are_used_again(
    halves: tuple[Outrider, LocalChain], alone: Alone, resets: bool
) -> None:
    outrider, _ = halves
    scheduler, _ = two_under_way(halves)
    if resets:
        scheduler.reset()
    else:
        scheduler = Scheduler(outrider, k=4)
    requests = submitted(scheduler)
    assert all(isinstance(event, Event) for _, event in steps(scheduler))
    assert answers(requests) == {text: alone(text) for text in TEXTS}


def test_nothing_is_under_way_for_an_observer(halves: tuple[Outrider, LocalChain], alone: Alone) -> None:
    """It reads what a drafter has computed for a round, which the next round overwrites."""
    outrider, chain = halves
    scheduler = Scheduler(outrider.observed(lambda launches, shape, index, lane, result: result), k=4)
    requests = submitted(scheduler)
    assert all(isinstance(event, Event) for _, event in steps(scheduler))
    assert answers(requests) == {text: alone(text) for text in TEXTS}
    assert chain.overlapping == 0
