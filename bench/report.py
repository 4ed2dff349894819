"""A measurement as a page with plots, and as Markdown."""

from __future__ import annotations

import io
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from outrider.bench.planner import BETTER, CHEAPER, Prediction
from outrider.bench.results import Results, Summary, Way
from outrider.bench.simulator import REGRET_HEADS, regrets
from outrider.bundle.folder import write_error, write_whole
from outrider.errors import EngineError, UsageError
from outrider.runtime.policy import MODEL, NGRAM, NONE

INK, PAPER, RULE = "#1c2430", "#ffffff", "#d9dee6"
COLOURS = ("#2f6fde", "#e0662c", "#2a9d6f", "#a44fbf", "#c0392b", "#7a8699")
PARTS = ("draft", "draft_sampler", "target", "verifier", "outside_engines")


def prepare(folder: Path) -> None:
    """Make the folder of a report, and find out before anything is measured what would be in its way.

    Raises:
        EngineError: matplotlib is not installed.
        FolderError: the folder cannot be written.
        UsageError: it has a page that is no report's.
    """
    _pyplot()
    if (folder / "index.html").exists() and not (folder / "bench.json").exists():
        raise UsageError(f"{folder} has an index.html that is no report's", "name another folder for the report")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise write_error(folder, error) from error


def write(folder: Path, results: Results) -> None:
    """`bench.json`, `bench.md` and `index.html` in a folder that `prepare` made.

    Raises:
        FolderError: the folder cannot be written.
    """
    files = {"bench.json": msgspec.json.format(msgspec.json.encode(results), indent=1)}
    files |= {"bench.md": markdown(results).encode(), "index.html": page(results).encode()}
    for name, content in files.items():
        write_whole(folder / name, content)


def spread(values: list[float], digits: int = 2) -> str:
    """Median, and in brackets the least and the greatest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def best_fixed(results: Results, workload: str) -> Summary:
    """The way with a number for k, zero included, that was the fastest."""
    found = [each for each in results.summaries if each.workload == workload and isinstance(each.way.k, int)]
    return max(found, key=lambda each: each.median_speedup)


def automatic(results: Results, workload: str) -> Summary:
    return next(each for each in results.summaries if each.workload == workload and not isinstance(each.way.k, int))


def facts(results: Results) -> list[tuple[str, str]]:
    """What was measured, where and how."""
    return [
        ("target", results.target),
        ("draft", results.draft or "none"),
        ("precision", results.precision),
        ("backend", results.backend),
        ("machine", results.machine),
        ("date", results.date),
        ("outrider", results.outrider),
        ("texts", f"greedy, up to {results.max_new_tokens} new tokens{', in the chat template' if results.chat else ''}"),
        ("rounds", f"{results.rounds}, in which all ways take turns; medians, and in brackets the least and the greatest"),
    ]


HEADS = (
    "way",
    "tokens/s",
    "speed-up",
    "predicted",
    "mean acceptance length",
    "acceptance rate",
    "first token, ms: p50 p90",
    "per token, ms: p50 p90",
    "between tokens, ms: p50 p90 p99",
    "n-gram rounds",
    "outside engines",
    "same text",
)


def row(each: Summary) -> list[str]:
    """A line of a workload's table."""
    predicted = "-" if each.predicted_speedup is None else f"{each.predicted_speedup:.2f}"
    drafted = each.drafting_rounds > 0
    return [
        each.way.label,
        spread(each.tokens_per_second, 1),
        spread(each.speedup),
        predicted,
        f"{each.mean_acceptance_length:.2f}" if drafted else "-",
        f"{each.acceptance_rate:.2f}" if drafted else "-",
        f"{each.first_token.p50:.0f} {each.first_token.p90:.0f}",
        f"{each.per_token.p50:.1f} {each.per_token.p90:.1f}",
        f"{each.between_tokens.p50:.1f} {each.between_tokens.p90:.1f} {each.between_tokens.p99:.1f}",
        f"{each.ngram_rounds / each.rounds:.0%}",
        f"{each.outside_engines:.1%}",
        f"{each.same_text} of {each.prompts * len(each.speedup)}",
    ]


def promises(results: Results) -> list[tuple[str, ...]]:
    """Of each workload, round by round: k = auto against plain decoding and against the best fixed way; and the lowest and the
    highest of what was predicted against what was measured."""
    found = []
    for workload in results.workloads:
        chosen, fixed = automatic(results, workload), best_fixed(results, workload)
        ratios = [mine / its for mine, its in zip(chosen.speedup, fixed.speedup, strict=True)]
        of = [each for each in results.summaries if each.workload == workload and each.way.k != 0]
        missed = sorted(
            (each.predicted_speedup / each.median_speedup, each.way.label) for each in of if each.predicted_speedup is not None
        )
        ends = [f"{ratio:.2f} ({label})" for ratio, label in (missed[0], missed[-1])]
        found.append((workload, spread(chosen.speedup), f"{spread(ratios)} of {fixed.way.label}", *ends))
    return found


