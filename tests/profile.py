"""Adds up the processor time of a run of the tests by what it is spent on: `scripts/test -p outrider.tests.profile`.

Each second counts once, for the innermost of the activities that it belongs to. Time is that of the thread which is at work;
what other threads do, such as those of ONNX Runtime, is in "the rest", with what no activity has.
"""

from __future__ import annotations

import builtins
import importlib
import json
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

import pytest

ACTIVITIES = {
    "tracing": ["torch.onnx:export", "torch.export:export"],
    "quantizing": ["outrider.export.weights.quantize:quantize_model", "outrider.export.weights.quantize:pack"],
    "checking exports": ["outrider.export.parity:reference", "outrider.export.parity:Exported.results"],
    "measuring perplexity": ["outrider.export.heldout:perplexity"],
    "exporting, the rest": ["outrider.export.pair:export"],
    "building": ["outrider.builder.build:build_engine"],
    "timing passes": ["outrider.builder.passes:measure"],
    "acceptance": ["outrider.builder.acceptance:measure_acceptance"],
    "training": ["outrider.training.loop:fit"],
    "audits": ["outrider.audit.audit:audit"],
    "decoding": ["outrider.runtime.scheduler:Scheduler.step"],
    "opening engines": ["outrider.runtime.loaded:LoadedBundle.__init__"],
}
IMPORTING, PROCESSES, REST = "importing", "processes that are started", "the rest"

_seconds: dict[str, float] = defaultdict(float)
_calls: dict[str, int] = defaultdict(int)
_files: dict[str, float] = defaultdict(float)  # seconds of each file of tests, with its fixtures and processes
_workers: list[list[dict[str, float]]] = []  # what each worker reports: seconds, calls and files
_local = threading.local()


def _count(activity: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, whose time counts for `activity`, less that of the activities in it."""

    @wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        stack = _local.__dict__.setdefault("stack", [])
        stack.append(0.0)
        started = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            spent = time.thread_time() - started
            _seconds[activity] += spent - stack.pop()
            if activity != IMPORTING:
                _calls[activity] += 1
            if stack:
                stack[-1] += spent

    return counted


def _count_imports() -> None:
    original = builtins.__import__
    timed = _count(IMPORTING, original)

    def imported(name: str, *arguments: Any, **options: Any) -> Any:
        return (original if name in sys.modules else timed)(name, *arguments, **options)

    builtins.__import__ = imported
    importlib.import_module = _count(IMPORTING, importlib.import_module)  # pytest's way


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # the workers count
    _seconds[IMPORTING] += time.thread_time()
    _count_imports()
    for activity, places in ACTIVITIES.items():
        for place in places:
            module, _, name = place.partition(":")
            *owners, last = name.split(".")
            owner: Any = importlib.import_module(module)
            for each in owners:
                owner = getattr(owner, each)
            original = getattr(owner, last)
            counted = _count(activity, original)
            setattr(owner, last, counted)
            for importer in [each for name, each in sys.modules.items() if name.startswith("outrider.")]:
                for own in [own for own, value in vars(importer).items() if value is original]:
                    setattr(importer, own, counted)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _report() -> list[dict[str, float]]:
    rest = time.process_time() - sum(_seconds.values())
    return [_seconds | {PROCESSES: _children(), REST: rest}, dict(_calls), _files]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    started = time.process_time() + _children()
    try:
        return (yield)
    finally:
        _files[item.nodeid.partition("::")[0]] += time.process_time() + _children() - started


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["profile"] = json.dumps(_report())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "profile" in getattr(node, "workeroutput", {}):
        _workers.append(json.loads(node.workeroutput["profile"]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = _workers or [_report()]
    seconds, calls, files = (
        {name: sum(each.get(name, 0) for each in part) for each in part for name in each} for part in zip(*reports, strict=True)
    )
    for title, table in (("activity", seconds), ("file", files)):
        terminalreporter.section(f"processor time by {title}")
        for name, spent in sorted(table.items(), key=lambda each: -each[1]):
            terminalreporter.write_line(f"| {name} | {spent:.0f} s | {calls.get(name, '')} |")
    terminalreporter.write_line(f"| all | {sum(seconds.values()):.0f} s | |")
