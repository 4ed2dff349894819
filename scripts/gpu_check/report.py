"""The report: items that may fail one by one, and rows of timings."""

from __future__ import annotations

import json
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import OutriderError

T = TypeVar("T")


class Report:
    """Collects items, each of which may fail, and prints them as they finish."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.items: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []

    @property
    def passed(self) -> bool:
        """Whether no item failed."""
        return all(item["ok"] is not False for item in self.items)

    def run(self, name: str, item: Callable[[], T]) -> T | None:
        """Run an item, and return its result, or None if it failed."""
        print(f"== {name}", flush=True)
        started = time.perf_counter()
        result, error = None, None
        try:
            result = item()
        except OutriderError as failure:
            error = f"{failure} (hint: {failure.hint})"
        except subprocess.TimeoutExpired as failure:
            error = f"not finished after {failure.timeout:.0f} s"
        except Exception as failure:  # the next item must run whatever this one raises
            traceback.print_exc()
            error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:600]}"
        seconds = round(time.perf_counter() - started, 1)
        self.items.append({"item": name, "ok": error is None, "seconds": seconds, "result": result, "error": error})
        print(f"   {'ok' if error is None else 'FAILED: ' + error} ({seconds} s)", flush=True)
        self.write()
        return result

    def skip(self, name: str, reason: str) -> None:
        """Record that an item was not run."""
        self.items.append({"item": name, "ok": None, "seconds": 0, "result": None, "error": reason})
        print(f"== {name}\n   not checked: {reason}", flush=True)

    def write(self) -> None:
        """Write gpu-check.json and gpu-check.md."""
        contents = {"date": date.today().isoformat(), "items": self.items, "timing": self.timings}
        (self.folder / "gpu-check.json").write_text(json.dumps(contents, indent=1) + "\n")
        (self.folder / "gpu-check.md").write_text(self.markdown())

    def markdown(self) -> str:
        """Return the report as Markdown."""
        lines = [f"Written by `scripts/gpu-check` on {date.today().isoformat()}.", ""]
        lines += ["| item | result | seconds |", "|---|---|---|"]
        for item in self.items:
            failure = "not checked" if item["ok"] is None else "**failed**"
            text = _short(item["result"]) if item["ok"] else f"{failure}: {item['error']}"
            lines.append(f"| {item['item']} | {text} | {item['seconds']} |")
        if self.timings:
            lines += ["", "| " + " | ".join(self.timings[0]) + " |", "|" + "---|" * len(self.timings[0])]
            lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in self.timings]
        return "\n".join(lines) + "\n"


def _short(result: Any) -> str:
    if isinstance(result, dict):
        return ", ".join(f"{name} {value}" for name, value in result.items())
    return str(result or "ok").replace("\n", " ")[:300]
