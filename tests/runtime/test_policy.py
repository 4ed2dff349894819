"""k chosen live: what it costs, what it gains, and that no token depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.bench.simulator import Trace, oracle, replay
from outrider.bundle.manifest import Cost
from outrider.runtime.costs import Costs, expected_tokens
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy import MODEL, NGRAM, NONE, PLAIN, Acceptance, Choice, Company, Fixed, Member, Policy

PROMPT = "Customer: Hi, I would like to book a table for two in San Jose."
K = [1, 2, 4, 8]


def costs(draft: float = 1.0, row: float = 0.1, target: float = 6.0, acceptance: float | None = None) -> Costs:
    """A pass of the target takes `target` and `row` more for each further row."""

    def table(of: Callable[[int], float]) -> list[Cost]:
        return [
            Cost(rows=rows, window=64, batch=1, median=of(rows), fastest=of(rows), slowest=of(rows), runs=1)
            for rows in (1, 2, 3, 5, 9, 16)
        ]

    made = {"target": table(lambda rows: target + row * (rows - 1)), "draft": table(lambda rows: draft * (1 + 0.01 * rows))}
    build: Any = SimpleNamespace(k=K, max_prompt_chunk=16, windows=[64], costs=made, acceptance=acceptance)
    models = {"target": SimpleNamespace(parameters=6), "draft": SimpleNamespace(parameters=1)}
    manifest: Any = SimpleNamespace(models=models)
    return Costs(manifest, build)


def text(agrees: list[bool], prompt: int = 40) -> Trace:
    """A text in which no n-gram comes twice."""
    start = prompt + 10
    return Trace("", list(range(prompt)), list(range(start, start + len(agrees))), agrees, [0.5] * len(agrees))


def flips(rate: float, count: int = 400, seed: int = 0) -> list[bool]:
    chance = random.Random(seed)
    return [chance.random() < rate for _ in range(count)]


def best_fixed(trace: Trace, table: Costs) -> float:
    return min(replay(trace, table, Fixed(MODEL, k)) for k in [0, *K])


def second(policy: Policy, trace: Trace, table: Costs) -> float:
    """What a text takes the second time: from a server's first request it learns."""
    replay(trace, table, policy)
    policy.start(greedy=True)
    return replay(trace, table, policy)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("draft", [0.3, 1.0, 3.0])
def test_it_is_as_fast_as_the_best_fixed_k_and_never_slower_than_plain(draft: float, rate: float, stops: bool) -> None:
    table, trace = costs(draft), text(flips(rate))
    policy = Policy(table, [MODEL], stops)
    taken = second(policy, trace, table)
    assert taken <= best_fixed(trace, table) / 0.95
    assert taken <= replay(trace, table, Fixed(NONE, 0)) / 0.97
    assert oracle(trace, table, [MODEL]) <= taken


@pytest.mark.parametrize("stops", [False, True])
def test_a_draft_that_is_of_no_use_costs_little_from_the_first_request_on(stops: bool) -> None:
    table = costs()
    policy, trace = Policy(table, [MODEL], stops), text(flips(0.0, 200))
    plain = replay(trace, table, Fixed(NONE, 0))
    assert replay(trace, table, policy) <= plain / 0.95
    total = 0.0
    for _ in range(8):
        policy.start(greedy=True)
        total += replay(trace, table, policy)
    assert total <= 8 * plain / 0.98


def test_what_the_bundle_says_of_its_draft_is_believed_before_an_odd_request_is() -> None:
    """One answer that the draft got wrong throughout, and then short ones that it gets right mostly."""
    odd, usual = text([False] * 12), text(flips(0.8, 40))
    taken = {}
    for acceptance in (0.8, None):
        table = costs(draft=1.5, row=0.5, acceptance=acceptance)
        policy = Policy(table, [MODEL], stops=False)
        replay(odd, table, policy)
        policy.start(greedy=True)
        taken[acceptance] = replay(usual, table, policy)
    assert taken[0.8] <= best_fixed(usual, table) / 0.95
    assert taken[None] > 1.1 * taken[0.8]


