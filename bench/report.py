"""The report of a benchmark, as JSON and Markdown."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path

import msgspec

from outrider.bench.results import Results, Summary
from outrider.bench.simulator import REGRET_HEADS, regrets
from outrider.bench.summary import PLAIN
from outrider.bundle.folder import write_error, write_whole

HEADS = (
    "mode",
    "whole answers over plain",
    "tokens/s, decoding alone",
    "over plain",
    "predicted",
    "mean acceptance length",
    "acceptance rate",
    "first token, ms: p50 p90",
    "per token, ms: p50 p90",
    "between tokens, ms: p50 p90 p99",
    "rounds by drafter",
    "outside engines",
    "same text",
)
WHOLE_MODES = ("plain", "k = auto", "over plain")
ASSESSMENT_HEADS = (
    "workload",
    "whole answers: k = auto over plain",
    "over the best fixed mode",
    "decoding alone: k = auto over plain",
    "over the best fixed mode",
    "predicted over measured: lowest",
    "highest",
)

PART_HEADS = ("mode", "draft", "target", "verifier", "outside engines")


def prepare(folder: Path) -> None:
    """Create the folder of a report, so that an error in writing appears before anything is measured.

    Raises:
        FolderError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise write_error(folder, error) from error


def write(folder: Path, results: Results) -> None:
    """Write `bench.json` and `bench.md` into a folder that `prepare` created.

    Raises:
        FolderError: the folder cannot be written.
    """
    write_whole(folder / "bench.json", msgspec.json.format(msgspec.json.encode(results), indent=1))
    write_whole(folder / "bench.md", markdown(results).encode())


def spread(values: list[float], digits: int = 2) -> str:
    """Format values as their median, with the minimum and maximum in brackets."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def best_fixed(results: Results, workload: str, of: Callable[[Summary], list[float]]) -> Summary:
    """Return the fastest mode with a fixed k, zero included, by the median of its values."""
    fixed = [each for each in results.summaries if each.workload == workload and isinstance(each.mode.k, int)]
    return max(fixed, key=lambda each: statistics.median(of(each)))


def automatic(results: Results, workload: str) -> Summary:
    """Return the summary of k = auto."""
    return next(each for each in results.summaries if each.workload == workload and not isinstance(each.mode.k, int))


def facts(results: Results) -> list[tuple[str, str]]:
    """Return names and values that describe what was measured, where and how."""
    return [
        ("target", results.target),
        ("draft", ", ".join(results.drafts) or "none"),
        ("precision", results.precision),
        ("backend", results.backend),
        ("machine", results.machine),
        ("date", results.date),
        ("outrider", results.outrider),
        ("answers", f"greedy, up to {results.max_new_tokens} new tokens{', in the chat template' if results.chat else ''}"),
        ("rounds", f"{results.rounds}; all modes take turns in each round; medians, with minimum and maximum in brackets"),
    ]


def row(summary: Summary) -> list[str]:
    """Return one row of a workload's table, under `HEADS`."""
    drafted = summary.drafting_rounds > 0
    return [
        summary.mode.label,
        spread(summary.whole_speedup),
        spread(summary.tokens_per_second, 1),
        spread(summary.speedup),
        "-" if summary.predicted_speedup is None else f"{summary.predicted_speedup:.2f}",
        f"{summary.mean_acceptance_length:.2f}" if drafted else "-",
        f"{summary.acceptance_rate:.2f}" if drafted else "-",
        f"{summary.first_token.p50:.0f} {summary.first_token.p90:.0f}",
        f"{summary.per_token.p50:.1f} {summary.per_token.p90:.1f}",
        f"{summary.between_tokens.p50:.1f} {summary.between_tokens.p90:.1f} {summary.between_tokens.p99:.1f}",
        ", ".join(f"{name} {count / summary.rounds:.0%}" for name, count in summary.rounds_by_drafter.items()) or "-",
        f"{summary.outside_engines:.1%}",
        f"{summary.same_text} of {summary.prompts * len(summary.speedup)}",
    ]


def whole_heads(results: Results) -> list[str]:
    """Return the heads of `whole_answers`."""
    lengths = list(results.summaries[0].seconds_to)
    tokens = ["first token", *(f"{each}" for each in lengths[1:])]
    return ["workload", *(f"{mode}: {each}" for mode in WHOLE_MODES for each in tokens)]


