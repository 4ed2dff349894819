"""Many requests at once: each gets what it would get alone, whoever comes and goes beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.audit.controls import RestlessCompany, WatchedRounds
from outrider.bundle.folder import read_manifest
from outrider.errors import EngineError, UsageError
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy import Choice, Company, Member
from outrider.runtime.rounds import Rounds
from outrider.runtime.scheduler import Job, QueueFullError, Scheduler
from outrider.tests.deferred import deferred
from outrider.tests.support import broken_export, build, reseal

SLOTS = 4
CAPACITY = 159  # with the spare position, so that a slot's cache begins at an aligned address
PROMPTS = [
    "Customer: Hi, I would like to order a coffee.\nAgent:",
    "Once upon a time there was a little",
    "T",
    "The old man walked along the road, and the dog ran on before him. " * 4,
    "Question: Tom has 5 apples. How many",
]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, repetition_penalty=1.2, logit_bias={7: 3.0, 9: -100.0}),
    SamplingParams(temperature=1.0, top_k=5, seed=7, logprobs=2),
    SamplingParams(frequency_penalty=0.5, min_new_tokens=5),
]


@pytest.fixture(scope="module", params=["int4", "fp32"])
def bundle(
    request: pytest.FixtureRequest, shipped_exports: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The shipped pair; at int4 a row has the same bits in any company, at fp32 nearly. No token ends the text."""
    folder = tmp_path_factory.mktemp(request.param)
    made = build(shipped_exports(request.param), folder / "bundle", k=[1, 2, 4], capacity=CAPACITY, batch=SLOTS)
    reseal(made, generation=msgspec.structs.replace(read_manifest(made).generation, eos_token_ids=[]))
    return made


@pytest.fixture(scope="module")
def batched(bundle: Path) -> Outrider:
    return Outrider.load(bundle, slots=None)


@pytest.fixture(scope="module")
def alone(bundle: Path) -> dict[tuple[int, int], list[int]]:
    """Of each prompt and parameters, the longest text, by plain decoding."""
    single = Outrider.load(bundle)
    return {
        (prompt, params): [
            token
            for event in single.generate(PROMPTS[prompt], replace(PARAMS[params], max_new_tokens=50), k=0)
            for token in event.token_ids
        ]
        for prompt in range(len(PROMPTS))
        for params in range(len(PARAMS))
    }


Arrival = tuple[int, int, int, int, int | None]
"""At which step, which prompt and parameters, how many tokens, and after how many steps it is cancelled."""

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


def play(scheduler: Scheduler, arrivals: list[Arrival]) -> list[tuple[Arrival, Job, list[Event]]]:
    """Requests come and go as the schedule says, until all are done."""
    encode = scheduler.outrider.text.encode
    came: list[tuple[Arrival, Job, list[Event]]] = []
    left = sorted(arrivals, key=lambda each: each[0])
    step = 0
    while left or scheduler.busy:
        while left and left[0][0] <= step:
            arrival = left.pop(0)
            params = replace(PARAMS[arrival[2]], max_new_tokens=arrival[3])
            came.append((arrival, scheduler.submit(encode(PROMPTS[arrival[1]], chat=False), params), []))
        for arrival, job, _ in came:
            if arrival[4] is not None and step == arrival[0] + arrival[4]:
                scheduler.cancel(job)
        for job, event in scheduler.step():
            assert isinstance(event, Event)
            assert not job.cancelled
            next(events for _, each, events in came if each is job).append(event)
        step += 1
        assert step < 1000
    assert scheduler.load.running == scheduler.load.waiting == 0
    assert scheduler.load.used == 0
    return came


def check(came: list[tuple[Arrival, Job, list[Event]]], alone: dict[tuple[int, int], list[int]]) -> None:
    for (_, prompt, params, wanted, _), job, events in came:
        got = [token for event in events for token in event.token_ids]
        assert got == alone[prompt, params][: len(got)]
        if not job.cancelled:
            assert len(got) == wanted
            assert events[-1].finish_reason == "length"
        stats = job.answer.stats
        assert stats.drafted == stats.accepted + stats.rejected + stats.unexamined
        assert stats.emitted == stats.accepted + stats.own == len(got)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=ARRIVALS, chance=st.one_of(st.none(), st.integers(0, 3)))
def test_each_gets_what_it_would_get_alone(
    batched: Outrider, alone: dict[tuple[int, int], list[int]], arrivals: list[Arrival], chance: int | None
) -> None:
    """Arrivals, cancellations, prompts, parameters, and with `chance` every drafter and k, at random."""
    scheduler = Scheduler(batched, company=Company if chance is None else partial(RestlessCompany, seed=chance))
    check(play(scheduler, arrivals), alone)


