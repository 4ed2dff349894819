"""How long rounds take, by the costs of their passes and their drafters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import Self

import numpy as np

from outrider.bundle.manifest import Build, Manifest
from outrider.engines.arrays import Doubles
from outrider.runtime import drafters
from outrider.runtime.policy.costs import Costs

# Tokens of a piece. Fewer take hardly less time.
LEAST, MOST = 16, 2**16


class RoundCosts(Costs):
    """Milliseconds of rounds of `batch` sequences."""

    def __init__(self, manifest: Manifest, build: Build, batch: int = 1):
        super().__init__(manifest, build, batch)
        self._more_rows: dict[tuple[int, int, int], Doubles] = {}  # by the arguments of `more_rows`, the end as a window
        self._pieces: dict[tuple[str, int], int] = {}  # by the arguments of `piece`, the end as a window
        self._rounds: dict[tuple[str, int, int, int, bool, int], float] = {}  # by the arguments of `round`, the end as a window

    def scaled(self, engines: Collection[str], factor: float) -> Self:
        """See `Costs.scaled`."""
        other = super().scaled(engines, factor)
        other._rounds, other._more_rows, other._pieces = {}, {}, {}
        return other

    def round(self, drafter: str, drafted: int, k: int, end: int, greedy: bool, begun: int = 0) -> float:
        """Return the time of a round that drafts `drafted` tokens and verifies them in a pass built for k that ends at position
        `end`. For `begun` see `Drafter.cost`."""
        key = drafter, drafted, k, self.window(end), greedy, begun
        time = self._rounds.get(key)
        if time is None:
            time = self.verification(k + 1, end, greedy)
            if drafted:
                time += drafters.get(drafter).cost(self, drafted, end, greedy, begun)
            self._rounds[key] = time
        return time

    def more_rows(self, sequences: int, k: int, end: int) -> Doubles:
        """Return the time that 0, 1, ..., `sequences` x `k` rows add to a pass of one row for each sequence."""
        key = sequences, k, self.window(end)
        if key not in self._more_rows:
            times = [self.step("target", 1 + rows / sequences, end) for rows in range(sequences * k + 1)]
            self._more_rows[key] = np.maximum.accumulate(np.array(times)) - times[0]
        return self._more_rows[key]

    def catch_up(self, drafter: str, tokens: int, end: int) -> float:
        """Return the time that a drafter takes to process `tokens` pending tokens, piece by piece."""
        if tokens <= 0:
            return 0.0
        kind, piece = drafters.get(drafter), self.piece(drafter, end)
        whole, rest = divmod(tokens, piece)
        return (whole and whole * kind.catch_up_cost(self, piece, end)) + (rest and kind.catch_up_cost(self, rest, end))

    def pieces(self, drafter: str, tokens: int, end: int) -> int:
        """Return in how many pieces a drafter processes pending tokens, while plain rounds between them add one each."""
        return max(-(-(tokens - 1) // (self.piece(drafter, end) - 1)), 1) if tokens > 0 else 0

    def piece(self, drafter: str, end: int) -> int:
        """Return how many pending tokens of a text of `end` tokens a drafter processes between two rounds: as many as take no
        longer than plain decoding of one token, so that a client waits for two such rounds at most, but not fewer than
        `LEAST`."""
        key = drafter, self.window(end)
        if key not in self._pieces:
            kind, most = drafters.get(drafter), self.step("target", 1, end)
            fitting = bisect_right(range(1, MOST), most, key=lambda size: kind.catch_up_cost(self, size, end))
            self._pieces[key] = max(fitting, LEAST)
        return self._pieces[key]
