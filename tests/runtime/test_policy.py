"""k chosen live: what it costs, what it gains, and that no token depends on it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.bench.simulator import Trace, oracle, replay
from outrider.bundle.manifest import Cost
from outrider.runtime.drafters.base import Proposal
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.acceptance import Acceptance
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import NONE, PLAIN, Choice
from outrider.runtime.policy.costs import expected_tokens
from outrider.runtime.policy.early_stop import EarlyStop
from outrider.runtime.policy.policy import FixedPolicy, Observation, Offer, Policy, SequenceView
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.rounds.rounds import RoundResult

PROMPT = "Customer: Hi, I would like to book a table for two in San Jose."
K = [1, 2, 4, 8]
MODEL, NGRAM, GRAMMAR = "model", "ngram", "grammar"


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
    acceptance: dict[str, Acceptance] | None = None,
) -> SequenceView:
    """A sequence for which the draft model has to catch up with `pending` tokens, and n-grams have `matched` tokens."""
    offers = {MODEL: Offer(pending, None)} if MODEL in policy.names else {}
    if matched:
        offers[NGRAM] = Offer(0, Proposal(list(range(1, 9)), matched))
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


def best_fixed(trace: Trace, table: RoundCosts) -> float:
    return min(replay(trace, table, FixedPolicy(MODEL, k)) for k in [0, *K])


def second(policy: AdaptivePolicy, trace: Trace, table: RoundCosts) -> float:
    """What a text takes the second time: from a server's first request it learns."""
    replay(trace, table, policy)
    return replay(trace, table, policy)


RATES, DRAFTS = [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0], [0.3, 1.0, 3.0]


@pytest.mark.in_turn(runs=lambda case: (RATES.index(case["rate"]) + DRAFTS.index(case["draft"])) % 2 == case["stops"])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_it_is_as_fast_as_the_best_fixed_k_and_never_slower_than_plain(draft: float, rate: float, stops: bool) -> None:
    table, trace = costs(draft), text(flips(rate))
    policy = adaptive(table, early_stopping=stops)
    taken = second(policy, trace, table)
    assert taken <= best_fixed(trace, table) / 0.95
    assert taken <= replay(trace, table, FixedPolicy(NONE, 0)) / 0.97
    assert oracle(trace, table, [MODEL]) <= taken


@pytest.mark.parametrize("stops", [False, True])
def test_a_draft_that_is_of_no_use_costs_little_from_the_first_request_on(stops: bool) -> None:
    table = costs()
    policy, trace = adaptive(table, early_stopping=stops), text(flips(0.0, 200))
    plain = replay(trace, table, FixedPolicy(NONE, 0))
    assert replay(trace, table, policy) <= plain / 0.95
    total = 0.0
    for _ in range(8):
        total += replay(trace, table, policy)
    assert total <= 8 * plain / 0.98


def test_what_the_bundle_says_of_its_draft_is_believed_before_an_odd_request_is() -> None:
    """One answer that the draft got wrong throughout, and then short ones that it gets right mostly."""
    odd, usual = text([False] * 12), text(flips(0.8, 40))
    taken = {}
    for acceptance in (0.8, None):
        table = costs(draft=1.5, row=0.5, acceptance=acceptance)
        policy = adaptive(table)
        replay(odd, table, policy)
        taken[acceptance] = replay(usual, table, policy)
    assert taken[0.8] <= best_fixed(usual, table) / 0.95
    assert taken[None] > 1.1 * taken[0.8]


def test_what_was_measured_elsewhere_does_not_outlive_what_is_seen() -> None:
    """A draft that is cheap, was right on the shipped prompts, and never is here."""
    table, trace = costs(draft=0.5, acceptance=0.9), text([False] * 64)
    policy = adaptive(table)
    for _ in range(6):
        replay(trace, table, policy)
    assert replay(trace, table, policy) <= replay(trace, table, FixedPolicy(NONE, 0)) / 0.97


def test_catching_up_takes_what_rounds_take_of_what_the_costs_say() -> None:
    """Costs that are half of what all takes here: what the draft must read costs twice as much, too."""
    table = costs()
    policy = adaptive(table)
    for _ in range(8):
        observe(policy, PLAIN, view(policy), 0, 0, 2 * table.round(NONE, 0, 0, 40, True))
    late = [view(policy, pending=100)]
    assert policy.times.catch_up(MODEL, late) == pytest.approx(2 * table.catch_up(MODEL, 100, 40), rel=0.05)


