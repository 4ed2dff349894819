"""The report: items of a stage that may fail one by one, rows of timings, and the summary of all stages."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from outrider.errors import OutriderError

T = TypeVar("T")


class Report:
    """Collects the items of a stage, each of which may fail; prints and saves them as they finish."""

    def __init__(self, folder: Path, stage: str):
        """Write to `folder`, going on with what the stage has written there."""
        self._path = folder / f"{stage}.json"
        self.items: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []
        if self._path.exists():
            saved = json.loads(self._path.read_text())
            self.items, self.timings = saved["items"], saved["timing"]

    @property
    def passed(self) -> bool:
        """Whether no item failed."""
        return all(item["ok"] is not False for item in self.items)

    def run(self, name: str, item: Callable[[], T]) -> T | None:
        """Run an item, and return its result, or None if it failed."""
        print(f"== {name}", flush=True)
        started = perf_counter()
        result, error = None, None
        try:
            result = item()
        except OutriderError as failure:
            error = f"{failure} (hint: {failure.hint})"
        except Exception as failure:  # the next item must run whatever this one raises
            traceback.print_exc()
            error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:600]}"
        self._add(name, error is None, result, error, round(perf_counter() - started, 1))
        return result

    def skip(self, name: str, reason: str) -> None:
        """Record that an item was not run."""
        self._add(name, None, None, reason)

    def fail(self, name: str, reason: str) -> None:
        """Record a failure."""
        self._add(name, False, None, reason)

    def _add(self, name: str, ok: bool | None, result: Any, error: str | None, seconds: float = 0) -> None:
        self.items.append({"item": name, "ok": ok, "seconds": seconds, "result": result, "error": error})
        print(f"   {name}: {_text(self.items[-1])} ({seconds} s)", flush=True)
        self.write()

    def write(self) -> None:
        """Save the stage's part of the report."""
        contents = {"date": date.today().isoformat(), "items": self.items, "timing": self.timings}
        self._path.write_text(json.dumps(contents, indent=1) + "\n")


def summarize(folder: Path, stages: Iterable[str]) -> bool:
    """Write gpu-check.json and gpu-check.md from the parts of the stages that have run; return whether no item failed."""
    parts = {name: json.loads(path.read_text()) for name in stages if (path := folder / f"{name}.json").exists()}
    (folder / "gpu-check.json").write_text(json.dumps(parts, indent=1) + "\n")
    (folder / "gpu-check.md").write_text(markdown(parts))
    return all(item["ok"] is not False for part in parts.values() for item in part["items"])


def markdown(parts: dict[str, Any]) -> str:
    """Return the parts of a report as Markdown."""
    lines = ["Written by `scripts/gpu-check`."]
    for name, part in parts.items():
        lines += ["", f"## {name}, {part['date']}", "", "| item | result | seconds |", "|---|---|---|"]
        lines += [f"| {item['item']} | {_text(item)} | {item['seconds']} |" for item in part["items"]]
        if timings := part["timing"]:
            lines += ["", "| " + " | ".join(timings[0]) + " |", "|" + "---|" * len(timings[0])]
            lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in timings]
    return "\n".join(lines) + "\n"


def _text(item: dict[str, Any]) -> str:
    if item["ok"] is None:
        return f"not checked: {item['error']}"
    if not item["ok"]:
        return f"**failed**: {item['error']}"
    result = item["result"]
    if isinstance(result, dict):
        result = ", ".join(f"{name}: {value}" for name, value in result.items())
    return ("ok" if result is None else str(result)).replace("\n", " ").replace("|", "\\|")[:600]