def test_a_conversation_is_not_read_again(batched: Outrider) -> None:
    """The slot whose cache holds a prompt's beginning gets it, also after others, and the answer is that of an empty one."""

    def ask(scheduler: Scheduler, prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
        job = scheduler.submit(prompt, params)
        got = [token for _ in range(100) if scheduler.busy for _, event in scheduler.step() for token in event.token_ids]  # type: ignore[union-attr]
        return got, job.answer.stats.cached_tokens

    scheduler = Scheduler(batched)
    first = batched.text.encode(PROMPTS[0], chat=False)
    said, held = ask(scheduler, first, replace(PARAMS[0], max_new_tokens=40))
    assert held == 0
    for other in PROMPTS[1:4]:
        ask(scheduler, batched.text.encode(other, chat=False), replace(PARAMS[1], max_new_tokens=5))
    longer = [*first, *said, *batched.text.encode(" And a cake.", chat=False)]
    for params in PARAMS[:3]:
        again, held = ask(scheduler, longer, replace(params, max_new_tokens=30))
        assert held >= len(first) + len(said) - 1
        fresh = Scheduler(batched)
        assert ask(fresh, longer, replace(params, max_new_tokens=30)) == (again, 0)
        scheduler = fresh


FULL: list[Arrival] = [(at % 3, at % 5, at // 2 % 5, 20 + at, None) for at in range(9)]


@pytest.mark.parametrize(("k", "drafter"), [(0, None), (2, None), (4, "model"), (4, "ngram"), ("auto", "ngram")])
def test_with_every_drafter_and_k(
    batched: Outrider, alone: dict[tuple[int, int], list[int]], k: int | str, drafter: str | None
) -> None:
    came = play(Scheduler(batched, k=k, drafter=drafter), FULL)
    check(came, alone)
    drafted = sum(job.answer.stats.drafted for _, job, _ in came)
    by_ngrams = sum(job.answer.stats.ngram_rounds for _, job, _ in came)
    assert (drafted > 0) == (k != 0)
    assert (by_ngrams > 0) == (drafter == "ngram")


def test_the_reference_decides_as_the_graphs_do(
    batched: Outrider, monkeypatch: pytest.MonkeyPatch, alone: dict[tuple[int, int], list[int]]
) -> None:
    """Each lane of a mixed round against the reference in float64."""
    monkeypatch.setattr("outrider.audit.controls.CHECKED", 1)
    watched = WatchedRounds(batched.loop.rounds)
    monkeypatch.setattr(batched.loop, "rounds", watched)
    check(play(Scheduler(batched, k=2), FULL), alone)
    assert watched.checked > 300
    assert watched.disagreed == 0


def test_on_a_device_that_runs_ahead(bundle: Path, alone: dict[tuple[int, int], list[int]]) -> None:
    """As a GPU does: recorded rounds, memory of its own, nothing done before somebody waits."""
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

    def noted(self: Rounds, turns: list[object], *rest: object, **named: object) -> object:
        runs.append(len(turns))
        return run(self, turns, *rest, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "run", noted)
        while scheduler.busy:
            scheduler.step()
    assert max(runs) == 3
    assert len(runs) < 60


def test_a_long_prompt_holds_no_one_up(batched: Outrider) -> None:
    """While it is read, a chunk a step, the others go on and a short one that came later begins."""
    scheduler = Scheduler(batched)
    encode = batched.text.encode
    first = scheduler.submit(encode(PROMPTS[0], chat=False), SamplingParams(max_new_tokens=40))
    while not scheduler.step():
        pass
    long = scheduler.submit(encode(PROMPTS[3], chat=False), SamplingParams(max_new_tokens=5))
    short = scheduler.submit(encode("Once", chat=False), SamplingParams(max_new_tokens=5))
    order = []
    while scheduler.busy:
        found = scheduler.step()
        assert first in [job for job, _ in found] or first.text is None
        order += [job for job, _ in found if job is not first]
    assert order.index(short) < order.index(long)


def test_a_draft_that_has_to_read_holds_no_one_up(batched: Outrider) -> None:
    """A chunk for each text of a step's round, also where one alone is past its prompt while others read theirs."""
    draft = batched.sessions["draft"]
    ids = batched.text.encode(PROMPTS[3], chat=False)
    scheduler = Scheduler(batched, k=4, drafter="model")
    read: list[int] = []
    write = draft.write

    def noted(*rest: Any, **named: Any) -> None:
        read[-1] += 1
        write(*rest, **named)

    for prompt in (ids[:40], ids + ids[:40], ids[:90]):
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


def test_texts_move_together_when_slots_become_free(batched: Outrider, alone: dict[tuple[int, int], list[int]]) -> None:
    scheduler = Scheduler(batched)
    jobs = [
        scheduler.submit(batched.text.encode(PROMPTS[at], chat=False), SamplingParams(max_new_tokens=50)) for at in range(4)
    ]
    got: dict[int, list[int]] = {id(job): [] for job in jobs}
    while scheduler.busy:
        for job, event in scheduler.step():
            assert isinstance(event, Event)
            got[id(job)] += event.token_ids
        if len(got[id(jobs[3])]) > 5:
            for job in jobs[1:3]:
                if job.text is not None:
                    scheduler.cancel(job)
        slots = sorted(job.text.slot for job in jobs if job.text is not None)
        if jobs[1].cancelled and scheduler.load.batch == 2:
            assert slots in ([0, 1], [0], [1], [])
    for at in (0, 3):
        assert got[id(jobs[at])] == alone[at, 0]


def test_up_to_the_last_slot_of_the_cache(batched: Outrider, bundle: Path) -> None:
    """Long prompts beside short ones and one of a single token: no one writes past the end, and no one's cache is touched."""
    single = Outrider.load(bundle)
    ids = batched.text.encode(PROMPTS[3], chat=False)
    prompts = [(ids * 4)[:length] for length in (CAPACITY, CAPACITY - 1, CAPACITY - 6, 12, 1)]
    params = [SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=40, temperature=0.9, seed=3)]
    want = [[t for e in single.generate(prompt, each, k=0) for t in e.token_ids] for prompt in prompts for each in params]
    for k in (4, "auto"):
        scheduler = Scheduler(batched, k=k)
        jobs = [scheduler.submit(prompt, each) for prompt in prompts for each in params]
        events: dict[int, list[Event]] = {id(job): [] for job in jobs}
        while scheduler.busy:
            for job, event in scheduler.step():
                assert isinstance(event, Event)
                events[id(job)].append(event)
        assert [[t for e in events[id(job)] for t in e.token_ids] for job in jobs] == want
        ends = [events[id(job)][-1].finish_reason for job in jobs]
        assert ends == ["capacity"] * 6 + ["length"] * 4


def test_the_rule_of_rejection_in_company(batched: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """What requests without a seed get is checked decision by decision against the reference, beside others with one."""
    monkeypatch.setattr("outrider.audit.controls.CHECKED", 1)
    watched = WatchedRounds(batched.loop.rounds)
    monkeypatch.setattr(batched.loop, "rounds", watched)
    scheduler = Scheduler(batched, k=4)
    for at in range(8):
        seed = at if at % 2 else None
        params = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.95 if at % 3 else 1.0, seed=seed)
        scheduler.submit(batched.text.encode(PROMPTS[at % 5], chat=False), params)
    while scheduler.busy:
        scheduler.step()
    assert watched.checked > 300
    assert watched.disagreed <= 1  # where fp32 and float64 draw neighbouring tokens


def test_who_waits_is_bounded_and_served_in_order(batched: Outrider) -> None:
    scheduler = Scheduler(batched, max_waiting=2)
    prompt = batched.text.encode("Once", chat=False)
    jobs = [scheduler.submit(prompt, SamplingParams(max_new_tokens=3)) for _ in range(SLOTS + 2)]
    with pytest.raises(QueueFullError, match="6 requests are waiting"):
        scheduler.submit(prompt, SamplingParams())
    with pytest.raises(UsageError, match="more than ever may wait and run"):
        scheduler.submit_all([(prompt, SamplingParams())] * (SLOTS + 3))
    scheduler.step()
    assert (scheduler.load.running, scheduler.load.waiting) == (SLOTS, 2)
    with pytest.raises(QueueFullError):
        scheduler.submit_all([(prompt, SamplingParams())] * 2)  # all or none
    assert scheduler.load.waiting == 2
    scheduler.cancel(jobs[0])
    assert (scheduler.load.running, scheduler.load.waiting) == (SLOTS - 1, 2)
    ended = []
    while scheduler.busy:
        ended += [job for job, event in scheduler.step() if isinstance(event, Event) and event.finish_reason]
    assert ended == jobs[1:]


def test_what_depends_on_company_is_refused(batched: Outrider) -> None:
    scheduler = Scheduler(batched)
    with pytest.raises(UsageError, match="depends on how many tokens are drafted"):
        scheduler.submit([5], SamplingParams(temperature=1.0, seed=1, rule="rejection"))
    with pytest.raises(UsageError, match=f"capacity is {CAPACITY}"):
        scheduler.submit([5] * 200, SamplingParams())
    with pytest.raises(UsageError, match="k = 3 was not built"):
        Scheduler(batched, k=3)


def test_a_bundle_for_one_serves_one_at_a_time(tiny: Outrider) -> None:
    scheduler = Scheduler(tiny)
    want = [token for event in tiny.generate([5, 6], SamplingParams(max_new_tokens=20)) for token in event.token_ids]
    jobs = [scheduler.submit([5, 6], SamplingParams(max_new_tokens=20)) for _ in range(3)]
    got: dict[int, list[int]] = {id(job): [] for job in jobs}
    while scheduler.busy:
        for job, event in scheduler.step():
            assert isinstance(event, Event)
            got[id(job)] += event.token_ids
    assert list(got.values()) == [want] * 3
    with pytest.raises(UsageError, match="built for 1 sequences at once, not 2"):
        Outrider.load(tiny.engines.folder, slots=2)


def test_one_whose_logits_are_no_numbers_fails_and_the_others_go_on(tmp_path: Path) -> None:
    bundle = build(broken_export(tmp_path, token=77), tmp_path / "bundle", batch=3)
    batched = Outrider.load(bundle, slots=None)
    params = SamplingParams(max_new_tokens=20)
    want = [token for event in Outrider.load(bundle).generate([5, 6, 7], params, k=0) for token in event.token_ids]
    for k in (0, 2, "auto"):
        scheduler = Scheduler(batched, k=k)
        good, bad, other = (scheduler.submit(prompt, params) for prompt in ([5, 6, 7], [5, 77, 9], [5, 6, 7]))
        got: dict[int, list[int]] = {id(good): [], id(other): []}
        failed = []
        while scheduler.busy:
            for job, event in scheduler.step():
                if isinstance(event, Event):
                    got[id(job)] += event.token_ids
                else:
                    failed.append((job, event))
        assert list(got.values()) == [want, want]
        ((job, error),) = failed
        assert job is bad
        assert isinstance(error, EngineError)
        assert "not finite" in str(error)


def test_what_it_learned_of_the_times_of_company_is_forgotten(batched: Outrider) -> None:
    """A round's first time has the making of its buffers in it, and what was slow once may not be for ever."""
    company = Scheduler(batched)._company
    members = [Member(20, 0, 0, 50, batched.policy.acceptance(), True) for _ in range(3)]
    plain, drafting = Choice("none", 0), Choice("model", 2)
    usual = company._time(drafting, members)
    company.observe(drafting, members, 100 * usual)
    assert company._time(drafting, members) == usual
    company.observe(drafting, members, 2 * usual)
    assert company._time(drafting, members) == pytest.approx(2 * usual, rel=0.1)
    for _ in range(6000):
        company.observe(plain, members, company._predicted(plain, members))
    assert company._time(drafting, members) == pytest.approx(usual, rel=0.03)


def test_a_round_that_fails_is_run_again_for_each_alone(
    batched: Outrider, monkeypatch: pytest.MonkeyPatch, alone: dict[tuple[int, int], list[int]]
) -> None:
    """So that what one request brings about is no other's failure."""
    run = Rounds.run
    scheduler = Scheduler(batched, k=2)
    jobs = [scheduler.submit(batched.text.encode(PROMPTS[at], chat=False), SamplingParams(max_new_tokens=50)) for at in (0, 1)]
    spoilt = len(batched.text.encode(PROMPTS[1], chat=False)) + 20

    def failing(self: Rounds, turns: list[object], *rest: object, **named: object) -> object:
        if any(len(turn.tokens) > spoilt and turn.tokens[:5] == jobs[1].answer.prompt[:5] for turn in turns):  # type: ignore[attr-defined]
            raise EngineError("it broke", "hint it")
        return run(self, turns, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Rounds, "run", failing)
    got: list[int] = []
    failed = []
    while scheduler.busy:
        for job, event in scheduler.step():
            if job is jobs[0]:
                assert isinstance(event, Event)
                got += event.token_ids
            elif not isinstance(event, Event):
                failed.append(event)
    assert got == alone[0, 0]
    assert [str(each) for each in failed] == ["it broke"]
