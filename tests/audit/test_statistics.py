"""The audit's tests find what they should, and raise false alarms no more often than they say."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from outrider.audit.statistics import POWER, chi_square_tail, compare, homogeneity


@pytest.mark.parametrize("freedom", [1, 2, 5, 20, 100, 400])
@pytest.mark.parametrize("p", [0.999, 0.5, 1e-2, 1e-6, 1e-30])
def test_the_tail_equals_scipys(freedom: int, p: float) -> None:
    statistic = float(scipy.stats.chi2.isf(p, freedom))
    assert chi_square_tail(statistic, freedom) == pytest.approx(p, rel=1e-6)


def test_homogeneity_equals_scipys() -> None:
    counts = np.random.default_rng(0).multinomial(2000, [0.4, 0.3, 0.2, 0.1], size=2)
    want = scipy.stats.chi2_contingency(counts, correction=False).pvalue
    assert homogeneity(counts) == pytest.approx(want, rel=1e-6)
    assert homogeneity(np.array([[5, 0], [5, 0]])) == 1.0


def test_samples_of_one_distribution_pass_and_their_p_values_are_uniform() -> None:
    random = np.random.default_rng(1)
    p = random.dirichlet(np.full(60, 0.3))
    samples = random.choice(60, (1000, 2, 500), p=p)
    comparisons = [compare("first", one, other, 1e-6) for one, other in samples]
    assert all(each.passed for each in comparisons)
    for level in (0.1, 0.01):
        assert 0.3 * level < np.mean([each.p_value < level for each in comparisons]) < 2.5 * level


def test_the_bound_holds_and_detects_what_it_claims_to() -> None:
    random = np.random.default_rng(2)
    p = random.dirichlet(np.full(30, 0.5))
    alike = compare("first", random.choice(30, 1000, p=p), random.choice(30, 1000, p=p), 1e-3)
    assert alike.detects is not None
    shift = alike.detects
    q = (1 - shift) * p  # the share `shift` of p goes to a token that p lacks: a distance of `shift`
    missed = 0
    for _ in range(300):
        other = np.where(random.random(1000) < shift, 99, random.choice(30, 1000, p=q / q.sum()))
        comparison = compare("first", random.choice(30, 1000, p=p), other, significance=1e-3)
        missed += comparison.distance <= comparison.bound
        assert comparison.distance_at_most >= shift
    assert missed <= 300 * (1 - POWER)


def test_the_bound_of_one_token_is_what_chance_allows_both_samples() -> None:
    """A sample of one token is expected to have no distance from another, and one draw moves it by 1/m or 1/n."""
    same = compare("first", np.zeros(200, np.int64), np.zeros(50, np.int64), 1e-4)
    assert same.bound == same.distance_at_most == pytest.approx(np.sqrt(np.log(1e4) * (1 / 200 + 1 / 50) / 2))
    assert same.detects == pytest.approx(same.bound + np.sqrt(-np.log(1 - POWER) * (1 / 200 + 1 / 50) / 2))
    assert (same.p_value, same.distance, same.draws) == (1, 0, (200, 50))


def test_samples_in_which_every_token_is_rare_still_show_a_difference() -> None:
    """No token is seen twice, so no bound on the distance says anything: the report says so, and the test does not rest on
    it."""
    comparison = compare("last", np.arange(1000), np.arange(500) + 5000, 1e-6)
    assert comparison.bound > 1
    assert comparison.detects is None
    assert not comparison.passed
    random = np.random.default_rng(3)
    assert all(compare("last", random.integers(0, 9000, 1000), random.integers(0, 9000, 500), 1e-4).passed for _ in range(200))
