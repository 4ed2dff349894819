"""Tests whether two samples of tokens come from the same distribution, and computes which differences the test detects."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RARE = 10  # rarer tokens, in both samples together, are grouped: the test's approximation requires it
POWER = 0.99


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two samples of tokens at one place in the text."""

    place: str
    draws: tuple[int, int]
    p_value: float  # of Pearson's chi-square test of homogeneity
    distance: float  # total variation between the two samples
    bound: float  # exceeded by chance with a probability below the significance
    distance_at_most: float  # bound on the distance of the distributions, which fails with the significance's probability
    detects: float | None  # the distance that is detected with a probability of at least POWER; None if there is none
    significance: float

    @property
    def passed(self) -> bool:
        """Whether neither the test nor the bound detects a difference."""
        return self.p_value >= self.significance and self.distance <= self.bound


def compare(place: str, one: npt.NDArray[np.int64], other: npt.NDArray[np.int64], significance: float) -> Comparison:
    """Compare two independent samples of tokens.

    The bound on the distance of two samples from one distribution: its expectation is at most
    1/2 sum sqrt(p_i (1 - p_i) (1/m + 1/n)) (Jensen; p from both samples together), and it exceeds that by t with a
    probability of at most exp(-2 t^2 / (1/m + 1/n)) (McDiarmid's inequality: one draw moves it by 1/m or 1/n).
    """
    tokens = np.union1d(one, other)
    counts = np.stack([np.bincount(np.searchsorted(tokens, each), minlength=len(tokens)) for each in (one, other)])
    sizes = counts.sum(axis=1)
    spread = float((1 / sizes).sum())
    shares = counts / sizes[:, None]
    distance = float(np.abs(shares[0] - shares[1]).sum() / 2)
    pooled = counts.sum(axis=0) / sizes.sum()
    expected = float(np.sqrt(pooled * (1 - pooled) * spread).sum() / 2)
    deviation = math.sqrt(-math.log(significance) * spread / 2)
    detects = expected + deviation + math.sqrt(-math.log(1 - POWER) * spread / 2)
    return Comparison(
        place=place,
        draws=(int(sizes[0]), int(sizes[1])),
        p_value=homogeneity(counts),
        distance=distance,
        bound=expected + deviation,
        distance_at_most=min(1.0, distance + deviation),
        detects=detects if detects <= 1 else None,
        significance=significance,
    )


def homogeneity(counts: npt.NDArray[np.integer]) -> float:
    """Return the p-value of Pearson's chi-square test that both rows of counts [2, n] come from one distribution."""
    counts = counts[:, counts.sum(axis=0) > 0]
    both = counts.sum(axis=0)
    # Rare tokens are grouped in the order of their ids until a group is large enough. The grouping depends only on the sum of
    # both samples, so it favours neither, and a token that is rare in only one sample is not grouped.
    rare = counts[:, both < RARE]
    group = (np.cumsum(rare.sum(axis=0)) - 1) // (2 * RARE)
    grouped = np.stack([np.bincount(group, weights=each, minlength=1) for each in rare])
    table = np.column_stack([counts[:, both >= RARE], grouped])
    table = table[:, table.sum(axis=0) > 0]
    freedom = table.shape[1] - 1
    if freedom == 0:
        return 1.0
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0, keepdims=True) / table.sum()
    statistic = float(((table - expected) ** 2 / expected).sum())
    return chi_square_tail(statistic, freedom)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Return P(a chi-square variable of `freedom` degrees > statistic), by its finite sum (Abramowitz and Stegun, 26.4.4-5)."""
    half = statistic / 2
    if half == 0:
        return 1.0
    powers = [freedom % 2 / 2 + at for at in range(freedom // 2)]
    tail = sum(math.exp(power * math.log(half) - half - math.lgamma(power + 1)) for power in powers)
    return min(1.0, tail + (math.erfc(math.sqrt(half)) if freedom % 2 else 0.0))
