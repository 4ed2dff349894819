"""How the rows of a pass are shared among its sequences, if it can leave out those that a sequence does not need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.engines.arrays import Doubles


def row_shares(rates: Sequence[float], limits: Sequence[int], price: float, costs: Doubles) -> list[int]:
    """Return how many tokens each sequence drafts.

    The tokens that are most likely to be accepted get rows first, as many as save the most time: a row saves the time of a
    token times the probability that its token is accepted.

    Args:
        rates: of each sequence, the probability that a drafted token is accepted if all before it were.
        limits: the most tokens that each can draft.
        price: the milliseconds that a token takes otherwise.
        costs: the milliseconds that 0, 1, ... drafted tokens add to the pass.
    """
    most = max(limits, default=0)
    place, ends = np.arange(1, most + 1), np.array(limits)[:, None]
    chances = np.where(place <= ends, np.array(rates)[:, None] ** place, 0.0)
    order = np.argsort(-chances, axis=None, kind="stable")[: sum(limits)]
    gains = price * np.cumsum(chances.reshape(-1)[order]) - costs[1 : len(order) + 1]
    if not len(gains) or gains.max() <= 0:
        return [0] * len(limits)
    given = order[: gains.argmax() + 1] // most
    shares: list[int] = np.bincount(given, minlength=len(limits)).tolist()
    return shares
