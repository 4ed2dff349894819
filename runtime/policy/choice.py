"""What a policy decides on before a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NONE = "none"  # stands for a drafter where a round drafts nothing
AUTO = "auto"  # stands for a k or a drafter that is chosen for every round


class Choice(NamedTuple):
    """How a round drafts."""

    drafter: str  # a drafter's name, or `NONE`
    k: int  # a number of draft tokens that was built, or 0


PLAIN = Choice(NONE, 0)


class EarlyStop(NamedTuple):
    """Where a round of one sequence stops drafting: when the next token is too unlikely to be accepted.

    The chance that the tokens drafted so far and the next one are all accepted is taken to be `rate`, times the rate of each
    drafted token by its confidence.
    """

    rate: float
    rates: Sequence[float]  # by confidence, in equal steps from 0 to 1
    least: Sequence[float]  # the chance up to which drafting stops, by the number of tokens drafted so far
    rows: Sequence[int]  # of the target's pass, by the same number

    def after(self, confidences: Sequence[float]) -> int | None:
        """Return the rows of the target's pass if drafting stops after tokens of these confidences, and None if not."""
        chance, drafted = self.rate, len(confidences)
        for confidence in confidences:
            chance *= self.rates[step_of(confidence, len(self.rates))]
        return None if chance > self.least[drafted] else self.rows[drafted]


def step_of(confidence: float, steps: int) -> int:
    """Return which of so many equal steps from 0 to 1 a confidence is in."""
    return min(int(confidence * steps), steps - 1)