def test_what_was_measured_elsewhere_does_not_outlive_what_is_seen() -> None:
    """A draft that is cheap, was right on the shipped prompts, and never is here."""
    table, trace = costs(draft=0.5, acceptance=0.9), text([False] * 64)
    policy = Policy(table, [MODEL], stops=False)
    for _ in range(6):
        policy.start(greedy=True)
        replay(trace, table, policy)
    policy.start(greedy=True)
    assert replay(trace, table, policy) <= replay(trace, table, Fixed(NONE, 0)) / 0.97


def test_catching_up_takes_what_rounds_take_of_what_the_costs_say() -> None:
    """Costs that are half of what all takes here: what the draft must read costs twice as much, too."""
    table = costs()
    policy = Policy(table, [MODEL], stops=False)
    for _ in range(8):
        policy.observe(PLAIN, 0, 0, 40, 2 * table.round(0, 0, 40, True))
    assert policy._catch_up(100, 40) == pytest.approx(2 * table.catch_up(100, 40), rel=0.01)


def test_a_draft_that_was_measured_to_be_of_no_use_is_hardly_asked() -> None:
    table, trace = costs(draft=1.5, row=1.0, acceptance=0.0), text([False] * 64)
    assert replay(trace, table, Policy(table, [MODEL], stops=True)) <= replay(trace, table, Fixed(NONE, 0)) / 0.98


