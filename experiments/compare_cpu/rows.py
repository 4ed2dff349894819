"""The rows of the report: a contestant at one k, and comparisons between them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from outrider.bench.report import spread
from outrider.experiments.compare_cpu.peers import ours


class Row:
    """A contestant at one k. Its figures are geometric means over the prompts, one for each round."""

    def __init__(self, entry: dict[str, Any], workloads: list[str]):
        """Read an entry of the results; `workloads` has each prompt's workload."""
        self.name, self.settings, self.k, self.peak = entry["name"], entry["settings"], entry["k"], entry["peak"]
        self.rounds: list[list[dict[str, float]]] = entry["rounds"]  # by round, one run per prompt
        self.workloads = list(dict.fromkeys(workloads))
        self.prompts = {each: [at for at, name in enumerate(workloads) if name == each] for each in self.workloads}

    @property
    def label(self) -> str:
        if self.k == 0:
            return "plain"
        if isinstance(self.k, str) and self.k != ours.AUTO:
            return f"speculative, {self.k}"
        return f"speculative, k = {self.k}"

    @property
    def is_ours(self) -> bool:
        return bool(self.name.startswith(ours.NAME))

    def means(self, figure: str, workload: str | None = None) -> list[float]:
        """Return a figure of each round, for one workload or over all of them."""
        prompts = self.prompts[workload] if workload else range(len(self.rounds[0]))
        return [statistics.geometric_mean(runs[at][figure] for at in prompts) for runs in self.rounds]

    def median(self, figure: str, workload: str | None = None) -> float:
        """Return the median of a figure over rounds and prompts."""
        prompts = self.prompts[workload] if workload else range(len(self.rounds[0]))
        return statistics.median(runs[at][figure] for runs in self.rounds for at in prompts)

    def speedup(self, other: Row, workload: str | None = None) -> list[float]:
        """Return how many times as fast as another row's its whole answers are, in each round."""
        return [b / a for a, b in zip(self.means("whole", workload), other.means("whole", workload), strict=True)]


def fastest(rows: list[Row]) -> Row | None:
    """Return the row with the shortest whole answers."""
    return min(rows, key=lambda row: statistics.median(row.means("whole")), default=None)


def goals(rows: list[Row], plain: Row, weights: int) -> Iterator[tuple[str, str, str]]:
    """Yield each goal in words, its threshold, and the result. All but the last two are of whole answers.

    Args:
        weights: bytes of Outrider's two models.
    """
    mine = [row for row in rows if row.name == plain.name and row.k != 0]
    peers = [row for row in rows if not row.is_ours]
    others = [row for row in rows if row.is_ours and row.k == 0 and row is not plain]
    for other in filter(None, (fastest([row for row in peers if row.k == 0]), *others)):
        yield f"plain, against {other.name} ({other.settings})", "", spread(plain.speedup(other))
    fixed, auto = fastest([row for row in mine if row.k != ours.AUTO]), fastest([row for row in mine if row.k == ours.AUTO])
    if fixed is not None:
        yield f"best fixed k ({fixed.k}), against our plain", "at least 1.3", spread(fixed.speedup(plain))
    if auto is None:
        return
    if (best := fastest(peers)) is not None:
        name = f"{best.name} ({best.settings}, {best.label})"
        yield f"k = {ours.AUTO}, against the fastest mode of any peer, {name}", "at least 1.4", spread(auto.speedup(best))
    for workload in plain.workloads:
        yield f"{workload}: k = {ours.AUTO}, against our plain", "at least 1.0", spread(auto.speedup(plain, workload))
    long = max(range(len(plain.rounds[0])), key=lambda at: statistics.median(runs[at]["first"] for runs in plain.rounds))
    if peers:
        first = [min(row.rounds[at][long]["first"] for row in peers) for at in range(len(plain.rounds))]
        ratios = [runs[long]["first"] / other for runs, other in zip(plain.rounds, first, strict=True)]
        yield "first token of the longest prompt, seconds against the fastest peer's", "at most 1.1", spread(ratios)
    yield "peak memory, against the weights of both models", "at most 1.15", f"{plain.peak / weights:.2f}"