def test_a_draft_that_was_measured_to_be_of_no_use_is_hardly_asked() -> None:
    table, trace = costs(draft=1.5, row=1.0, acceptance=0.0), text([False] * 64)
    assert replay(trace, table, adaptive(table, early_stopping=True)) <= replay(trace, table, FixedPolicy(NONE, 0)) / 0.98


@pytest.mark.parametrize("row", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("symbols", [5, 20, 60])
def test_noise_that_neither_drafter_can_guess_costs_little(symbols: int, row: float) -> None:
    """N-grams are found all the time in a text of few symbols, and say nothing; nor does the draft."""
    chance, table = random.Random(1), costs(row=row, acceptance=0.02)
    drawn = [chance.randrange(symbols) for _ in range(240)]
    trace = Trace("", drawn[:40], drawn[40:], {"model": [False] * 200}, {"model": [0.3] * 200})
    policy, plain = adaptive(table, [MODEL, NGRAM]), replay(trace, table, FixedPolicy(NONE, 0))
    assert replay(trace, table, policy) <= plain / 0.95
    for _ in range(3):
        assert replay(trace, table, policy) <= plain / 0.97


@pytest.mark.parametrize("length", [30, 80, 200])
def test_text_that_changes_between_easy_and_hard_is_followed(length: int) -> None:
    """It comes back after acceptance collapsed, and does not fall behind plain decoding."""
    table = costs()
    agrees = [agreed for part in range(8) for agreed in flips(0.95 if part % 2 else 0.05, length, seed=part)]
    trace = text(agrees)
    taken = replay(trace, table, adaptive(table))
    assert taken <= replay(trace, table, FixedPolicy(NONE, 0)) / 0.97
    if length >= 80:
        assert taken <= best_fixed(trace, table)


@pytest.mark.parametrize(("row", "least", "most"), [(0.1, 1.8, 3.0), (6.0, 0.97, 1.0)])
def test_speculation_that_loses_at_high_load_turns_itself_off(row: float, least: float, most: float) -> None:
    """Eight requests whose drafts are mostly right, where checking rows costs little, and where it costs as much as passes."""
    table = costs(draft=1.0, row=row)
    policy = adaptive(table)
    acceptances = [policy.begin() for _ in range(8)]
    chance = random.Random(0)
    tokens, taken = 0, 0.0
    for at in range(600):
        sequences = [view(policy, 40 + at, acceptance=each) for each in acceptances]
        choice = policy.choose(sequences)
        time = table.round(choice.drafter, choice.k, choice.k, 40, True)
        results = []
        for _ in acceptances:
            accepted = next((i for i in range(choice.k) if chance.random() >= 0.8), choice.k)
            results.append(RoundResult(choice.drafter, [0] * choice.k, [0] * (accepted + 1), None))
            tokens += accepted + 1
        policy.observe(Observation(choice, sequences, results, time))
        taken += time
    assert least <= (tokens / taken) / (8 / table.round(NONE, 0, 0, 40, True)) <= most


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_does_not_thrash(noise: float, stops: bool) -> None:
    """At an acceptance where two choices are as good, it stays with one; what is left is plain decoding timed again, and the
    k that luck suggests."""
    table = costs(draft=1.0)
    policy = adaptive(table, early_stopping=stops)
    chosen: list[Choice] = []
    chance = random.Random(1)
    acceptance = policy.begin()
    for at in range(400):
        sequence = view(policy, 40 + at, acceptance=acceptance)
        choice = policy.choose([sequence])
        accepted = next((i for i in range(choice.k) if chance.random() >= 0.62), choice.k)
        took = table.round(choice.drafter, choice.k, choice.k, 40, True) * chance.uniform(1 - noise, 1 + noise)
        observe(policy, choice, sequence, choice.k, accepted, took)
        chosen.append(choice)
    changes = sum(before != after for before, after in pairwise(chosen))
    assert changes < 30


@pytest.mark.parametrize(("rate", "share"), [(0.3, 1.0), (0.5, 0.97), (0.7, 0.97)])
def test_stopping_where_the_draft_is_unsure_pays(rate: float, share: float) -> None:
    """Where its confidence says something of what is accepted."""
    table, agrees, chance = costs(), flips(rate), random.Random(2)
    confidences = [chance.uniform(0.5, 1) if agreed else chance.uniform(0, 0.6) for agreed in agrees]
    trace = Trace("", list(range(40)), list(range(50, 50 + len(agrees))), {"model": agrees}, {"model": confidences})
    taken = []
    for stops in (True, False):
        policy = adaptive(table, early_stopping=stops)
        taken.append(second(policy, trace, table))
    assert taken[0] <= share * taken[1]


@pytest.mark.parametrize(("draft_rate", "symbols", "repeats"), [(0.9, 6, False), (0.1, 400, True), (0.9, 400, True)])
def test_who_drafts_is_who_is_faster(draft_rate: float, symbols: int, repeats: bool) -> None:
    """N-grams that are found and wrong beside a draft that is right, the other way round, and both right."""
    chance, table = random.Random(3), costs()
    drawn = [chance.randrange(symbols) for _ in range(40)]
    tokens = drawn * 8 if repeats else [chance.randrange(symbols) for _ in range(320)]
    trace = Trace("", drawn, tokens, {"model": flips(draft_rate, 320)}, {"model": [0.5] * 320})
    taken = {}
    for names in ((MODEL, NGRAM), (MODEL,), (NGRAM,)):
        taken[names] = second(adaptive(table, names), trace, table)
    alone = [taken[MODEL,], taken[NGRAM,]]
    assert taken[MODEL, NGRAM] <= min(alone) / 0.95
    assert min(alone) < 0.8 * max(alone)


def test_the_same_rounds_lead_to_the_same_choices() -> None:
    def chosen() -> list[Choice]:
        policy = adaptive(costs(), [MODEL, NGRAM], early_stopping=True)
        found, acceptance = [], policy.begin()
        for at in range(60):
            sequence = view(policy, 40 + at, matched=at % 3, acceptance=acceptance)
            choice = policy.choose([sequence])
            observe(policy, choice, sequence, choice.k, at % (choice.k + 1), 7.0)
            found.append(choice)
        return found

    assert chosen() == chosen()


def test_rounds_that_take_longer_than_the_costs_say_are_believed() -> None:
    """The machine that runs a bundle need not be the one that measured it."""
    policy = adaptive(costs(draft=0.3))
    kinds, acceptance = [], policy.begin()
    for at in range(200):
        sequence = view(policy, 40 + at, acceptance=acceptance)
        choice = policy.choose([sequence])
        slow = 40.0 if choice.k else 6.0
        observe(policy, choice, sequence, choice.k, choice.k, slow + choice.k)
        kinds.append(choice.k)
    assert kinds[-1] == 8  # 48 ms for 9 tokens are still less than 6 ms each
    for at in range(200):
        sequence = view(policy, 300 + at, acceptance=acceptance)
        choice = policy.choose([sequence])
        observe(policy, choice, sequence, choice.k, choice.k, 100.0 if choice.k else 6.0)
        kinds.append(choice.k)
    assert kinds[-50:].count(0) > 45


def test_a_draft_that_was_left_behind_is_worth_its_catching_up_or_not() -> None:
    table = costs(draft=3.0)
    fresh = adaptive(table)
    observe(fresh, Choice(MODEL, 8), view(fresh), 8, 8, table.round(MODEL, 8, 8, 40, True))
    observe(fresh, PLAIN, view(fresh), 0, 0, table.round(NONE, 0, 0, 40, True))
    assert fresh.choose([view(fresh, 40, 20)]).drafter == MODEL
    fresh = adaptive(table)
    assert fresh.choose([view(fresh, 4000, 20, pending=4000)]).drafter == NONE
    assert fresh.choose([view(fresh, 4000, 20, pending=3998, emitted=0)]).drafter == NONE
    assert fresh.choose([view(fresh, 8, 20, pending=6, emitted=0)]).drafter == MODEL


def test_a_short_answer_does_not_hold_up_others_while_its_prompt_is_read_for_the_draft() -> None:
    """Reading 160 tokens takes 12 ms: an answer of 100 tokens is worth it, and one of two, beside three others, is not."""
    table = costs(acceptance=0.8)
    policy = adaptive(table)
    ready, long, short = view(policy), view(policy, 200, 100, pending=160), view(policy, 200, 2, pending=160)
    choice = policy.choose([ready, ready, long, short])
    assert choice.drafter == MODEL
    assert [policy.worth_catching_up(choice, each) for each in (long, short)] == [True, False]
    late = [view(policy, 200, 2, pending=160)] * 4
    assert policy.choose(late) == PLAIN, "nor is any of them alone"
    assert policy.choose([view(policy, 200, 100, pending=160)] * 4).drafter == MODEL


def test_without_measured_costs_it_goes_by_what_rounds_take() -> None:
    build: Any = SimpleNamespace(k=K, max_prompt_chunk=16, windows=[64], costs={}, acceptance={})
    manifest: Any = SimpleNamespace(models={"target": SimpleNamespace(parameters=10), "draft": SimpleNamespace(parameters=1)})
    policy = adaptive(RoundCosts(manifest, build))
    kinds, acceptance = [], policy.begin()
    for at in range(300):
        sequence = view(policy, 40 + at, acceptance=acceptance)
        choice = policy.choose([sequence])
        observe(policy, choice, sequence, choice.k, min(1, choice.k), 10.0 + 9 * choice.k)
        kinds.append(choice.k)
    assert kinds[-50:].count(0) + kinds[-50:].count(1) > 45


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_rates_are_probabilities_and_more_drafted_tokens_never_mean_fewer_emitted(rounds: list[tuple[int, int]]) -> None:
    history = Acceptance(0.7, 0.99, 2)
    seen = Acceptance(history, 0.94, 3)
    for drafted, accepted in rounds:
        history.observe(drafted, min(accepted, drafted))
        seen.observe(drafted, min(accepted, drafted))
    assert 0 <= seen.rate <= seen.optimistic <= 1
    tokens = [expected_tokens(seen.rate, k) for k in range(9)]
    assert tokens == sorted(tokens)
    assert tokens[0] == 1


def test_expected_tokens_are_the_closed_form() -> None:
    for rate in (0.0, 0.3, 0.8, 0.99):
        for k in (0, 1, 4, 9):
            assert expected_tokens(rate, k) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))