@pytest.mark.parametrize("row", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("symbols", [5, 20, 60])
def test_noise_that_neither_drafter_can_guess_costs_little(symbols: int, row: float) -> None:
    """N-grams are found all the time in a text of few symbols, and say nothing; nor does the draft."""
    chance, table = random.Random(1), costs(row=row, acceptance=0.02)
    drawn = [chance.randrange(symbols) for _ in range(240)]
    trace = Trace("", drawn[:40], drawn[40:], [False] * 200, [0.3] * 200)
    policy, plain = Policy(table, [MODEL, NGRAM], stops=False), replay(trace, table, Fixed(NONE, 0))
    assert replay(trace, table, policy) <= plain / 0.95
    for _ in range(3):
        policy.start(greedy=True)
        assert replay(trace, table, policy) <= plain / 0.97


@pytest.mark.parametrize("length", [30, 80, 200])
def test_text_that_changes_between_easy_and_hard_is_followed(length: int) -> None:
    """It comes back after acceptance collapsed, and does not fall behind plain decoding."""
    table = costs()
    agrees = [agreed for part in range(8) for agreed in flips(0.95 if part % 2 else 0.05, length, seed=part)]
    trace = text(agrees)
    taken = replay(trace, table, Policy(table, [MODEL], stops=False))
    assert taken <= replay(trace, table, Fixed(NONE, 0)) / 0.97
    if length >= 80:
        assert taken <= best_fixed(trace, table)


@pytest.mark.parametrize(("row", "least", "most"), [(0.1, 1.8, 3.0), (6.0, 0.97, 1.0)])
def test_speculation_that_loses_at_high_load_turns_itself_off(row: float, least: float, most: float) -> None:
    """Eight requests whose drafts are mostly right, where checking rows costs little, and where it costs as much as passes."""
    table = costs(draft=1.0, row=row)
    company = Company(Policy(costs(), [MODEL], stops=False), lambda _: table, [MODEL])
    acceptances = [company._policy.acceptance() for _ in range(8)]
    chance = random.Random(0)
    tokens, taken = 0, 0.0
    for at in range(600):
        members = [Member(40 + at, 0, 0, 1000, each, True) for each in acceptances]
        choice = company.choose(members)
        time = table.round(choice.k, choice.k, 40, True)
        company.observe(choice, members, time)
        for each in acceptances:
            accepted = next((i for i in range(choice.k) if chance.random() >= 0.8), choice.k)
            company.observe_text(choice.drafter, each, choice.k, accepted)
            tokens += accepted + 1
        taken += time
    assert least <= (tokens / taken) / (8 / table.round(0, 0, 40, True)) <= most


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_does_not_thrash(noise: float, stops: bool) -> None:
    """At an acceptance where two choices are as good, it stays with one; what is left is plain decoding timed again, and the
    k that luck suggests."""
    table = costs(draft=1.0)
    policy = Policy(table, [MODEL], stops)
    chosen: list[Choice] = []
    chance = random.Random(1)
    for at in range(400):
        choice = policy.choose(40 + at, 0, 0, 1000)
        accepted = next((i for i in range(choice.k) if chance.random() >= 0.62), choice.k)
        took = table.round(choice.k, choice.k, 40, True) * chance.uniform(1 - noise, 1 + noise)
        policy.observe(choice, choice.k, accepted, 40 + at, took)
        chosen.append(choice)
    changes = sum(before != after for before, after in pairwise(chosen))
    assert changes < 30


@pytest.mark.parametrize(("rate", "share"), [(0.3, 1.0), (0.5, 0.97), (0.7, 0.97)])
def test_stopping_where_the_draft_is_unsure_pays(rate: float, share: float) -> None:
    """Where its confidence says something of what is accepted."""
    table, agrees, chance = costs(), flips(rate), random.Random(2)
    confidences = [chance.uniform(0.5, 1) if agreed else chance.uniform(0, 0.6) for agreed in agrees]
    trace = Trace("", list(range(40)), list(range(50, 50 + len(agrees))), agrees, confidences)
    taken = []
    for stops in (True, False):
        policy = Policy(table, [MODEL], stops)
        taken.append(second(policy, trace, table))
    assert taken[0] <= share * taken[1]


@pytest.mark.parametrize(("draft_rate", "symbols", "repeats"), [(0.9, 6, False), (0.1, 400, True), (0.9, 400, True)])
def test_who_drafts_is_who_is_faster(draft_rate: float, symbols: int, repeats: bool) -> None:
    """N-grams that are found and wrong beside a draft that is right, the other way round, and both right."""
    chance, table = random.Random(3), costs()
    drawn = [chance.randrange(symbols) for _ in range(40)]
    tokens = drawn * 8 if repeats else [chance.randrange(symbols) for _ in range(320)]
    trace = Trace("", drawn, tokens, flips(draft_rate, 320), [0.5] * 320)
    taken = {}
    for drafters in ((MODEL, NGRAM), (MODEL,), (NGRAM,)):
        policy = Policy(table, drafters, stops=False)
        taken[drafters] = second(policy, trace, table)
    alone = [taken[MODEL,], taken[NGRAM,]]
    assert taken[MODEL, NGRAM] <= min(alone) / 0.95
    assert min(alone) < 0.8 * max(alone)


def test_the_same_rounds_lead_to_the_same_choices() -> None:
    def chosen() -> list[Choice]:
        policy = Policy(costs(), [MODEL, NGRAM], stops=True)
        found = []
        for at in range(60):
            choice = policy.choose(40 + at, 0, at % 3, 1000)
            policy.observe(choice, choice.k, at % (choice.k + 1), 40 + at, 7.0)
            found.append(choice)
        return found

    assert chosen() == chosen()


def test_rounds_that_take_longer_than_the_costs_say_are_believed() -> None:
    """The machine that runs a bundle need not be the one that measured it."""
    policy = Policy(costs(draft=0.3), [MODEL], stops=False)
    kinds = []
    for at in range(200):
        choice = policy.choose(40 + at, 0, 0, 1000)
        slow = 40.0 if choice.k else 6.0
        policy.observe(choice, choice.k, choice.k, 40 + at, slow + choice.k)
        kinds.append(choice.k)
    assert kinds[-1] == 8  # 48 ms for 9 tokens are still less than 6 ms each
    for at in range(200):
        choice = policy.choose(300 + at, 0, 0, 1000)
        policy.observe(choice, choice.k, choice.k, 300 + at, 100.0 if choice.k else 6.0)
        kinds.append(choice.k)
    assert kinds[-50:].count(0) > 45


def test_a_draft_that_was_left_behind_is_worth_its_catching_up_or_not() -> None:
    table = costs(draft=3.0)
    fresh = Policy(table, [MODEL], stops=False)
    fresh.observe(Choice(MODEL, 8), 8, 8, 40, table.round(8, 8, 40, True))
    fresh.observe(PLAIN, 0, 0, 40, table.round(0, 0, 40, True))
    assert fresh.choose(40, 0, 0, 20).drafter == MODEL
    fresh = Policy(table, [MODEL], stops=False)
    assert fresh.choose(4000, 4000, 0, 20).drafter == NONE
    assert not fresh.reads(4000, 20)
    assert fresh.reads(8, 20)


def test_without_measured_costs_it_goes_by_what_rounds_take() -> None:
    build: Any = SimpleNamespace(k=K, max_prompt_chunk=16, windows=[64], costs={}, acceptance=None)
    manifest: Any = SimpleNamespace(models={"target": SimpleNamespace(parameters=10), "draft": SimpleNamespace(parameters=1)})
    policy = Policy(Costs(manifest, build), [MODEL], stops=False)
    kinds = []
    for at in range(300):
        choice = policy.choose(40 + at, 0, 0, 1000)
        policy.observe(choice, choice.k, min(1, choice.k), 40 + at, 10.0 + 9 * choice.k)
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
    assert 0 <= seen.rate <= seen.hopeful <= 1
    tokens = [seen.tokens(k) for k in range(9)]
    assert tokens == sorted(tokens)
    assert tokens[0] == 1


def test_expected_tokens_are_the_closed_form() -> None:
    for rate in (0.0, 0.3, 0.8, 0.99):
        for k in (0, 1, 4, 9):
            assert expected_tokens(rate, k) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))


