"""When a round of one sequence stops drafting: when the next token is too unlikely to be accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class EarlyStop(NamedTuple):
    """A rule for one round.

    It estimates the chance that the tokens drafted so far and the next one are all accepted: `rate`, times the rate of each
    drafted token by its confidence.
    """

    rate: float
    rates: Sequence[float]  # by confidence, in equal bins from 0 to 1
    least: Sequence[float]  # by the number of tokens drafted so far: drafting stops at this chance or a lower one
    rows: Sequence[int]  # by the same number: rows of the target's pass

    def after(self, confidences: Sequence[float]) -> int | None:
        """Return the rows of the target's pass if drafting stops after tokens with these confidences; None if it continues."""
        chance, drafted = self.rate, len(confidences)
        for confidence in confidences:
            chance *= self.rates[_bin(confidence, len(self.rates))]
        return None if chance > self.least[drafted] else self.rows[drafted]


def thresholds(times: Sequence[float], rate: float, per_token: float) -> list[float]:
    """Return `EarlyStop.least`: the chance at which more tokens gain as much time as drafting and verifying them costs.

    Args:
        times: the milliseconds of a round by the number of drafted tokens.
        rate: the acceptance rate of each further token.
        per_token: the milliseconds that a token takes otherwise.
    """
    least = []
    for drafted, now in enumerate(times):
        gain, chance, lowest = 0.0, per_token, math.inf
        for time in times[drafted + 1 :]:  # one more token, or two, ...: the cost of a pass grows in steps
            gain += chance
            chance *= rate
            lowest = min(lowest, (time - now) / gain if gain else math.inf)
        least.append(lowest)
    return least


class Confidence:
    """Estimates how often tokens are accepted by the drafter's confidence in them."""

    BINS, WEIGHT, MEMORY = 10, 3.0, 0.99  # the overall rate counts as WEIGHT tokens in each bin

    def __init__(self) -> None:
        self._accepted = [0.0] * self.BINS
        self._examined = [0.0] * self.BINS

    def rates(self, rate: float) -> list[float]:
        """Return `EarlyStop.rates`, given the overall acceptance rate."""
        seen = zip(self._accepted, self._examined, strict=True)
        return [(accepted + self.WEIGHT * rate) / (examined + self.WEIGHT) for accepted, examined in seen]

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Add a round, by the confidences of its drafted tokens. The first `accepted` of them were accepted."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            at = _bin(confidence, self.BINS)
            self._accepted[at] = self._accepted[at] * self.MEMORY + (index < accepted)
            self._examined[at] = self._examined[at] * self.MEMORY + 1


def _bin(confidence: float, bins: int) -> int:
    return min(int(confidence * bins), bins - 1)