def whole_answers(results: Results) -> list[list[str]]:
    """Compare k = auto with plain decoding by seconds to the first tokens and to the last. Returns one row per workload."""
    rows = []
    for workload in results.workloads:
        auto, plain = automatic(results, workload), results.summary(workload, PLAIN)
        seconds = [f"{each:.2f}" for mode in (plain, auto) for each in mode.seconds_to.values()]
        rows.append([workload, *seconds, *(f"{each:.2f}" for each in auto.speedup_to.values())])
    return rows


def assessment(results: Results) -> list[tuple[str, ...]]:
    """Assess k = auto and the predictions. Returns one row per workload, under `ASSESSMENT_HEADS`.

    A row compares k = auto round by round with plain decoding and with the best fixed mode: whole answers, and decoding alone.
    It also has the lowest and the highest ratio of predicted to measured speed-up of decoding alone.
    """
    rows = []
    for workload in results.workloads:
        auto, compared = automatic(results, workload), list[str]()
        for of in (attrgetter("whole_speedup"), attrgetter("speedup")):
            fixed = best_fixed(results, workload, of)
            ratios = [a / b for a, b in zip(of(auto), of(fixed), strict=True)]
            compared += [spread(of(auto)), f"{spread(ratios)} of {fixed.mode.label}"]
        errors = sorted(
            (each.predicted_speedup / each.median_speedup, each.mode.label)
            for each in results.summaries
            if each.workload == workload and each.mode.k != 0 and each.predicted_speedup is not None
        )
        extremes = [f"{ratio:.2f} ({label})" for ratio, label in (*errors[:1], *errors[-1:])] or ["-", "-"]
        rows.append((workload, *compared, *extremes))
    return rows


def markdown(results: Results) -> str:
    """Return the whole report as Markdown."""
    lines = ["# Benchmark by workload", ""]
    lines += [f"- {name}: {value}" for name, value in facts(results)]
    lines += ["", "Command:", "", f"    {results.command}", ""]
    lines += [
        "A whole answer is timed from the request to its last token, decoding alone from the moment the target has read the"
        " prompt. Ratios are to plain decoding of the same prompt in the same round, as geometric means over a workload's"
        " prompts. The prediction is for decoding alone. It uses passes timed in the same run, and the tokens that the draft"
        " would have proposed at each position of the finished text.",
        "",
    ]
    lines += ["## Whole answers", "", "Seconds from the request to a number of tokens, or to the end of shorter answers.", ""]
    lines += [*_table(whole_heads(results), whole_answers(results)), ""]
    for workload in results.workloads:
        rows = (row(each) for each in results.summaries if each.workload == workload)
        lines += [f"## {' '.join(workload.split())}", "", *_table(HEADS, rows), ""]
    lines += ["## Choice of k, and accuracy of the prediction", "", *_table(ASSESSMENT_HEADS, assessment(results)), ""]
    lines += ["## Choice of k, replayed", "", "Speed-ups of the same texts, replayed with the costs of these passes.", ""]
    lines += [*_table(REGRET_HEADS, regrets(results.policies)), ""]
    lines += [
        *_acceptance(results),
        "## Time of a round, ms",
        "",
        "From passes timed in the same run.",
        "",
        *_table(PART_HEADS, _part_rows(results)),
        "",
    ]
    return "\n".join(lines)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    lines = (" | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) for cells in rows)
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {line} |" for line in lines)]


def _acceptance(results: Results) -> list[str]:
    """Return the section on acceptance by position, at the largest k of the bundle's first drafter. Empty without a fixed k."""
    drafting = [each for each in results.modes if isinstance(each.k, int) and each.k]
    if not drafting:
        return []
    mode = [each for each in drafting if each.drafter == drafting[0].drafter][-1]
    rows = (
        (workload, *(f"{rate:.2f}" for rate in results.summary(workload, mode).per_position_rates))
        for workload in results.workloads
    )
    table = _table((mode.label, *map(str, range(1, int(mode.k) + 1))), rows)
    return ["## Acceptance by position", "", "The share of rounds in which each drafted token was accepted.", "", *table, ""]


def _part_rows(results: Results) -> Iterable[tuple[str, ...]]:
    for each in results.parts:
        yield each.mode.label, *(f"{time:.2f}" for time in (each.draft, each.target, each.verifier, each.outside_engines))