class Busy(Costs):
    """A machine whose rounds take `slower` times as long now and then; `quiet` is what they would have taken."""

    def __init__(self, of: Costs, seed: int, slower: float):
        self.__dict__.update(of.__dict__)
        self._chance, self._slower, self._left, self.quiet = random.Random(seed), slower, 0, 0.0

    def catch_up(self, tokens: int, end: int) -> float:
        self.quiet += super().catch_up(tokens, end)
        return super().catch_up(tokens, end)

    def round(self, drafted: int, k: int, end: int, greedy: bool) -> float:
        taken = super().round(drafted, k, end, greedy)
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
        policy = Policy(costs(draft=1.5 * measured, row=1.0, acceptance=rate), [MODEL], stops=False)
        machine = Busy(table, seed, slower=2.5)
        for trace in traces:
            policy.start(greedy=True)
            replay(trace, machine, policy)
        assert machine.quiet <= sum(best_fixed(trace, table) for trace in traces) / fair


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("dearer", [0.6, 1.5, 2.5])
def test_costs_of_another_machine_are_put_right(dearer: float, rate: float, stops: bool) -> None:
    """Rounds that check drafted tokens take another share of what the costs say than plain decoding does."""

    class Other(Costs):
        def round(self, drafted: int, k: int, end: int, greedy: bool) -> float:
            return super().round(drafted, k, end, greedy) * (dearer if k else 1.0)

    known, other = costs(row=0.5, acceptance=rate), costs(row=0.5)
    other.__class__ = Other
    policy, traces = Policy(known, [MODEL], stops), [text(flips(rate, 64, each)) for each in range(16)]
    taken = 0.0
    for trace in traces:
        policy.start(greedy=True)
        taken += replay(trace, other, policy)
    assert taken <= min(sum(replay(trace, other, Fixed(MODEL, k)) for trace in traces) for k in [0, *K]) / 0.88


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


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"repetition_penalty": 1.2},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.4},
    ],
    ids=str,
)
def test_the_text_is_plain_decodings_whatever_was_chosen(
    shipped: Outrider, way: dict[str, Any], params: dict[str, Any]
) -> None:
    """A seed fixes the answer, though what is chosen depends on how long rounds took."""
    plain = tokens(shipped, k=0, **params)
    for _ in range(3):
        assert tokens(shipped, **way, **params) == plain


