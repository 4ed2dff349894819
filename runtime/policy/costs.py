"""How long passes take, by the costs in a bundle's manifest."""

from __future__ import annotations

import copy
import functools
from bisect import bisect_left
from collections.abc import Collection
from typing import Self

import numpy as np

from outrider.bundle.manifest import Build, Manifest

GUESSED_ROW = 0.03  # share of a one-row pass that each further row adds, if nothing was measured


def expected_tokens(rate: float, k: int) -> float:
    """Return the mean number of tokens that a round of k drafted ones emits, if each is accepted with probability `rate` after
    accepted ones: (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    return (1 - rate ** (k + 1)) / (1 - rate) if rate < 1 else k + 1.0


class Costs:
    """Milliseconds of passes of `batch` sequences.

    If nothing was measured (`measured` is False), a pass of the target takes 1, and other models take time in proportion to
    their sizes. Then only ratios are meaningful.
    """

    def __init__(self, manifest: Manifest, build: Build, batch: int = 1):
        self.k = list(build.k)
        self.chunk = build.max_prompt_chunk
        self.measured = bool(build.costs)
        self.acceptance = build.acceptance
        self._windows = build.windows
        self._last_window = len(build.windows) - 1
        self._tables: dict[str, dict[int, tuple[list[int], list[float]]]] = {}  # by engine and window: rows and medians
        sizes = {role: model.parameters for role, model in manifest.models.items()}
        self._guessed = {role: size / sizes["target"] for role, size in sizes.items()}
        for name, costs in build.costs.items():
            of_batch = [cost for cost in costs if cost.batch == max(c.batch for c in costs if c.batch <= batch)]
            windows = {cost.window for cost in of_batch}
            self._tables[name] = {
                window: ([c.rows for c in at], [c.median for c in at])
                for window in windows
                if (at := sorted((c for c in of_batch if c.window == window), key=lambda c: c.rows))
            }
        self._interpolated = functools.cache(self._interpolate)

    def scaled(self, engines: Collection[str], factor: float) -> Self:
        """Return costs by which these engines take `factor` times as long."""
        other = copy.copy(self)
        other._guessed = {role: size * (factor if role in engines else 1) for role, size in self._guessed.items()}
        other._tables = self._tables | {
            name: {at: (rows, [time * factor for time in times]) for at, (rows, times) in self._tables[name].items()}
            for name in engines
            if name in self._tables
        }
        other._interpolated = functools.cache(other._interpolate)
        return other

    def size(self, drafted: int) -> int:
        """Return the smallest k, a built one or 0, that has room for `drafted` tokens."""
        return next(k for k in (0, *self.k) if k >= drafted)

    def step(self, role: str, rows: float, end: int) -> float:
        """Return the time of a model's pass that ends at position `end`, in the smallest window that has room for it. Times
        are interpolated between measured numbers of rows, and extrapolated beyond them."""
        if role not in self._tables:
            return self._guessed[role] * (1 + GUESSED_ROW * (rows - 1))
        return self._interpolated(role, rows, self._windows[self.window(end)])

    def window(self, end: int) -> int:
        """Return the index of the smallest window with room for position `end`, or else of the last one."""
        return min(bisect_left(self._windows, end), self._last_window)

    def _interpolate(self, name: str, rows: float, window: int) -> float:
        xs, ys = self._tables[name][window]
        if rows <= xs[-1]:
            return float(np.interp(rows, xs, ys))
        # A chunk of a prompt is measured in two windows only; their slope is used in the others as well.
        longer = [table for table in self._tables[name].values() if table[0][-1] > xs[-1]]
        (*_, x, last_x), (*_, y, last_y) = longer[0] if longer and len(longer[0][0]) > 1 else (xs, ys)
        return ys[-1] + (rows - xs[-1]) * max((last_y - y) / (last_x - x), 0.0)

    def sampler(self, name: str, rows: int) -> float:
        """Return the time of a run of a sampler."""
        return self._interpolated(name, rows, 0) if name in self._tables else 0.0

    def verification(self, rows: int, end: int, greedy: bool) -> float:
        """Return the time of a pass of the target and a run of the verifier."""
        return self.step("target", rows, end) + self.sampler("greedy_verifier" if greedy else "verifier", rows)
