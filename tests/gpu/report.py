"""The report of the tests marked `gpu`: the outcome and figures of each, as JSON and as Markdown."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest


class Report:
    """Writes the report whenever a test begins or ends, so that a run that is killed leaves what it had.

    A test records its figures with `record_property`. Under the name "timing" it records a row of the table of timings.
    """

    def __init__(self, folder: Path):
        """Write to `folder`, and keep what earlier runs of other tests wrote there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._json = folder / "report.json"
        earlier = json.loads(self._json.read_text()) if self._json.exists() else {}
        self._machine: Any = earlier.get("machine", {})
        self._tests: dict[str, dict[str, Any]] = earlier.get("tests", {})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test has started."""
        self._tests.pop(nodeid, None)
        self._test(nodeid)
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the outcome of one phase of a test: setup, call or teardown."""
        test = self._test(report.nodeid)
        test["seconds"] = round(test["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            test.update(outcome=report.outcome, reason=self._reason(report))
        elif report.when == "teardown":
            if test["outcome"] == "running":
                test["outcome"] = "passed"
            for name, value in report.user_properties:
                if name == "machine":
                    self._machine = value
                elif name == "timing":
                    test["timings"].append(value)
                else:
                    test["figures"][name] = value
        self._write()

    def _test(self, nodeid: str) -> dict[str, Any]:
        test = {"date": date.today().isoformat(), "outcome": "running", "reason": "", "seconds": 0.0}
        return self._tests.setdefault(nodeid, test | {"figures": {}, "timings": []})

    def _reason(self, report: pytest.TestReport) -> str:
        if isinstance(report.longrepr, tuple):  # skipped
            return report.longrepr[2].removeprefix("Skipped: ")
        hung = self._folder / "hung.txt"
        if isinstance(report.longrepr, str) and hung.exists() and hung.read_text():  # the process died
            return hung.read_text()
        crash = getattr(report.longrepr, "reprcrash", None)
        return crash.message if crash else str(report.longrepr)

    def _write(self) -> None:
        partial = self._json.with_suffix(".partial")
        partial.write_text(json.dumps({"machine": self._machine, "tests": self._tests}, indent=1) + "\n")
        partial.replace(self._json)
        lines = [f"{name}: {value}  " for name, value in self._machine.items()]
        lines += _table([_row(name, test) for name, test in self._tests.items()])
        lines += _table([row for test in self._tests.values() for row in test["timings"]])
        (self._folder / "report.md").write_text("\n".join(["# GPU report", "", *lines, ""]))


def _row(name: str, test: dict[str, Any]) -> dict[str, Any]:
    outcome = "**failed**" if test["outcome"] == "failed" else test["outcome"]
    figures = [f"{figure}: {value}" for figure, value in test["figures"].items()]
    result = "; ".join(filter(None, (outcome, test["reason"], *figures)))
    return {"test": name.rpartition("/")[2], "result": result, "seconds": test["seconds"], "date": test["date"]}


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table, with a column for every name."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[" ".join(str(row.get(name, "-")).split()).replace("|", "\\|")[:600] for name in names] for row in rows]
    return ["", *(f"| {' | '.join(each)} |" for each in (names, ["---"] * len(names), *cells))]