@pytest.mark.parametrize("jitter", range(6))
def test_the_times_of_rounds_change_k_and_nothing_else(shipped: Outrider, jitter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is ours: rounds seem to take now this long, now that, and k goes up and down; the text stays. The same times
    give the same choices."""
    params = SamplingParams(temperature=0.9, seed=11, max_new_tokens=150)

    def run() -> tuple[list[int], list[int]]:
        """The text, and the tokens drafted in each round."""
        chance, now = random.Random(jitter), [0.0]

        def clock() -> float:
            now[0] += chance.choice([0.001, 0.01, 0.1])
            return now[0]

        monkeypatch.setattr(shipped.loop, "_clock", clock)
        policy = shipped.policy
        monkeypatch.setattr(shipped, "policy", Policy(policy.costs, policy.drafters, policy.stops))
        text, drafted = list[int](), [0]
        for event in shipped.generate(PROMPT, params):
            text += event.token_ids
            drafted.append(event.stats.drafted)
        return text, [after - before for before, after in pairwise(drafted)]

    text, chosen = run()
    assert text == tokens(shipped, k=0, temperature=0.9, seed=11, max_new_tokens=150)
    assert len(set(chosen)) > 2
    assert run() == (text, chosen)


def test_a_seed_with_the_rule_of_rejection_keeps_to_one_k(shipped: Outrider) -> None:
    asked: dict[str, Any] = {"temperature": 0.9, "seed": 11, "rule": "rejection"}
    assert tokens(shipped, **asked) == tokens(shipped, k=shipped.default_k, **asked)


def test_ngrams_are_found_in_the_prompt_and_accepted(shipped: Outrider) -> None:
    prompt = "Customer: I need a flight. Agent: " * 6
    events = list(shipped.generate(prompt, SamplingParams(max_new_tokens=60), k=8, drafter="ngram"))
    stats = events[-1].stats
    assert stats.ngram_rounds == stats.drafting_rounds > 0
    assert stats.ngram_accepted == stats.accepted > 0
    assert sum(stats.histogram) == stats.drafting_rounds
    assert sum(count * at for at, count in enumerate(stats.histogram)) == stats.accepted


def test_a_round_stops_drafting_where_the_draft_is_unsure(shipped: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of ours that makes drafting worth while, whatever machine this is."""
    times = costs(draft=0.5)
    monkeypatch.setattr(shipped, "policy", Policy(times, [MODEL], stops=True))
    now = [0.0]

    def clock() -> float:
        now[0] += 0.006
        return now[0]

    monkeypatch.setattr(shipped.loop, "_clock", clock)
    asked: list[tuple[float, bool]] = []
    worth = Policy.worth

    def noted(self: Policy, confidences: list[float], k: int, length: int) -> bool:
        going_on = worth(self, confidences, k, length)
        asked.append((confidences[-1], going_on))
        return going_on

    monkeypatch.setattr(Policy, "worth", noted)
    for _ in range(3):
        events = list(shipped.generate(PROMPT, SamplingParams(max_new_tokens=120), drafter="model"))
    drafted = events[-1].stats.drafted_at
    assert len(drafted) > 1
    assert drafted[0] > drafted[-1]
    stopped, went_on = ([confidence for confidence, on in asked if on == which] for which in (False, True))
    assert sum(stopped) / len(stopped) < sum(went_on) / len(went_on)


@pytest.mark.parametrize("stops", [False, True])
def test_a_slow_spell_is_forgotten(stops: bool) -> None:
    """Something else ran for a while, and rounds took three times as long: afterwards all is as it was before."""
    table = costs(draft=0.6, row=0.5)
    policy = Policy(table, [MODEL], stops)

    def taken(rounds: int, factor: float, seed: int) -> float:
        """Milliseconds a token."""
        chance, total, emitted = random.Random(seed), 0.0, 0
        for at in range(rounds):
            choice = policy.choose(40 + at, 0, 0, 1000)
            most = choice.k if stops else 1
            ends = (n for n in range(1, most) if not policy.worth([0.5] * n, choice.k, 40 + at))
            drafted = next(ends, choice.k)
            size = next(k for k in [0, *K] if k >= drafted)
            accepted = next((i for i in range(drafted) if chance.random() >= 0.8), drafted)
            took = factor * table.round(drafted, size, 40, True)
            policy.observe(Choice(choice.drafter, size) if drafted else PLAIN, drafted, accepted, 40 + at, took)
            total, emitted = total + took, emitted + accepted + 1
        return total / emitted

    taken(200, 1.0, 0)
    before = taken(300, 1.0, 1)
    taken(20, 3.0, 2)
    taken(200, 1.0, 3)
    assert taken(300, 1.0, 1) < 1.05 * before


def test_a_request_does_not_begin_with_the_last_ones_probe() -> None:
    policy = Policy(costs(draft=30.0), [MODEL], stops=False)
    policy.choose(40, 0, 0, 100)
    policy.observe(Choice(MODEL, 1), 1, 1, 40, 36.0)
    policy.start(greedy=True)
    assert policy.choose(900, 898, 0, 100) == PLAIN
