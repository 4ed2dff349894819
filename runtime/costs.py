"""What rounds take, predicted from the costs of their passes in a bundle's manifest."""

from __future__ import annotations

import copy
from bisect import bisect_left

import numpy as np

from outrider.bundle.manifest import Build, Manifest
from outrider.engines.contract import DRAFTERS

GUESSED_ROW = 0.03  # of a pass of one row: what each further row adds, where nothing was measured


def expected_tokens(rate: float, k: int) -> float:
    """Tokens that a round of k drafted ones emits, where each is accepted with probability `rate` if all before it were:
    1 + a + a^2 + ... + a^k = (1 - a^(k+1)) / (1 - a) (Leviathan et al. 2023, equation 1)."""
    return float(sum(rate**i for i in range(k + 1)))


class Costs:
    """Milliseconds of passes and rounds of `batch` sequences.

    Where nothing was measured (`measured` is False), a pass of the target's takes 1 and all else what the models' sizes
    suggest: ratios alone mean something then.
    """

    def __init__(self, manifest: Manifest, build: Build, batch: int = 1):
        self.k = list(build.k)
        self.chunk = build.max_prompt_chunk
        self.measured = bool(build.costs)
        self.acceptance = build.acceptance
        self._windows = build.windows
        self._known: dict[tuple[str, int, int], float] = {}  # by engine, rows and window
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

    def with_draft(self, share: float) -> Costs:
        """The same with a draft that takes `share` of its time."""
        other = copy.copy(self)
        other._known = {}
        names = ("draft", *DRAFTERS)
        other._guessed = {role: size * (share if role in names else 1) for role, size in self._guessed.items()}
        other._tables = self._tables | {
            name: {at: (rows, [time * share for time in times]) for at, (rows, times) in self._tables[name].items()}
            for name in names
            if name in self._tables
        }
        return other

    def size(self, drafted: int) -> int:
        """The built k, or 0, that so many drafted tokens need."""
        return next(k for k in (0, *self.k) if k >= drafted)

    def step(self, role: str, rows: int, end: int) -> float:
        """A pass of a model that ends at position `end`: of the smallest window that holds it; rows between those measured
        are interpolated, and more rows than that go on as the last ones do."""
        if role not in self._tables:
            return self._guessed[role] * (1 + GUESSED_ROW * (rows - 1))
        window = self._windows[min(bisect_left(self._windows, end), len(self._windows) - 1)]
        return self._interpolated(role, rows, window)

    def _interpolated(self, name: str, rows: int, window: int) -> float:
        if (name, rows, window) not in self._known:
            self._known[name, rows, window] = self._interpolate(name, rows, window)
        return self._known[name, rows, window]

    def _interpolate(self, name: str, rows: int, window: int) -> float:
        xs, ys = self._tables[name][window]
        if rows <= xs[-1]:
            return float(np.interp(rows, xs, ys))
        # A prompt's chunk is measured in two windows alone; what its rows cost there goes for the others, too.
        longer = [table for table in self._tables[name].values() if table[0][-1] > xs[-1]]
        (*_, x, last_x), (*_, y, last_y) = longer[0] if longer and len(longer[0][0]) > 1 else (xs, ys)
        return ys[-1] + (rows - xs[-1]) * max((last_y - y) / (last_x - x), 0.0)

    def sampler(self, name: str, rows: int) -> float:
        """A run of a sampler."""
        return self._interpolated(name, rows, 0) if name in self._tables else 0.0

    def draft_step(self, end: int, greedy: bool, lead: int = 1) -> float:
        """One drafted token: a pass of the draft over `lead` rows, and its sampler."""
        return self.step("draft", lead, end) + self.sampler(DRAFTERS[greedy], 1)

    def verification(self, rows: int, end: int, greedy: bool) -> float:
        """A pass of the target and the verifier."""
        return self.step("target", rows, end) + self.sampler("greedy_verifier" if greedy else "verifier", rows)

    def round(self, drafted: int, k: int, end: int, greedy: bool) -> float:
        """A round that drafts so many tokens by the model and verifies them in a pass that was built for k."""
        taken = self.verification(k + 1, end, greedy)
        if drafted:
            taken += self.draft_step(end, greedy, lead=2) + (drafted - 1) * self.draft_step(end, greedy)
        return taken

    def catch_up(self, tokens: int, end: int) -> float:
        """Bringing so many confirmed tokens into the draft's cache."""
        whole, rest = divmod(max(tokens, 0), self.chunk)
        return (whole and whole * self.step("draft", self.chunk, end)) + (rest and self.step("draft", rest, end))
