"""Options of the tests, and which of them run."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures where tests run. The process that only hands them out needs no torch, nor do checks of a GPU.

    Python keeps the bytecode of what is imported, even where it is told not to: every process that is started would compile it.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        if find_spec("torch"):
            config.pluginmanager.import_plugin("outrider.tests.fixtures")
        for number in (signal.SIGINT, signal.SIGHUP):  # ignored in the background or under nohup, and by servers, too
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exports", type=Path, help="folder of ready-made exports, for the tests marked gpu")
    parser.addoption("--large-pair", action="store_true", help="on a GPU, also time a pair in the shape of 7B and 0.5B")
    parser.addoption("--part", help="K/N: the part K of N, from 0 on, of the tests that would run")
    parser.addoption("--models-page", action="store_true", help="write docs/models.md; see the Makefile")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around where cases are left out for being slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark what only `make test-all` runs, begin with what takes longest at a stretch, skip the tests that need a GPU where
    there is none, saying what they would show, and keep one part, if that is asked for."""
    items.sort(key=lambda item: ("training" not in item.path.parts, "whole_audit" not in item.name))
    for item in items:
        turn = item.get_closest_marker("in_turn")
        if turn and isinstance(item, pytest.Function) and not turn.kwargs["runs"](item.callspec.params):
            item.add_marker(pytest.mark.slow)
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if marked and (reason := _no_gpu()):
        for item, marker in marked:
            item.add_marker(pytest.mark.skip(reason=f"{reason}; would show that {marker.args[0]}"))
    yield
    if config.option.part:
        number, count = map(int, config.option.part.split("/"))
        if not 0 <= number < count:
            raise pytest.UsageError(f"--part {config.option.part}: parts are numbered from 0 to {count - 1}")
        kept = _part(items, number, count)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def _part(items: list[pytest.Item], number: int, count: int) -> set[pytest.Item]:
    """Return one of `count` parts: a stretch of each file, since neighbours share what they are made of. Each has its share of
    what takes long."""
    part: set[pytest.Item] = set()
    files = itertools.groupby(items, key=lambda item: item.path)
    for turn, (_, of_file) in enumerate(files):  # the shortest files, with less than one test a part, in turn
        tests = [*of_file]
        part.update(test for at, test in enumerate(tests) if (at * count // len(tests) + turn) % count == number)
    return part


def _no_gpu() -> str | None:
    from outrider.engines.cuda import Cuda
    from outrider.errors import EngineError

    try:
        Cuda()
    except EngineError as error:
        return str(error)
    return None