PROMISE_HEADS = (
    "workload",
    "k = auto, over plain",
    "over the best fixed way",
    "predicted over measured: lowest",
    "highest",
)


def markdown(results: Results) -> str:
    lines = ["# Measured by workload", ""]
    lines += [f"- {name}: {value}" for name, value in facts(results)]
    lines += ["", "Made by", "", f"    {results.command}", ""]
    lines += [
        "The time of a text is from when the target has read the prompt; speed-ups are over plain decoding of the same prompt"
        " in the same round, as geometric means over a workload's prompts. Predicted is from passes timed in the same run and"
        " what the draft says to the finished text.",
        "",
    ]
    for workload in results.workloads:
        lines += [
            f"## {' '.join(workload.split())}",
            "",
            *_table(HEADS, (row(each) for each in results.summaries if each.workload == workload)),
            "",
        ]
    lines += ["## How well k was chosen and the speed-up predicted", "", *_table(PROMISE_HEADS, promises(results)), ""]
    lines += ["## How k is chosen, replayed", "", "The same texts replayed against these passes' costs; speed-ups.", ""]
    lines += [*_table(REGRET_HEADS, regrets(results.policies)), ""]
    return "\n".join(lines)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    lines = (" | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) for cells in rows)
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {line} |" for line in lines)]


# --- plots ---------------------------------------------------------------------------------------------------------------


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise EngineError(f"the report needs matplotlib: {error}", "pip install 'outrider[bench]'") from error
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style: Any = {
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
    plt.rcParams.update(style)
    return plt


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight", transparent=True)
    _pyplot().close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _around(values: list[list[float]]) -> tuple[list[float], list[list[float]]]:
    """Medians, and how far the least and the greatest are from them."""
    medians = [statistics.median(each) for each in values]
    below = [median - min(each) for median, each in zip(medians, values, strict=True)]
    above = [max(each) - median for median, each in zip(medians, values, strict=True)]
    return medians, [below, above]


def speed_plot(results: Results) -> str:
    """Tokens/s of each workload: plain, the best fixed way, and what chooses itself."""
    figure, axes = _pyplot().subplots(figsize=(10.4, 3.4))
    shown = [
        ("plain", [results.of(workload, Way(drafter="none", k=0)) for workload in results.workloads]),
        ("best fixed way", [best_fixed(results, workload) for workload in results.workloads]),
        ("k = auto", [automatic(results, workload) for workload in results.workloads]),
    ]
    for index, (label, summaries) in enumerate(shown):
        medians, around = _around([each.tokens_per_second for each in summaries])
        places = [at + (index - 1) * 0.27 for at in range(len(summaries))]
        colour = (COLOURS[5], COLOURS[0], COLOURS[1])[index]
        axes.bar(places, medians, 0.25, yerr=around, label=label, color=colour, error_kw={"linewidth": 0.8, "ecolor": INK})
    axes.set_xticks(range(len(results.workloads)), results.workloads)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("tokens/s")
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return _svg(figure)


def k_plot(results: Results) -> str:
    """Speed-up against k of the draft model, or of n-grams without one, measured and predicted, a panel for each workload."""
    plt = _pyplot()
    drafter = MODEL if any(way.drafter == MODEL for way in results.ways) else NGRAM
    count = len(results.workloads)
    figure, panels = plt.subplots(1, count, figsize=(max(2.2 * count, 4), 2.8), sharey=True, squeeze=False)
    for axes, workload in zip(panels[0], results.workloads, strict=True):
        of = [each for each in results.summaries if each.workload == workload and each.way.drafter in (NONE, drafter)]
        ks = [each.way.k for each in of]
        medians, around = _around([each.speedup for each in of])
        axes.errorbar(ks, medians, yerr=around, color=COLOURS[0], marker="o", markersize=4, linewidth=1.6, label="measured")
        known = [(each.way.k, each.predicted_speedup) for each in of if each.predicted_speedup is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=COLOURS[1], linestyle="--", linewidth=1.4, label="predicted")
        axes.axhline(1, color=INK, linewidth=0.8)
        chosen = automatic(results, workload)
        axes.axhspan(min(chosen.speedup), max(chosen.speedup), color=COLOURS[2], alpha=0.15, linewidth=0)
        axes.axhline(chosen.median_speedup, color=COLOURS[2], linewidth=1.2, linestyle=":", label="k = auto")
        axes.set_title(workload, fontsize=10)
        axes.set_xlabel("k")
        axes.set_xticks(ks)
    panels[0][0].set_ylabel("speed-up over plain")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="lower left", bbox_to_anchor=(0.05, 1))
    return _svg(figure)


def acceptance_plot(results: Results) -> str:
    """How often each drafted position is accepted, at the largest k of the draft model; or of n-grams, without one."""
    figure, axes = _pyplot().subplots(figsize=(4.2, 3.2))
    way = _largest(results)
    for workload, colour in zip(results.workloads, COLOURS * len(results.workloads), strict=False):
        rates = results.of(workload, way).per_position_rates
        axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, color=colour, label=workload)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, int(way.k) + 1))
    axes.set_xlabel(f"drafted position ({way.label})")
    axes.set_ylabel("share accepted")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return _svg(figure)


