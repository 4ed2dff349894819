"""Fits the costs of passes that were not timed to those that were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from outrider.bundle.manifest import Cost

Place = tuple[int, int, int]
"""Rows, window and batch of a pass."""


def complete(timed: Sequence[Cost], wanted: Iterable[Place]) -> list[Cost]:
    """Return the costs in milliseconds of an engine's `wanted` passes: the timed ones, and the others fitted to them.

    To the time of the same rows in their smallest window, each further sequence adds a time, and each further position of the
    window another, which may grow with the batch. What they add is known for some numbers of rows, and is linear in between
    and beyond. It is never negative, so a fitted cost does not fall as the window or the batch grows.

    Args:
        timed: every number of rows, in its smallest window and for one sequence. At least one of these rows also in the largest
            window, for the largest batch, and both, where there are several.
    """
    costs = {(cost.rows, cost.window, cost.batch): cost for cost in timed}
    times = {place: cost.median for place, cost in costs.items()}
    last, most = max(window for _, window, _ in times), max(batch for _, _, batch in times)
    first: dict[int, int] = {}
    for rows, window, _ in sorted(times):
        first.setdefault(rows, window)
    sequence = {
        rows: (times[rows, window, most] - times[rows, window, 1]) / (most - 1)
        for rows, window in first.items()
        if most > 1 and (rows, window, most) in times
    }
    alone, together = (
        {
            rows: (times[rows, last, batch] - times[rows, window, batch]) / (last - window)
            for rows, window in first.items()
            if last > window and {(rows, last, batch), (rows, window, batch)} <= times.keys()
        }
        for batch in (1, most)
    )

    def fitted(rows: int, window: int, batch: int) -> Cost:
        position = _at(rows, alone)
        position += (batch - 1) / max(most - 1, 1) * max(_at(rows, together) - position, 0.0)
        added = (batch - 1) * _at(rows, sequence) + (window - first[rows]) * position
        time = round(times[rows, first[rows], 1] + added, 4)
        return Cost(rows=rows, window=window, batch=batch, median=time, fastest=time, slowest=time, runs=0)

    return [costs.get(place) or fitted(*place) for place in wanted]


def _at(rows: int, known: Mapping[int, float]) -> float:
    """Return what `known` has for these rows, on the line through the nearest two. Neither it nor a line beyond the last falls
    below zero or falls at all, which only noise would make them do."""
    if not known:
        return 0.0
    xs, ys = [*known], [max(each, 0.0) for each in known.values()]
    beyond = max(rows - xs[-1], 0) * max(ys[-1] - ys[-2], 0.0) / (xs[-1] - xs[-2]) if len(xs) > 1 else 0.0
    return float(np.interp(rows, xs, ys)) + beyond
