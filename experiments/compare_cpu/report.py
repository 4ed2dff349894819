"""The report: writes the results as Markdown."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from outrider.bench.report import spread
from outrider.experiments.compare_cpu.common import K, describe
from outrider.experiments.compare_cpu.peers import PEERS, genai, ours
from outrider.experiments.compare_cpu.rows import Row, fastest, goals

JsonResult = dict[str, Any]


def write_report(output: Path, result: JsonResult) -> None:
    """Write OUTPUT.md from the contents of OUTPUT.json."""
    rows = [Row(entry, result["workloads"]) for entry in result["results"]]
    plain = next(row for row in rows if row.is_ours and row.k == 0)
    text = markdown(result, rows, plain)
    Path(f"{output}.md").write_text(text, encoding="utf-8")
    print(text)


def markdown(result: JsonResult, rows: list[Row], plain: Row) -> str:
    """Return the whole report as Markdown."""
    lines = [
        *_introduction(result, plain),
        "",
        "| | | whole answers, s | against our plain | first token, s | tokens/s | acceptance | peak memory, GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        length = f"{row.median('length'):.2f}" if row.k != 0 else "-"
        whole = f"{spread(row.means('whole'))} | {spread(row.speedup(plain))} | {row.median('first'):.2f}"
        decoding = f"{spread(row.means('tokens_per_second'), 1)} | {length} | {row.peak / 1e9:.2f}"
        lines.append(f"| {row.name} ({row.settings}) | {row.label} | {whole} | {decoding} |")
    lines += [
        "",
        "## Whole answers by workload",
        "",
        "Seconds to the first and to the last token, and in brackets how many times",
    ]
    lines[-1] += " as fast as our plain decoding's the whole answer is."
    lines += ["", *_by_workload(rows, lambda row, each: _whole(row, each, plain))]
    lines += ["", "## Decoding by workload", "", "Tokens/s after the first token.", ""]
    lines += _by_workload(rows, lambda row, each: f"{statistics.median(row.means('tokens_per_second', each)):.1f}")
    best = fastest([row for row in rows if row.is_ours and row.k == ours.AUTO]) or plain
    own = next(row for row in rows if row.name == best.name and row.k == 0)
    lines += [
        "",
        "## Goals",
        "",
        f"Of {best.name}; ratios to its own plain decoding.",
        "",
        "| | goal | result |",
        "|---|---|---|",
    ]
    lines += [f"| {' | '.join(goal)} |" for goal in goals(rows, own, result["weights"][own.name])]
    return "\n".join(lines) + "\n"


def _whole(row: Row, workload: str, plain: Row) -> str:
    ratio = statistics.median(row.speedup(plain, workload))
    return f"{row.median('first', workload):.2f} / {row.median('whole', workload):.2f} ({ratio:.2f})"


def _introduction(result: JsonResult, plain: Row) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    missing = f" Not installed, and so left out: {', '.join(result['missing'])}." if result["missing"] else ""
    weights = ", ".join(f"{name} {words}" for name, words in result["weights_of"].items())
    return [
        "# Outrider and other programs on a CPU",
        "",
        *([result["about"], ""] if result["about"] else []),
        f"{len(result['workloads'])} prompts in the chat template, up to {max(map(len, plain.prompts.values()))} of each"
        f" workload, from its shortest to its longest: {min(result['prompt_tokens'])} to {max(result['prompt_tokens'])} tokens."
        f" {result['tokens']} new tokens each, greedy. Command:",
        "",
        f"    {result['command']}",
        "",
        f"Run on {result['date']}, {result['machine']}; {versions}.{missing}",
        "",
        f"Figures are medians of {len(plain.rounds)} rounds, with minimum and maximum in brackets. All programs take turns in"
        " each round. Whole answers are timed from the request to the last token, and tokens/s count those after the first;"
        " both are geometric means over the prompts. Ratios are of whole answers to Outrider's own plain decoding"
        f" ({plain.name.removeprefix(ours.NAME + ' ')}) in the same round. Acceptance is the mean acceptance length: tokens per"
        " target pass.",
        "",
        "Each peer runs with the settings that were fastest in an earlier round. Settings tried:"
        f" {'; '.join(f'{name}: {_tried(name)}' for name in result['weights_of'])}.",
        "",
        f"Weights: Outrider as named; {weights}. Outrider's processes hold both models in every row. The other programs hold"
        " the draft model only in rows where it drafts.",
    ]


def _tried(name: str) -> str:
    """Describe the settings that were tried for a peer."""
    settings = PEERS[name].SETTINGS
    ks = K if name == genai.NAME else dict.fromkeys(k for each in settings for k in each["k"] if k)
    return ", ".join([" or ".join(dict.fromkeys(map(describe, settings))), *(f"k = {k}" for k in ks)])


def _by_workload(rows: list[Row], cell: Any) -> list[str]:
    workloads = rows[0].workloads
    lines = ["| | | " + " | ".join(workloads) + " |", "|---|---|" + "---|" * len(workloads)]
    for row in rows:
        cells = " | ".join(cell(row, workload) for workload in workloads)
        lines.append(f"| {row.name} ({row.settings}) | {row.label} | {cells} |")
    return lines
