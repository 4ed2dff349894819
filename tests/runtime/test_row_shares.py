"""Batches whose passes leave out rows: the tokens that are most likely to be accepted get the rows, and only those that pay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import NONE, PLAIN, Choice
from outrider.runtime.policy.costs import expected_tokens
from outrider.runtime.policy.policy import Observation
from outrider.runtime.policy.row_shares import row_shares
from outrider.runtime.rounds.rounds import RoundResult
from outrider.tests.runtime.policies import MODEL, NGRAM, adaptive, costs, observe, view

TABLE = costs(draft=0.4, row=2.0)  # for four sequences, a drafted token adds half a millisecond


def test_no_other_shares_save_more() -> None:
    """Against all possible ones, also if rows cost nothing up to the next multiple of four."""
    chance = random.Random(0)
    for number in range(200):
        rates = [chance.random() for _ in range(3)]
        limits = [chance.randint(0, 3) for _ in range(3)]
        price, every = chance.uniform(0.5, 3), 1 + 3 * (number % 2)
        paid = np.array([float(-(-rows // every) * every) for rows in range(10)])

        def saved(
            shares: Sequence[int], rates: Sequence[float] = rates, price: float = price, paid: Sequence[float] = tuple(paid)
        ) -> float:
            chances = [rate**place for rate, share in zip(rates, shares, strict=True) for place in range(1, share + 1)]
            return price * sum(chances) - paid[len(chances)]

        found = row_shares(rates, limits, price, paid)
        assert all(share <= limit for share, limit in zip(found, limits, strict=True))
        best = max(saved(shares) for shares in itertools.product(*(range(limit + 1) for limit in limits)))
        assert saved(found) == pytest.approx(best)


def milliseconds(drafted: Sequence[int], ragged: bool) -> float:
    """Return the time of a round, given the drafted tokens of each sequence."""
    most = max(drafted)
    rows = 1 + (sum(drafted) / len(drafted) if ragged else TABLE.size(most))
    return TABLE.step("target", rows, 40) + (ModelDrafter.cost(TABLE, most, 40, True) if most else 0.0)


class Batch:
    """Sequences that accept drafted tokens at different rates, in rounds that take as long as `TABLE` says."""

    def __init__(self, rates: Sequence[float], ragged: bool):
        self.rates, self.policy = list(rates), AdaptivePolicy(lambda _: TABLE, [MODEL], False, ragged)
        self.acceptance = [self.policy.begin() for _ in rates]
        self.tokens, self.drafted, self.milliseconds = [0] * len(rates), [0] * len(rates), 0.0
        self._chance = random.Random(1)

    def run(self, rounds: int) -> None:
        """Run rounds, and count the tokens and the time of these alone."""
        size = len(self.rates)
        self.tokens, self.drafted, self.milliseconds = [0] * size, [0] * size, 0.0
        for _ in range(rounds):
            self._round()

    def _round(self) -> None:
        views = [view(self.policy, acceptance=each) for each in self.acceptance]
        choice = self.policy.choose(views)
        own = self.policy.each(choice, views) if choice.k else [choice] * len(views)
        choice = choice._replace(k=TABLE.size(max(each.k for each in own)))
        results, drafts = [], max(each.k for each in own)
        taken = milliseconds([each.k for each in own], self.policy.ragged)
        for at, each in enumerate(own):
            accepted = 0
            while accepted < each.k and self._chance.random() < self.rates[at]:
                accepted += 1
            self.tokens[at] += accepted + 1
            self.drafted[at] += each.k
            results.append(RoundResult(MODEL if each.k else NONE, [0] * each.k, [0] * (accepted + 1), None))
        self.milliseconds += taken
        self.policy.observe(Observation(choice if drafts else Choice(NONE, 0), views, results, taken))

    def others_tokens(self) -> float:
        """Return the tokens a millisecond of all sequences but the first."""
        return sum(self.tokens[1:]) / self.milliseconds


def test_a_sequence_that_accepts_nothing_does_not_slow_the_others() -> None:
    """It hardly gets rows, and the others emit as many tokens a second as beside a sequence that never drafts."""
    speeds = {}
    for ragged in (True, False):
        batch = Batch([0.0, 0.8, 0.8, 0.8], ragged)
        batch.run(100)
        batch.run(600)
        speeds[ragged] = batch.others_tokens()
        assert (batch.drafted[0] < 0.1 * 600) == ragged
    assert speeds[True] > 1.1 * speeds[False]
    best = max(3 * expected_tokens(0.8, k) / milliseconds([0, k, k, k], ragged=True) for k in (1, 2, 3, 4, 6, 8))
    assert speeds[True] > 0.95 * best


def test_a_sequence_that_begins_to_accept_gets_rows_again() -> None:
    batch = Batch([0.0, 0.8, 0.8, 0.8], ragged=True)
    batch.run(300)
    assert batch.drafted[0] < 0.2 * 300
    batch.rates[0] = 0.9
    batch.run(300)
    batch.run(100)
    assert batch.drafted[0] > 2 * 100


def test_the_proposal_that_is_more_often_right_gets_more_rows() -> None:
    policy = adaptive(TABLE, [NGRAM])
    policy.ragged = True
    for matched, accepted in 40 * [(2, 0), (4, 8)]:
        result = RoundResult(NGRAM, [*range(1, 9)], [*range(1, accepted + 1), 99], None)
        policy.observe(Observation(Choice(NGRAM, 8), [view(policy, matched=matched)], [result], 22.0))
        observe(policy, PLAIN, view(policy), 0, 0, 6.0)
    for lengths, shares in (
        ([2, 4, 4], [0, 8, 8]),
        ([2, 4, 0], [0, 2, 0]),  # the last has no proposals: it waits at most for a quarter of a plain round
    ):
        views = [view(policy, matched=each) for each in lengths]
        choice = policy.choose(views)
        assert choice.k == max(shares)  # a pass for more would be priced with a verifier of more rows
        assert [each.k for each in policy.each(choice, views)] == shares
    last = [view(policy, matched=4, remaining=1)] * 2
    assert policy.choose(last) == PLAIN  # no drafted token could be emitted


@pytest.mark.parametrize("on_host", [True, False])
def test_each_sequence_has_the_drafter_that_is_better_for_it(on_host: bool) -> None:
    """N-grams that are always right, beside a draft model where the host can put them there, and none that are always wrong."""
    policy = AdaptivePolicy(lambda _: costs(draft=0.4, row=0.2), [MODEL, NGRAM], on_host, ragged=True)
    acceptance = [policy.begin() for _ in range(4)]
    for _ in range(30):
        for matched, accepted in ((2, 0), (4, 8)):
            result = RoundResult(NGRAM, [*range(1, 9)], [*range(1, accepted + 1), 99], None)
            policy.observe(Observation(Choice(NGRAM, 8), [view(policy, matched=matched)], [result], 8.0))
        observe(policy, PLAIN, view(policy), 0, 0, 6.0)
    views = [view(policy, matched=matched, acceptance=each) for matched, each in zip((4, 2, 0, 0), acceptance, strict=True)]
    for each in acceptance:
        each[MODEL, 0].recall(0.7, 100)
    choice = policy.choose(views)
    own = [each.drafter if each.k else NONE for each in policy.each(choice, views)]
    assert own == ([NGRAM, MODEL, MODEL, MODEL] if on_host else [NGRAM, NONE, NONE, NONE])
