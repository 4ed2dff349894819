"""How long rounds take here and now, compared with the bundle's costs."""

from __future__ import annotations

import math
from collections.abc import Hashable

from outrider.runtime.policy.choice import PLAIN, Choice

FAST, SLOW = 0.5, 0.03  # weight of the newest round in the fast and the slow moving averages
TURN = 0.3  # its weight in the slow ones if plain decoding and drafting have just alternated
MAX_SURPRISE = 0.7  # limit of the logarithm: a round that takes more than twice the estimate counts as twice
KEPT = 0.9995  # factor on the slow averages in each round, because what was slow once may not stay slow
PATIENCE = 50  # rounds without plain decoding after which the limit for its next one is doubled
SOON, STALE = 8, 100  # rounds after which plain decoding is timed again: the first time, and at most


class Pace:
    """Tracks measured times as a ratio to predicted ones.

    The ratio's logarithm is a sum of moving averages. A fast one is shared by all rounds and follows the machine's pace. Slow
    ones belong to the drafter, to the drafter with its k, and to the number of sequences. Plain decoding of one sequence uses
    the shared one alone. So a machine that is busy for a while makes no choice look expensive, and observations of one k
    inform the others.
    """

    def __init__(self) -> None:
        self._shared = 0.0
        self._parts: dict[Hashable, float] = {}
        self._seen: set[tuple[Choice, int]] = set()
        self._drafter: str | None = None  # of the last round that drafted
        self._rounds = self._plain = 0  # `_plain` is the last round that timed plain decoding

    @property
    def shared(self) -> float:
        """The ratio of plain decoding of one sequence."""
        return math.exp(self._shared)

    @property
    def overdue(self) -> bool:
        """Whether plain decoding must be timed again, to compare other choices with it. The interval doubles each time."""
        return self._rounds - self._plain > min(self._plain + SOON, STALE)

    def ratio(self, choice: Choice, batch: int = 1) -> float:
        """Return the expected ratio for rounds of `batch` sequences."""
        parts, total = self._parts, self._shared
        for part in _parts(choice, batch):
            total += parts.get(part, 0.0)
        return math.exp(total)

    def observe(self, ratio: float, choice: Choice, batch: int = 1) -> None:
        """Add a round of `batch` sequences."""
        self._rounds += 1
        if (choice, batch) not in self._seen:  # the first such round includes binding its buffers
            self._seen.add((choice, batch))
            return
        surprise = math.log(max(ratio, 1e-9) / self.ratio(choice, batch))
        waited = self._rounds - self._plain
        limit = MAX_SURPRISE * (1 + waited / PATIENCE) if choice == PLAIN else MAX_SURPRISE
        surprise = max(-limit, min(surprise, limit))
        self._shared += FAST * surprise
        averages = self._parts
        for part in averages:
            averages[part] *= KEPT
        for part in _parts(choice, batch):
            averages[part] = averages.get(part, 0.0) + max(SLOW, TURN / waited) * surprise
        if choice == PLAIN:
            if self._drafter is not None and waited > 1:  # or the drafter's next rounds would change the shared pace
                averages[self._drafter] = averages.get(self._drafter, 0.0) - TURN * surprise
            self._plain = self._rounds
        else:
            self._drafter = choice.drafter


def _parts(choice: Choice, batch: int) -> tuple[Hashable, ...]:
    """Return the keys of the slow averages for a round."""
    if batch == 1:
        return (choice.drafter, choice) if choice.k else ()
    return (choice.drafter, choice, batch) if choice.k else (batch,)