class Busy(RoundCosts):
    """A machine whose rounds take `slower` times as long now and then; `quiet` is what they would have taken."""

    def __init__(self, of: RoundCosts, seed: int, slower: float):
        self.__dict__.update(of.__dict__)
        self._chance, self._slower, self._left, self.quiet = random.Random(seed), slower, 0, 0.0

    def catch_up(self, drafter: str, tokens: int, end: int) -> float:
        self.quiet += super().catch_up(drafter, tokens, end)
        return super().catch_up(drafter, tokens, end)

    def round(self, drafter: str, drafted: int, k: int, end: int, greedy: bool, begun: int = 0) -> float:
        taken = super().round(drafter, drafted, k, end, greedy, begun)
        self.quiet += taken
        busy = self._left > 0
        self._left = self._left - 1 if busy else self._chance.choice((5, 20, 60)) * (self._chance.random() < 0.02)
        return taken * self._chance.uniform(0.9, 1.1) * (self._slower if busy else 1.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("measured", "least"), [(1.0, 0.97), (0.3, 0.93)])
def test_what_ran_while_the_machine_was_busy_is_not_taken_for_dear(measured: float, least: float, seed: int) -> None:
    """A draft of no use is not asked because plain decoding was slow for a while, nor because the machine was busy while the
    target's costs were `measured`, and not any more while the draft's were. A useful one is not given up."""
    for rate, fair in ((0.0, least), (0.8, 0.9)):
        traces = [text(flips(rate, 64, each)) for each in range(12)]
        table = costs(draft=1.5, row=1.0, acceptance=rate)
        policy = adaptive(costs(draft=1.5 * measured, row=1.0, acceptance=rate))
        machine = Busy(table, seed, slower=2.5)
        for trace in traces:
            replay(trace, machine, policy)
        assert machine.quiet <= sum(best_fixed(trace, table) for trace in traces) / fair


