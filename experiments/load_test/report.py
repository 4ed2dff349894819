"""The page with the results."""

from __future__ import annotations

import statistics
from typing import Any

TIMES = ("first_token", "per_token", "between_chunks")


def markdown(report: dict[str, Any], command: str) -> str:
    """Return the page for a report."""
    lines = ["# A server under load", "", f"Written by `{command}` on {report['machine']}, {report['date']}.", ""]
    lines += [*_soak(report["soak"]), ""]
    if "hostile" in report:
        lines += [*_hostile(report["hostile"]), ""]
    if "compare" in report:
        lines += [*_compare(report["compare"]), ""]
    return "\n".join(lines)


def _times(each: dict[str, float]) -> str:
    return " / ".join(f"{each[name]:.0f}" for name in ("p50", "p90", "p99"))


def _soak(soak: dict[str, Any]) -> list[str]:
    first, token, gap = (_times(soak[name]) for name in TIMES)
    return [
        f"{soak['requests']:,} requests by {soak['clients']} clients in {soak['seconds']:.0f} s: {len(soak['wrong'])} wrong;"
        f" {soak['disconnected']} clients disconnected on purpose. {soak['tokens_per_second']:.0f} tokens/s; first token"
        f" {first} ms, per token {token} ms, between chunks {gap} ms (p50 / p90 / p99). Memory:"
        f" {soak['memory']['middle'] / 2**20:.0f} MiB in the middle, {soak['memory']['last'] / 2**20:.0f} MiB at the end."
    ]


def _hostile(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{sum(row['requests'] for row in rows):,} requests by {rows[0]['clients']} good clients, alone and next to hostile"
        f" clients: {sum(len(row['wrong']) for row in rows)} wrong. Times are p50 / p90 / p99 of good clients, in ms.",
        "",
        "| hostile clients | first token | per token | between chunks | memory, MiB: first, last | log, KiB | their replies |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = f"{row['memory']['first'] / 2**20:.0f}, {row['memory']['last'] / 2**20:.0f}"
        replies = ", ".join(f"{name} ({count})" for name, count in sorted(row["replies"].items())) or "-"
        cells = [row["kinds"], *(_times(row[name]) for name in TIMES), memory, f"{row['logged'] / 1024:.0f}", replies]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _compare(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "k = auto compared with plain decoding: two servers take turns with the same requests. Medians of"
        f" {len(rows[0]['ratios'])} rounds, with minimum and maximum in brackets. Times are p50 / p90 / p99 of the requests"
        " of a round.",
        "",
        "| clients | auto, tokens/s | plain, tokens/s | ratio | auto: first token, ms | plain: first token, ms"
        " | auto: per token, ms | plain: per token, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        speeds = [statistics.median(one["tokens_per_second"] for one in each[name]) for name in ("auto", "plain")]
        ratio = f"{statistics.median(each['ratios']):.2f} ({min(each['ratios']):.2f}-{max(each['ratios']):.2f})"
        cells = [each["clients"], *(f"{speed:.0f}" for speed in speeds), ratio]
        for kind in ("first_token", "per_token"):
            for name in ("auto", "plain"):
                rounds = [one[kind] for one in each[name]]
                cells.append(_times({share: statistics.median(one[share] for one in rounds) for share in rounds[0]}))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines
