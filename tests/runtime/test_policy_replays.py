"""k chosen live while whole texts are replayed: what it costs, and what it gains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.simulator import Trace, oracle, replay
from outrider.bundle.manifest import Cost
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import NONE
from outrider.runtime.policy.policy import FixedPolicy
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.tests.runtime.policies import MODEL, NGRAM, K, adaptive, costs, flips, text


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
    odd, usual = text([False] * 12), text(flips(0.8, 40, seed=6))
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
