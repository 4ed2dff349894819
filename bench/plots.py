"""The plots of benchmark reports and plans, as SVG."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.bench.planner import BETTER, CHEAPER, Prediction
from outrider.bench.results import Mode, Results, Summary
from outrider.bundle.folder import write_whole
from outrider.errors import EngineError
from outrider.runtime import drafters
from outrider.runtime.policy.choice import NONE

INK, PAPER, RULE = "#1c2430", "#ffffff", "#d9dee6"
COLOURS = ("#2f6fde", "#e0662c", "#2a9d6f", "#a44fbf", "#c0392b", "#7a8699")
PARTS = ("draft", "target", "verifier", "outside_engines")
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "outrider",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
}


def pyplot() -> Any:
    """Return matplotlib's pyplot, set up for SVG in our style.

    Raises:
        EngineError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise EngineError(f"plots need matplotlib: {error}", "pip install 'outrider[bench]'") from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight", transparent=True)
    pyplot().close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _error_bars(values: list[list[float]]) -> tuple[list[float], list[list[float]]]:
    """Return medians, and the distances of the minimum and maximum from them."""
    medians = [statistics.median(each) for each in values]
    below = [median - min(each) for median, each in zip(medians, values, strict=True)]
    above = [max(each) - median for median, each in zip(medians, values, strict=True)]
    return medians, [below, above]


def speed_plot(results: Results, best_fixed: list[Summary], automatic: list[Summary]) -> str:
    """Plot tokens/s by workload for plain decoding, the best fixed mode and k = auto, which are given by workload."""
    figure, axes = pyplot().subplots(figsize=(10.4, 3.4))
    plain = [results.summary(workload, Mode(drafter=NONE, k=0)) for workload in results.workloads]
    series = [("plain", plain, COLOURS[5]), ("best fixed mode", best_fixed, COLOURS[0]), ("k = auto", automatic, COLOURS[1])]
    for index, (label, summaries, colour) in enumerate(series):
        medians, errors = _error_bars([each.tokens_per_second for each in summaries])
        places = [place + (index - 1) * 0.27 for place in range(len(summaries))]
        axes.bar(places, medians, 0.25, yerr=errors, label=label, color=colour, error_kw={"linewidth": 0.8, "ecolor": INK})
    axes.set_xticks(range(len(results.workloads)), results.workloads)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("tokens/s")
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return _svg(figure)


def k_plot(results: Results, automatic: dict[str, Summary]) -> str:
    """Plot measured and predicted speed-up against k of the bundle's first drafter, by workload."""
    plt = pyplot()
    drafter = _largest_k(results).drafter
    count = len(results.workloads)
    figure, panels = plt.subplots(1, count, figsize=(max(2.2 * count, 4), 2.8), sharey=True, squeeze=False)
    for axes, workload in zip(panels[0], results.workloads, strict=True):
        fixed = [each for each in results.summaries if each.workload == workload and each.mode.drafter in (NONE, drafter)]
        _k_panel(axes, fixed, automatic[workload])
    panels[0][0].set_ylabel("speed-up over plain")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="lower left", bbox_to_anchor=(0.05, 1))
    return _svg(figure)


def _k_panel(axes: Any, fixed: list[Summary], auto: Summary) -> None:
    ks = [each.mode.k for each in fixed]
    medians, errors = _error_bars([each.speedup for each in fixed])
    axes.errorbar(ks, medians, yerr=errors, color=COLOURS[0], marker="o", markersize=4, linewidth=1.6, label="measured")
    predicted = [(each.mode.k, each.predicted_speedup) for each in fixed if each.predicted_speedup is not None]
    if predicted:
        axes.plot(*zip(*predicted, strict=True), color=COLOURS[1], linestyle="--", linewidth=1.4, label="predicted")
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.axhspan(min(auto.speedup), max(auto.speedup), color=COLOURS[2], alpha=0.15, linewidth=0)
    axes.axhline(auto.median_speedup, color=COLOURS[2], linewidth=1.2, linestyle=":", label="k = auto")
    axes.set_title(auto.workload, fontsize=10)
    axes.set_xlabel("k")
    axes.set_xticks(ks)


