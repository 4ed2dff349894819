"""The rows of the report: a contestant at one k, and comparisons between them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from outrider.bench.report import spread
from outrider.experiments.compare_cpu.peers import ours


class Row:
    """A contestant at one k. Speeds are geometric means over the prompts."""

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

    def speeds(self, workload: str | None = None) -> list[float]:
        """Return the tokens/s of each round, for one workload or over all of them."""
        prompts = self.prompts[workload] if workload else range(len(self.rounds[0]))
        return [statistics.geometric_mean(runs[at]["tokens_per_second"] for at in prompts) for runs in self.rounds]

    def median(self, figure: str, workload: str | None = None) -> float:
        """Return the median of a figure over rounds and prompts."""
        prompts = self.prompts[workload] if workload else range(len(self.rounds[0]))
        return statistics.median(runs[at][figure] for runs in self.rounds for at in prompts)

    def speedup(self, other: Row, workload: str | None = None) -> list[float]:
        """Return the ratio of the speeds in each round."""
        return [a / b for a, b in zip(self.speeds(workload), other.speeds(workload), strict=True)]


def fastest(rows: list[Row], workload: str | None = None) -> Row | None:
    """Return the row with the highest median speed."""
    return max(rows, key=lambda row: statistics.median(row.speeds(workload)), default=None)


def goals(rows: list[Row], plain: Row, weights: int) -> Iterator[tuple[str, str, str]]:
    """Yield each goal in words, its threshold, and the result; `weights` are the bytes of Outrider's two models."""
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
        yield f"k = {ours.AUTO}, against the fastest mode of any peer, {name}", "at least 1.25", spread(auto.speedup(best))
    long = max(range(len(plain.rounds[0])), key=lambda at: statistics.median(runs[at]["first"] for runs in plain.rounds))
    if peers:
        first = [min(row.rounds[at][long]["first"] for row in peers) for at in range(len(plain.rounds))]
        ratios = [runs[long]["first"] / other for runs, other in zip(plain.rounds, first, strict=True)]
        yield "first token of the longest prompt, seconds against the fastest peer's", "at most 1.1", spread(ratios)
    for workload in plain.workloads:
        whole = [
            statistics.geometric_mean(before[at]["whole"] / after[at]["whole"] for at in plain.prompts[workload])
            for before, after in zip(plain.rounds, auto.rounds, strict=True)
        ]
        yield f"{workload}: k = {ours.AUTO}, against our plain", "at least 0.97", spread(auto.speedup(plain, workload))
        yield f"{workload}: the same, whole answers", "", spread(whole)
    yield "peak memory, against the weights of both models", "at most 1.15", f"{plain.peak / weights:.2f}"
