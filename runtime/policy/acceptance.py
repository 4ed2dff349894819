"""How often drafted tokens are accepted, estimated from the rounds seen so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outrider.runtime.policy.choice import step_of
from outrider.runtime.policy.costs import expected_tokens

FADING = 0.985  # what the counts keep in a round that did not use the drafter
SPREAD = 5.0  # requests differ as rates that are drawn from a beta distribution of so many tokens
OPTIMISM = 1.0  # standard deviations by which an estimate of earlier requests is raised for a new one


class Acceptance:
    """Estimates the probability that a drafted token is accepted if all before it were; recent rounds count for more."""

    def __init__(self, before: float | Acceptance, memory: float, weight: float):
        """Start from what is believed before anything is seen.

        Args:
            before: the rate to assume where little was seen, or the estimate that provides it.
            memory: the share of the counts that each round keeps.
            weight: the number of tokens that `before` counts as.
        """
        self._before, self._memory, self._weight = before, memory, weight
        self._seen = self._accepted = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Add a round in which the first `accepted` of so many drafted tokens were accepted."""
        self._seen = self._seen * self._memory + min(drafted, accepted + 1)
        self._accepted = self._accepted * self._memory + accepted

    def recall(self, rate: float, tokens: float) -> None:
        """Continue as if so many tokens had been seen, accepted at a rate; later rounds outweigh it."""
        self._seen, self._accepted = tokens, tokens * rate

    def fade(self) -> None:
        """Note a round in which nothing was seen: what was seen before is that much older."""
        self._seen, self._accepted = self._seen * FADING, self._accepted * FADING

    @property
    def rate(self) -> float:
        """The estimate, 0..1. Where little was seen of a request, that of earlier ones counts with its standard error added:
        bad luck at the start must not decide for everything that follows."""
        return self._after(lambda earlier: earlier.optimistic)

    @property
    def cautious(self) -> float:
        """The estimate without anything added, 0..1."""
        return self._after(lambda earlier: earlier.rate)

    @property
    def upper_estimate(self) -> float:
        """What the rate of this request may well be, 0..1: that of earlier ones counts with their spread added."""
        return self._after(lambda earlier: earlier._raised(1 / SPREAD))

    @property
    def optimistic(self) -> float:
        """The estimate plus its standard error."""
        return self._raised(0.0)

    def _raised(self, spread: float) -> float:
        """Return the estimate plus a standard deviation; `spread` is the variance among requests as a share of a token's."""
        rate = self.rate
        return min(rate + OPTIMISM * math.sqrt(rate * (1 - rate) * (1 / (self._seen + self._weight) + spread)), 1.0)

    def _after(self, of: Callable[[Acceptance], float]) -> float:
        """Return the estimate, given which one of earlier requests counts where little was seen."""
        before = self._before if isinstance(self._before, float) else of(self._before)
        return (self._accepted + self._weight * before) / (self._seen + self._weight)

    def tokens(self, k: int) -> float:
        """Return the tokens that a round of k drafted ones is expected to emit."""
        return expected_tokens(self.rate, k)


class Confidence:
    """How often tokens are accepted by how confident the drafter was of them."""

    BINS, WEIGHT, MEMORY = 10, 3.0, 0.99  # WEIGHT is the number of tokens that the overall rate counts as in each bin

    def __init__(self) -> None:
        self._accepted = [0.0] * self.BINS
        self._examined = [0.0] * self.BINS

    def rates(self, rate: float) -> list[float]:
        """Return the acceptance rate of tokens by confidence, as in `EarlyStop`, where `rate` is that of all."""
        seen = zip(self._accepted, self._examined, strict=True)
        return [(accepted + self.WEIGHT * rate) / (examined + self.WEIGHT) for accepted, examined in seen]

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """Add a round's drafted tokens, of which the first `accepted` were accepted."""
        for index, confidence in enumerate(confidences[: accepted + 1]):
            at = step_of(confidence, self.BINS)
            self._accepted[at] = self._accepted[at] * self.MEMORY + (index < accepted)
            self._examined[at] = self._examined[at] * self.MEMORY + 1