def _largest_k(results: Results) -> Mode:
    """Return the mode with the largest k of the bundle's first drafter."""
    drafting = [each for each in results.modes if isinstance(each.k, int) and each.k]
    return [each for each in drafting if each.drafter == drafting[0].drafter][-1]


def acceptance_plot(results: Results) -> str:
    """Plot how often each drafted position is accepted, at the largest k."""
    figure, axes = pyplot().subplots(figsize=(4.2, 3.2))
    mode = _largest_k(results)
    for workload, colour in zip(results.workloads, COLOURS * len(results.workloads), strict=False):
        rates = results.summary(workload, mode).per_position_rates
        axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, color=colour, label=workload)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, int(mode.k) + 1))
    axes.set_xlabel(f"drafted position ({mode.label})")
    axes.set_ylabel("share accepted")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return _svg(figure)


def histogram_plot(results: Results) -> str:
    """Plot the share of rounds by the number of accepted tokens, at the largest k."""
    figure, axes = pyplot().subplots(figsize=(4.4, 3.2))
    mode = _largest_k(results)
    workloads = results.workloads[::-1]
    histograms = [results.summary(workload, mode).acceptance_histogram for workload in workloads]
    left = [0.0] * len(workloads)
    for accepted in range(int(mode.k) + 1):
        shares = [(each[accepted] if accepted < len(each) else 0) / max(sum(each), 1) for each in histograms]
        shade = 0.2 + 0.8 * accepted / int(mode.k)
        axes.barh(range(len(workloads)), shares, 0.65, left=left, color=COLOURS[0], alpha=shade, label=f"{accepted}")
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(workloads)), workloads)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"share of the rounds ({mode.label})")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=int(mode.k) + 1)
    return _svg(figure)


def parts_plot(results: Results) -> str:
    """Plot where the time of a round goes, from passes timed in the same run."""
    figure, axes = pyplot().subplots(figsize=(9.4, 3.0))
    parts = results.parts[::-1]
    left = [0.0] * len(parts)
    for name, colour in zip(PARTS, (COLOURS[0], COLOURS[5], COLOURS[2], COLOURS[4]), strict=True):
        values = [getattr(each, name) for each in parts]
        axes.barh(range(len(parts)), values, 0.65, left=left, color=colour, label=name.replace("_", " "))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(parts)), [each.mode.label for each in parts])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms per round")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
    return _svg(figure)


def write_plan(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write predicted speed-up against k as SVG, one line per workload and drafter.

    Raises:
        EngineError: matplotlib is not installed.
        FolderError: the file cannot be written.
    """
    figure, axes = pyplot().subplots(figsize=(5.4, 3.4))
    lines = list(dict.fromkeys((each.workload, each.drafter) for each in predictions if each.k))
    names = {name for _, name in lines}
    for (workload, name), colour in zip(lines, COLOURS * len(lines), strict=False):
        own = [each for each in predictions if each.workload == workload and each.drafter in (NONE, name)]
        label = ", ".join(each for each in (workload, drafters.get(name).label if len(names) > 1 else "") if each)
        ks, speedups = [each.k for each in own], [each.speedup for each in own]
        axes.plot(ks, speedups, marker="o", markersize=4, color=colour, label=label)
        axes.fill_between(ks, speedups, [each.better_draft for each in own], color=colour, alpha=0.12)
        axes.plot(ks, [each.cheaper_draft for each in own], linestyle=":", linewidth=1.2, color=colour)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xlabel("k")
    axes.set_ylabel("predicted speed-up over plain")
    note = f"shaded: {BETTER:.0%} fewer rejections; dotted: draft at {CHEAPER:.0%} of its cost"
    axes.set_title(note, fontsize=9, color=COLOURS[5])
    if len(lines) > 1 or lines[0][0]:
        axes.legend(fontsize=8)
    write_whole(path, _svg(figure).encode())