DEARER = [0.6, 1.5, 2.5]


@pytest.mark.in_turn(runs=lambda case: (RATES.index(case["rate"]) // 2 + DEARER.index(case["dearer"])) % 2 == case["stops"])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("dearer", DEARER)
def test_costs_of_another_machine_are_put_right(dearer: float, rate: float, stops: bool) -> None:
    """Rounds that check drafted tokens take another share of what the costs say than plain decoding does."""

    class Other(RoundCosts):
        def round(self, drafter: str, drafted: int, k: int, end: int, greedy: bool, begun: int = 0) -> float:
            return super().round(drafter, drafted, k, end, greedy, begun) * (dearer if k else 1.0)

    known, other = costs(row=0.5, acceptance=rate), costs(row=0.5)
    other.__class__ = Other
    policy, traces = adaptive(known, early_stopping=stops), [text(flips(rate, 64, each)) for each in range(16)]
    taken = 0.0
    for trace in traces:
        taken += replay(trace, other, policy)
    assert taken <= min(sum(replay(trace, other, FixedPolicy(MODEL, k)) for trace in traces) for k in [0, *K]) / 0.88


# Of a head, a parallel draft and a draft model, measured with Qwen2.5-Coder-1.5B as the target: examples/qwen2.5-coder-1.5b.
SEVERAL = ("head", "parallel", MODEL, NGRAM)
WORKLOADS = {
    "chat": (0.32, 0.55, 0.74),
    "summarization": (0.23, 0.55, 0.75),
    "math": (0.62, 0.69, 0.85),
    "code": (0.74, 0.63, 0.80),
    "support": (0.42, 0.49, 0.77),
}


def several(draft: float = 10.0) -> RoundCosts:
    """Milliseconds as measured with them, or with another draft model."""

    def table(one: float, more: float) -> list[Cost]:
        times = [(rows, one + more * (rows - 1)) for rows in (1, 2, 5, 32)]
        return [Cost(rows=n, window=4096, batch=1, median=time, fastest=time, slowest=time, runs=1) for n, time in times]

    made = {"target": table(33, 2), "draft": table(draft, 0.5), "parallel-draft": table(10, 1.2), "head": table(1.2, 0.05)}
    build: Any = SimpleNamespace(k=[1, 2, 3, 4], max_prompt_chunk=32, windows=[4096], costs=made, acceptance={})
    manifest: Any = SimpleNamespace(models={role: SimpleNamespace(parameters=1) for role in made})
    return RoundCosts(manifest, build)


def answer(workload: str, rates: Sequence[float], seed: int, count: int = 64) -> Trace:
    """An answer that repeats some of itself, or much of a long prompt. Its rates differ from those of the workload."""
    chance = random.Random(f"{workload} {seed}")
    long = workload == "summarization"
    prompt, tokens = [chance.randrange(10**6) for _ in range(500 if long else 70)], list[int]()
    while len(tokens) < count:
        if chance.random() < (0.5 if long else 0.15):
            before = prompt if long else prompt + tokens
            at = chance.randrange(len(before) - 16)
            tokens += before[at : at + chance.randrange(3, 12 if long else 7)]
        else:
            tokens += [chance.randrange(10**6) for _ in range(chance.randrange(1, 8))]
    own = [min(max(rate + chance.uniform(-0.1, 0.1), 0.02), 0.98) for rate in rates]
    agrees = {name: [chance.random() < rate for _ in range(count)] for name, rate in zip(SEVERAL[:-1], own, strict=True)}
    return Trace(workload, prompt, tokens[:count], agrees, {name: [0.5] * count for name in agrees}, count)


@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_of_several_drafters_each_request_gets_the_one_that_suits_it(mixed: bool) -> None:
    """Answers of 64 tokens, twelve of each workload, one workload after the other or in any order, take little more than with
    the drafter and k that are best for their workload in hindsight."""
    table = several()
    traces = [answer(workload, rates, seed) for workload, rates in WORKLOADS.items() for seed in range(100, 112)]
    best = 0.0
    for workload in WORKLOADS:
        of = [trace for trace in traces if trace.workload == workload]
        best += min(sum(replay(trace, table, FixedPolicy(name, k)) for trace in of) for name in SEVERAL for k in table.k)
    if mixed:
        random.Random(0).shuffle(traces)
    policy, taken = adaptive(table, SEVERAL, early_stopping=True), 0.0
    for trace in traces:
        taken += replay(trace, table, policy)
    assert taken <= best / 0.96


def test_a_drafter_that_was_of_no_use_for_long_is_found_again_beside_a_useful_one() -> None:
    """It has to read the prompt before it can be tried, so that takes a while."""
    table = several(draft=4.0)
    policy = adaptive(table, SEVERAL, early_stopping=True)
    for seed in range(20):
        replay(answer("before", (0.5, 0.3, 0.1), seed), table, policy)
    taken = [replay(answer("after", (0.5, 0.3, 0.97), seed), table, policy) for seed in range(60)]
    best = [replay(answer("after", (0.5, 0.3, 0.97), seed), table, FixedPolicy(MODEL, 4)) for seed in range(60)]
    assert sum(taken[-20:]) <= sum(best[-20:]) / 0.95


# --- in the loop ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stops", [False, True])
def test_a_slow_spell_is_forgotten(stops: bool) -> None:
    """Something else ran for a while, and rounds took three times as long: afterwards all is as it was before."""
    table = costs(draft=0.6, row=0.5)
    policy = adaptive(table, early_stopping=stops)
    acceptance = policy.begin()

    def taken(rounds: int, factor: float, seed: int) -> float:
        """Milliseconds a token."""
        chance, total, emitted = random.Random(seed), 0.0, 0
        for at in range(rounds):
            sequence = view(policy, 40 + at, acceptance=acceptance)
            choice = policy.choose([sequence])
            stop = policy.early_stop(choice, sequence)
            ends = (n for n in range(1, choice.k) if stop is not None and stop.after([0.5] * n) is not None)
            drafted = next(ends, choice.k)
            size = next(k for k in [0, *K] if k >= drafted)
            accepted = next((i for i in range(drafted) if chance.random() >= 0.8), drafted)
            took = factor * table.round(choice.drafter, drafted, size, 40, True)
            observe(policy, Choice(choice.drafter, size) if drafted else PLAIN, sequence, drafted, accepted, took)
            total, emitted = total + took, emitted + accepted + 1
        return total / emitted

    taken(200, 1.0, 0)
    before = taken(300, 1.0, 1)
    taken(20, 3.0, 2)
    taken(200, 1.0, 3)
    assert taken(300, 1.0, 1) < 1.05 * before


def test_a_request_does_not_begin_with_the_last_ones_probe() -> None:
    policy = adaptive(costs(draft=30.0))
    policy.choose([view(policy, remaining=100)])
    observe(policy, Choice(MODEL, 1), view(policy), 1, 1, 36.0)
    assert policy.choose([view(policy, 900, 100, pending=898, emitted=0)]) == PLAIN


@pytest.mark.parametrize(("draft", "rate", "chosen"), [(3.0, 0.6, GRAMMAR), (0.1, 0.9, MODEL)])
def test_one_forced_token_is_drafted_for_free_where_a_draft_brings_no_more(draft: float, rate: float, chosen: str) -> None:
    policy = adaptive(costs(draft, acceptance=rate))
    sequence = view(policy)
    sequence = sequence._replace(offers={GRAMMAR: Offer(0, Proposal([5], None)), **sequence.offers})
    assert policy.choose([sequence]).drafter == chosen


def test_a_fixed_drafter_leaves_forced_tokens_to_the_grammar() -> None:
    policy = FixedPolicy(MODEL, 4)
    free = view(policy)
    forced = free._replace(offers={GRAMMAR: Offer(0, Proposal([5], None)), **free.offers})
    late = free._replace(offers={GRAMMAR: Offer(0, Proposal([5], None))})
    assert policy.choose([forced]) == policy.choose([forced, late]) == Choice(GRAMMAR, 4)
    assert policy.choose([free, late]) == policy.choose([free, forced]) == Choice(MODEL, 4)
    assert policy.choose([late, free._replace(offers={})]) == Choice(GRAMMAR, 4)
    assert FixedPolicy(NONE, 0).choose([free._replace(offers={})]) == PLAIN


def test_spellings_that_the_target_refuses_are_proposed_no_longer() -> None:
    policy = adaptive(costs(3.0))
    sequence = view(policy)
    sequence = sequence._replace(offers={GRAMMAR: Offer(0, Proposal([5], None))})
    assert policy.choose([sequence]) == Choice(GRAMMAR, 1)
    for _ in range(20):
        observe(policy, Choice(GRAMMAR, 1), sequence, 1, 0, 6.1)
    assert policy.choose([sequence]) == PLAIN