def histogram_plot(results: Results) -> str:
    """The share of rounds that accepted none of the drafted tokens, one, two, ..., of the same way."""
    figure, axes = _pyplot().subplots(figsize=(4.4, 3.2))
    way = _largest(results)
    workloads = results.workloads[::-1]
    counted = [results.of(workload, way).acceptance_histogram for workload in workloads]
    left = [0.0] * len(workloads)
    for accepted in range(int(way.k) + 1):
        shares = [(each[accepted] if accepted < len(each) else 0) / max(sum(each), 1) for each in counted]
        shade = 0.2 + 0.8 * accepted / int(way.k)
        axes.barh(range(len(workloads)), shares, 0.65, left=left, color=COLOURS[0], alpha=shade, label=f"{accepted}")
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(workloads)), workloads)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"share of the rounds ({way.label})")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=int(way.k) + 1)
    return _svg(figure)


def _largest(results: Results) -> Way:
    """The largest k of the draft model, or of n-grams without one."""
    drafting = [each for each in results.ways if isinstance(each.k, int) and each.k]
    return next((each for each in reversed(drafting) if each.drafter == MODEL), drafting[-1])


def parts_plot(results: Results) -> str:
    """Where the time of a round goes, by passes timed in the same run."""
    figure, axes = _pyplot().subplots(figsize=(9.4, 3.0))
    parts = results.parts[::-1]
    left = [0.0] * len(parts)
    for name, colour in zip(PARTS, (COLOURS[0], COLOURS[3], COLOURS[5], COLOURS[2], COLOURS[4]), strict=True):
        values = [getattr(each, name) for each in parts]
        axes.barh(range(len(parts)), values, 0.65, left=left, color=colour, label=name.replace("_", " "))
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(parts)), [each.way.label for each in parts])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms a round")
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
    return _svg(figure)


PAGE = Path(__file__).with_name("report.html")


def page(results: Results) -> str:
    """One file of HTML, which needs no other."""
    best_of = {workload: best_fixed(results, workload) for workload in results.workloads}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    plots = {"speed": speed_plot, "against_k": k_plot, "acceptance": acceptance_plot, "histogram": histogram_plot}
    plots["parts"] = parts_plot
    drawn = {name: Markup(make(results)) for name, make in plots.items()}
    return environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        results=results,
        headline=[(each, automatic(results, each), best_of[each]) for each in results.workloads],
        spread=spread,
        tables=[(each, [row(s) for s in results.summaries if s.workload == each]) for each in results.workloads],
        best_of={workload: each.way.label for workload, each in best_of.items()},
        heads=HEADS,
        promises=promises(results),
        promise_heads=PROMISE_HEADS,
        regrets=regrets(results.policies),
        regret_heads=REGRET_HEADS,
        facts=facts(results),
        ink=INK,
        rule=RULE,
        paper=PAPER,
        **drawn,
    )


def write_plan(path: Path, predictions: Sequence[Prediction]) -> None:
    """Predicted speed-up against k as SVG, a line for each workload.

    Raises:
        EngineError: matplotlib is not installed.
        FolderError: the file cannot be written.
    """
    figure, axes = _pyplot().subplots(figsize=(5.4, 3.4))
    for workload, colour in zip(dict.fromkeys(each.workload for each in predictions), COLOURS * len(predictions), strict=False):
        of = [each for each in predictions if each.workload == workload]
        axes.plot([p.k for p in of], [p.speedup for p in of], marker="o", markersize=4, color=colour, label=workload)
        axes.fill_between([p.k for p in of], [p.speedup for p in of], [p.better_draft for p in of], color=colour, alpha=0.12)
        axes.plot([p.k for p in of], [p.cheaper_draft for p in of], linestyle=":", linewidth=1.2, color=colour)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xlabel("k")
    axes.set_ylabel("predicted speed-up over plain")
    axes.set_title(
        f"shaded: {BETTER:.0%} fewer rejections; dotted: the draft at {CHEAPER:.0%} of its cost", fontsize=9, color=COLOURS[5]
    )
    if any(each.workload for each in predictions):
        axes.legend(fontsize=8)
    write_whole(path, _svg(figure).encode())
