"""The rows of the report: a contestant at one k, and comparisons between them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from outrider.scripts.compare_cpu.peers import genai, llama_cpp, ours


class Row:
    """A contestant at one k. Workloads with several prompts count by their geometric mean."""

    def __init__(self, entry: dict[str, Any], workloads: list[str]):
        """Read an entry of the results; `workloads` has the workload of each prompt."""
        self.name, self.settings, self.k, self.peak = entry["name"], entry["settings"], entry["k"], entry["peak"]
        self.rounds: list[list[dict[str, float]]] = entry["rounds"]  # by round, one run per prompt
        self.workloads = list(dict.fromkeys(workloads))
        self.prompts = {each: [at for at, name in enumerate(workloads) if name == each] for each in self.workloads}

    @property
    def label(self) -> str:
        if self.k == 0:
            return "plain"
        if self.k is None:
            return "speculative, default k"
        if isinstance(self.k, str) and self.k != ours.AUTO:
            return f"speculative, {self.k} tokens"
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


def spread(values: list[float], digits: int = 2) -> str:
    """Format values as their median, with the minimum and maximum in brackets."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def goals(rows: list[Row], plain: Row, weights: int) -> Iterator[tuple[str, str, str]]:
    """Yield each goal in words, its threshold, and the result; `weights` are the bytes of Outrider's two models."""
    mine = [row for row in rows if row.name == plain.name]
    peers = [row for row in rows if not row.is_ours]
    other = fastest([row for row in peers if row.k == 0])
    if other is not None:
        yield f"plain, against the fastest peer ({other.name}, {other.settings})", "at least 1", spread(plain.speedup(other))
    for workload in (None, *(["code"] if "code" in plain.workloads else [])):
        yield from _speculative_goals([row for row in mine if row.k != 0], peers, plain, workload)
    auto = next((row for row in mine if row.k == ours.AUTO), None)
    for workload in plain.workloads if auto is not None else ():
        assert auto is not None
        whole = [
            statistics.geometric_mean(before[at]["whole"] / after[at]["whole"] for at in plain.prompts[workload])
            for before, after in zip(plain.rounds, auto.rounds, strict=True)
        ]
        yield f"{workload}: k = {ours.AUTO}, against our plain", "at least 0.97", spread(auto.speedup(plain, workload))
        yield f"{workload}: the same, whole answers", "", spread(whole)
    yield "peak memory, against the weights of both models", "at most 1.15", f"{plain.peak / weights:.2f}"


def _speculative_goals(
    drafting: list[Row], peers: list[Row], plain: Row, workload: str | None
) -> Iterator[tuple[str, str, str]]:
    best = fastest(drafting, workload)
    if best is None:
        return
    label = f"speculative, {workload or 'all workloads'} (k = {best.k})"
    yield f"{label}, against our plain", "at least 1.5 on code", spread(best.speedup(plain, workload))
    for name, threshold, only_drafting in ((genai.NAME, "1.35", True), (llama_cpp.NAME, "1.5", False)):
        rows = [row for row in peers if row.name == name and (row.k != 0 or not only_drafting)]  # llama.cpp may be best plain
        theirs = fastest(rows, workload)
        if theirs is not None:
            kind = " speculative" if only_drafting else ""
            goal = f"{label}, against {name}'s fastest{kind} mode ({theirs.label})"
            yield goal, f"at least {threshold}", spread(best.speedup(theirs, workload))
