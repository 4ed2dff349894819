"""Many requests at once: each gets what it would get alone, whatever runs beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.audit.controls import RandomPolicy, Watch
from outrider.runtime.drafters.base import Reading
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import NONE, PLAIN, Choice
from outrider.runtime.policy.policy import Observation, Offer, SequenceView
from outrider.runtime.policy.round_times import SequenceBatch
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.rounds import RoundResult, Rounds
from outrider.runtime.scheduler import Scheduler
from outrider.tests.deferred import deferred
from outrider.tests.runtime.scheduler.schedules import CAPACITY, PARAMS, PROMPTS, SLOTS, SLOW, Alone, Arrival, check, play

ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, len(PARAMS) - 1),
        st.integers(5, 50),
        st.one_of(st.none(), st.none(), st.integers(1, 15)),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("examples", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_each_gets_what_it_would_get_alone(batched: Outrider, alone: Alone, examples: int) -> None:
    """Arrivals, cancellations, prompts, parameters, and with `chance` every drafter and k, at random."""

    @settings(max_examples=examples, deadline=None)
    @given(arrivals=ARRIVALS, chance=st.one_of(st.none(), st.integers(0, 3)))
    def each(arrivals: list[Arrival], chance: int | None) -> None:
        policy = None if chance is None else RandomPolicy(batched.adaptive_policy(), chance)
        check(play(Scheduler(batched, policy=policy), arrivals), alone)

    each()


def test_a_conversation_is_not_read_again(batched: Outrider) -> None:
    """The slot whose cache holds a prompt's beginning gets it, also after others, and the answer is that of an empty one."""

    def ask(scheduler: Scheduler, prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
        request = scheduler.submit(prompt, params)
        got = [token for _ in range(100) if scheduler.busy for _, event in scheduler.step() for token in event.token_ids]  # type: ignore[union-attr]
        return got, request.stats.cached_tokens

    scheduler = Scheduler(batched)
    first = batched.text.encode(PROMPTS[0], chat=False)
    answer, held = ask(scheduler, first, replace(PARAMS[0], max_new_tokens=40))
    assert held == 0
    for other in PROMPTS[1:4]:
        ask(scheduler, batched.text.encode(other, chat=False), replace(PARAMS[1], max_new_tokens=5))
    longer = [*first, *answer, *batched.text.encode(" And a cake.", chat=False)]
    for params in PARAMS[:3]:
        again, held = ask(scheduler, longer, replace(params, max_new_tokens=30))
        assert held >= len(first) + len(answer) - 1
        fresh = Scheduler(batched)
        assert ask(fresh, longer, replace(params, max_new_tokens=30)) == (again, 0)
        scheduler = fresh


def test_no_slot_is_given_to_two(batched: Outrider) -> None:
    """Also if a request gets another one than the first that is free, for what it holds."""
    scheduler, params = Scheduler(batched), SamplingParams(max_new_tokens=8, min_new_tokens=8)
    prompts = [batched.text.encode(prompt, chat=False) for prompt in PROMPTS[:SLOTS]]
    for prompt in prompts[:2]:
        scheduler.submit(prompt, params)
    while scheduler.busy:
        scheduler.step()
    requests = [scheduler.submit(prompt, params) for prompt in (prompts[1], *prompts[2:], prompts[0])]
    scheduler.step()
    assert requests[0].stats.cached_tokens > 0
    assert sorted(each.slot.index for each in requests if each.slot is not None) == [*range(SLOTS)]
    while scheduler.busy:
        scheduler.step()


FULL: list[Arrival] = [(at % 3, at % 5, at // 2 % 5, 20 + at, None) for at in range(9)]


@pytest.mark.in_turn(runs=lambda case: case["bundle"] == "onnxruntime int4" or case["k"] == 4)
@pytest.mark.parametrize(("k", "drafter"), [(0, None), (2, None), (4, "model"), (4, "ngram"), ("auto", "ngram")])
def test_with_every_drafter_and_k(batched: Outrider, alone: Alone, k: int | str, drafter: str | None) -> None:
    policy = batched.adaptive_policy() if k == "auto" else None  # that has not learned from other tests
    came = play(Scheduler(batched, k=k, drafter=drafter, policy=policy), FULL)
    check(came, alone)
    drafted = sum(request.stats.drafted for _, request, _ in came)
    by_ngrams = sum(request.stats.rounds_by_drafter.get("ngram", 0) for _, request, _ in came)
    assert (drafted > 0) == (k != 0)
    assert (by_ngrams > 0) == (drafter == "ngram")


def test_the_reference_decides_as_the_graphs_do(batched: Outrider, monkeypatch: pytest.MonkeyPatch, alone: Alone) -> None:
    """Each lane of a mixed round against the reference in float64."""
    monkeypatch.setattr("outrider.audit.controls.CHECKED", 1)
    watch = Watch()
    check(play(Scheduler(batched.observed(watch), k=2), FULL), alone)
    assert watch.checked > 300
    assert watch.disagreed == 0


@pytest.mark.parametrize("bundle", ["onnxruntime int4", SLOW[0]], indirect=True)
def test_on_a_device_that_runs_ahead(bundle: Path, alone: Alone) -> None:
    """As a GPU does: recorded rounds, memory of its own, nothing runs until the host waits."""
    for max_candidates in (None, 256):
        queued = deferred(bundle, max_candidates, slots=SLOTS)
        check(play(Scheduler(queued, k=2), FULL), alone)
        check(play(Scheduler(queued), FULL), alone)


def test_the_rounds_of_several_are_one_pass(batched: Outrider) -> None:
    scheduler = Scheduler(batched, k=2)
    for prompt in PROMPTS[:3]:
        scheduler.submit(batched.text.encode(prompt, chat=False), SamplingParams(max_new_tokens=30))
    runs = []
    run = Rounds.run

    def noted(self: Rounds, lanes: list[Lane], *rest: Any, **named: Any) -> object:
        runs.append(len(lanes))
        return run(self, lanes, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "run", noted)
        while scheduler.busy:
            scheduler.step()
    assert max(runs) == 3
    assert len(runs) < 60


def test_a_long_prompt_does_not_hold_up_others(batched: Outrider) -> None:
    """While it is read, one chunk per step, the others go on, and a short one that came later begins."""
    scheduler = Scheduler(batched)
    encode = batched.text.encode
    first = scheduler.submit(encode(PROMPTS[0], chat=False), SamplingParams(max_new_tokens=40))
    while not scheduler.step():
        pass
    long = scheduler.submit(encode(PROMPTS[3], chat=False), SamplingParams(max_new_tokens=5))
    short = scheduler.submit(encode("Once", chat=False), SamplingParams(max_new_tokens=5))
    order = []
    while scheduler.busy:
        emitted = [request for request, _ in scheduler.step()]
        assert first in emitted or first.slot is None
        order += [request for request in emitted if request is not first]
    assert order.index(short) < order.index(long)


def test_a_draft_that_catches_up_does_not_hold_up_others(batched: Outrider) -> None:
    """At most one chunk for each sequence of a round, also if only one has read its prompt and others are still reading."""
    draft = batched.sessions["draft"]
    ids = batched.text.encode(PROMPTS[3], chat=False)
    scheduler = Scheduler(batched, k=4, drafter="model")
    read: list[int] = []
    write = draft.write

    def noted(*rest: Any, **named: Any) -> None:
        read[-1] += 1
        write(*rest, **named)

    for prompt in (ids[:40], (ids + ids)[:110], ids[:90]):
        scheduler.submit(prompt, SamplingParams(max_new_tokens=40, min_new_tokens=40))
    alone = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "write", noted)
        while scheduler.busy:
            read.append(0)
            scheduler.step()
            alone |= scheduler.load.batch == 1 and read[-1] == 1
            assert read[-1] <= max(scheduler.load.batch, 1)
    assert alone
    assert sum(read) >= 3 * 40 // 16


def test_sequences_move_together_when_slots_become_free(batched: Outrider, alone: Alone) -> None:
    scheduler = Scheduler(batched)
    requests = [
        scheduler.submit(batched.text.encode(PROMPTS[at], chat=False), SamplingParams(max_new_tokens=50)) for at in range(4)
    ]
    got: dict[int, list[int]] = {id(request): [] for request in requests}
    taken: list[list[int]] = []
    while scheduler.busy:
        for request, event in scheduler.step():
            assert isinstance(event, Event)
            got[id(request)] += event.token_ids
        if len(got[id(requests[3])]) > 5:
            for request in requests[1:3]:
                if request.slot is not None:
                    scheduler.cancel(request)
        taken.append(sorted(request.slot.index for request in requests if request.slot is not None))
    first, *later = (each for each in taken if len(each) == 2)
    assert first == [0, 3]
    assert later
    assert later == [[0, 1]] * len(later)
    for at in (0, 3):
        assert got[id(requests[at])] == alone(at, 0)


def test_up_to_the_last_slot_of_the_cache(batched: Outrider, bundle: Path) -> None:
    """Long prompts beside short ones and one of a single token: nothing is written past the end or into another's cache."""
    single = Outrider.load(bundle)
    ids = batched.text.encode(PROMPTS[3], chat=False)
    prompts = [(ids * 4)[:length] for length in (CAPACITY, CAPACITY - 1, CAPACITY - 6, 12, 1)]
    params = [SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=40, temperature=0.9, seed=3)]
    expected = [[t for e in single.generate(prompt, each, k=0) for t in e.token_ids] for prompt in prompts for each in params]
    for k in (4, "auto"):
        scheduler = Scheduler(batched, k=k)
        requests = [scheduler.submit(prompt, each) for prompt in prompts for each in params]
        events: dict[int, list[Event]] = {id(request): [] for request in requests}
        while scheduler.busy:
            for request, event in scheduler.step():
                assert isinstance(event, Event)
                events[id(request)].append(event)
        assert [[t for e in events[id(request)] for t in e.token_ids] for request in requests] == expected
        ends = [events[id(request)][-1].finish_reason for request in requests]
        assert ends == ["capacity"] * 6 + ["length"] * 4


@pytest.mark.in_turn(runs=lambda case: case["bundle"] == "onnxruntime int4")  # the test of the reference has both backends
def test_the_rejection_rule_in_a_batch(batched: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision, for requests with and without a seed, is checked against the reference."""
    monkeypatch.setattr("outrider.audit.controls.CHECKED", 1)
    watch = Watch()
    scheduler = Scheduler(batched.observed(watch), k=4)
    for at in range(8):
        seed = at if at % 2 else None
        params = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.95 if at % 3 else 1.0, seed=seed)
        scheduler.submit(batched.text.encode(PROMPTS[at % 5], chat=False), params)
    while scheduler.busy:
        scheduler.step()
    assert watch.checked > 300
    assert watch.disagreed == 0


def test_measured_times_of_batched_rounds_are_forgotten(batched: Outrider) -> None:
    """The first round of a kind includes binding its buffers, and what was slow once may not stay slow."""
    policy = batched.adaptive_policy()
    sequences = [SequenceView(20, 10, 50, True, {"model": Offer([Reading(0, 0)], None)}, policy.begin()) for _ in range(3)]
    drafting, batch = Choice("model", 2), SequenceBatch.of(sequences)
    drafted, plain = RoundResult("model", [5, 6], [5, 7], None), RoundResult(NONE, [], [5], None)
    usual, predicted = policy.times.round(drafting, batch), policy.times.round(PLAIN, batch)
    policy.observe(Observation(drafting, sequences, [drafted] * 3, 100 * usual))
    assert policy.times.round(drafting, batch) == usual
    policy.observe(Observation(drafting, sequences, [drafted] * 3, 2 * usual))
    assert policy.times.round(drafting, batch) == pytest.approx(2 * usual, rel=0.1)
    for _ in range(6000):
        policy.observe(Observation(PLAIN, sequences, [plain] * 3, predicted))
    assert policy.times.round(drafting, batch) == pytest.approx(usual, rel=0.03)
