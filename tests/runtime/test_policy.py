"""k chosen live, round by round."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.runtime.drafters.base import Proposal, Reading
from outrider.runtime.policy.acceptance import Acceptance
from outrider.runtime.policy.choice import NONE, PLAIN, Choice
from outrider.runtime.policy.costs import expected_tokens
from outrider.runtime.policy.lengths import USUAL
from outrider.runtime.policy.policy import FixedPolicy, Observation, Offer
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.rounds.rounds import RoundResult
from outrider.tests.runtime.policies import GRAMMAR, MODEL, NGRAM, K, adaptive, costs, observe, view


def test_catching_up_takes_what_rounds_take_of_what_the_costs_say() -> None:
    """Costs that are half of what all takes here: what the draft must read costs twice as much, too."""
    table = costs()
    policy = adaptive(table)
    for _ in range(8):
        observe(policy, PLAIN, view(policy), 0, 0, 2 * table.round(NONE, 0, 0, 40, True))
    taken, rounds = policy.times.catch_up(MODEL, Reading(0, 100), 40)
    assert taken == pytest.approx(2 * table.catch_up(MODEL, 100, 40), rel=0.05)
    assert rounds == 1


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


def test_the_prompt_is_read_if_the_answer_will_probably_be_long_enough() -> None:
    """Not by what it may be at most. Reading takes 140 ms, and 23 rounds meanwhile, which half of the answer must repay."""
    policy = adaptive(costs(acceptance=0.9))
    lengths, others = policy.lengths("a"), policy.lengths("b")
    assert lengths.expected(0, 1000) == USUAL
    assert lengths.expected(0, 10) == 10
    for _ in range(20):
        lengths.observe(5)
    assert policy.lengths("a") is lengths
    assert lengths.expected(0, 1000) == pytest.approx((20 * 5 + 2 * USUAL) / 22)
    assert lengths.expected(5, 1000) == USUAL  # longer than any before
    assert others.expected(0, 1000) == USUAL
    for _ in range(20):
        (doubtful := policy.lengths("c")).observe(80)
    for each, drafter in ((lengths, NONE), (doubtful, NONE), (others, MODEL)):
        sequence = view(policy, 2000, pending=1900, emitted=0)._replace(lengths=each)
        assert policy.choose([sequence]).drafter == drafter


def test_a_short_answer_does_not_hold_up_others_while_its_prompt_is_read_for_the_draft() -> None:
    """Reading 160 tokens takes 12 ms: an answer of 100 tokens is worth it, and one of two, beside three others, is not."""
    table = costs(acceptance=0.8)
    policy = adaptive(table)
    ready, long, short = view(policy), view(policy, 200, 100, pending=160), view(policy, 200, 2, pending=160)
    choice = policy.choose([ready, ready, long, short])
    assert choice.drafter == MODEL
    assert [policy.reading(choice, each) for each in (long, short)] == [Reading(0, 160), None]
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
    sequence = sequence._replace(offers={GRAMMAR: Offer([Reading(0, 0)], Proposal([5], None)), **sequence.offers})
    assert policy.choose([sequence]).drafter == chosen


def test_a_fixed_drafter_leaves_forced_tokens_to_the_grammar() -> None:
    policy = FixedPolicy(MODEL, 4)
    free = view(policy)
    forced = free._replace(offers={GRAMMAR: Offer([Reading(0, 0)], Proposal([5], None)), **free.offers})
    late = free._replace(offers={GRAMMAR: Offer([Reading(0, 0)], Proposal([5], None))})
    assert policy.choose([forced]) == policy.choose([forced, late]) == Choice(GRAMMAR, 4)
    assert policy.choose([free, late]) == policy.choose([free, forced]) == Choice(MODEL, 4)
    assert policy.choose([late, free._replace(offers={})]) == Choice(GRAMMAR, 4)
    assert FixedPolicy(NONE, 0).choose([free._replace(offers={})]) == PLAIN


def test_spellings_that_the_target_refuses_are_proposed_no_longer() -> None:
    policy = adaptive(costs(3.0))
    sequence = view(policy)
    sequence = sequence._replace(offers={GRAMMAR: Offer([Reading(0, 0)], Proposal([5], None))})
    assert policy.choose([sequence]) == Choice(GRAMMAR, 1)
    for _ in range(20):
        observe(policy, Choice(GRAMMAR, 1), sequence, 1, 0, 6.1)
    assert policy.choose([sequence]) == PLAIN
