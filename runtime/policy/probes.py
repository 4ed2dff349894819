"""Rounds that try a drafter which the steady choice does not use."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.runtime.policy.choice import NONE, PLAIN, Choice

PROBING = 0.02  # share of plain decoding's time that may be spent on trying a drafter
PROBING_OTHERS = 0.005  # share of a drafter's time that may be spent on trying another one
USEFUL = 0.25  # acceptance below which the share shrinks in proportion


class Probes:
    """Decides when to try which drafter."""

    def __init__(self) -> None:
        self.again = NONE  # the drafter of a probe that is still to run, because it reads first, or that paid off
        self._usual_round = 0.0  # milliseconds of a round of the steady choice
        self._waited: dict[str, float] = {}  # milliseconds of such rounds since a drafter was last tried
        self._prices: list[tuple[Choice, float]] = []  # what each probe must have waited

    def price(self, usual_round: float, probes: Sequence[tuple[Choice, float, float]], drafting: bool) -> None:
        """Take the possible probes, each with its extra milliseconds and the drafter's acceptance.

        Args:
            usual_round: the milliseconds of a round of the steady choice.
            drafting: whether the steady choice drafts.
        """
        share = PROBING_OTHERS if drafting else PROBING
        self._usual_round = usual_round
        self._prices = [(choice, extra / (share * min(rate / USEFUL, 1.0))) for choice, extra, rate in probes]

    def next(self) -> Choice:
        """Return the probe that is due before the next round; `PLAIN` if none is."""
        for choice, price in self._prices:
            waited = self._waited[choice.drafter] = self._waited.get(choice.drafter, 0.0) + self._usual_round
            if waited > price or choice.drafter == self.again:
                self._waited[choice.drafter], self.again = 0.0, choice.drafter
                return choice
        return PLAIN
