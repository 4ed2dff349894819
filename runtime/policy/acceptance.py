"""How often drafted tokens are accepted, estimated from earlier rounds."""

from __future__ import annotations

import math
from collections.abc import Callable

FADING = 0.985  # what a round that did not use the drafter multiplies its counts by
SPREAD = 5.0  # the rates of requests are modelled as draws from a beta distribution that counts as this many tokens
OPTIMISM = 1.0  # standard deviations to add to the estimate of earlier requests for a new one


DraftedBy = tuple[str, int]  # a drafter, and how much of a text it has read, as in `Reading.window`


class Acceptance:
    """Estimates the probability that a drafted token is accepted if all before it were. Recent rounds count for more."""

    def __init__(self, before: float | Acceptance, memory: float, weight: float):
        """Start from a prior.

        Args:
            before: the prior rate, or the estimate that provides it.
            memory: the share of the counts to keep after each round.
            weight: the number of tokens that the prior counts as.
        """
        self._before, self._memory, self._weight = before, memory, weight
        self._seen = self._accepted = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Add a round in which the first `accepted` of `drafted` tokens were accepted."""
        self._seen = self._seen * self._memory + min(drafted, accepted + 1)
        self._accepted = self._accepted * self._memory + accepted

    def recall(self, rate: float, tokens: float) -> None:
        """Replace the counts by `tokens` tokens accepted at a rate. Later rounds outweigh them."""
        self._seen, self._accepted = tokens, tokens * rate

    def fade(self) -> None:
        """Note a round without observations: the counts weigh less."""
        self._seen, self._accepted = self._seen * FADING, self._accepted * FADING

    @property
    def observed(self) -> bool:
        """Whether it has seen drafted tokens."""
        return self._seen > 0

    @property
    def rate(self) -> float:
        """The estimate, 0..1. Its prior is the estimate of earlier requests plus its standard error, so that bad luck at the
        start does not decide the rest."""
        return self._with_prior(lambda earlier: earlier.optimistic)

    @property
    def cautious(self) -> float:
        """The estimate with nothing added to its prior, 0..1."""
        return self._with_prior(lambda earlier: earlier.rate)

    @property
    def upper_estimate(self) -> float:
        """The estimate whose prior is that of earlier requests plus their spread, 0..1."""
        return self._with_prior(lambda earlier: earlier._raised(1 / SPREAD))

    @property
    def optimistic(self) -> float:
        """The estimate plus its standard error."""
        return self._raised(0.0)

    def _raised(self, spread: float) -> float:
        """Return the estimate plus a standard deviation; `spread` is the variance among requests relative to a token's."""
        rate = self.rate
        return min(rate + OPTIMISM * math.sqrt(rate * (1 - rate) * (1 / (self._seen + self._weight) + spread)), 1.0)

    def _with_prior(self, of: Callable[[Acceptance], float]) -> float:
        before = self._before if isinstance(self._before, float) else of(self._before)
        return (self._accepted + self._weight * before) / (self._seen + self._weight)


class Estimates(dict[DraftedBy, Acceptance]):
    """Estimates of acceptance, made when they are first asked for."""

    def __init__(self, make: Callable[[DraftedBy], Acceptance]):
        super().__init__()
        self._make = make

    def __missing__(self, drafted_by: DraftedBy) -> Acceptance:
        estimate = self[drafted_by] = self._make(drafted_by)
        return estimate
