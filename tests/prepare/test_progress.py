"""What is shown while a model is prepared: a bar where the total is known, which is then reached, and a spinner elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.audit.engine_checks import compare_engines
from outrider.backends.open import open_bundle, open_engines
from outrider.commands.output import progress_bar
from outrider.export.pair import export_pair
from outrider.progress import Progress
from outrider.tests.export import quantized
from outrider.tests.support import PAIR, build

OF_UNKNOWN_LENGTH = ("loading ", "reading the vocabularies", "running the ", "tracing the ", "fusing the ", "rewriting the ")


class Counted(Progress):
    """Adds up what is reported in each stage."""

    def __init__(self) -> None:
        self.totals: dict[str, int | None] = {}
        self.done: dict[str, int] = {}

    def stage(self, name: str, total: int | None = None) -> None:
        self.last = name
        self.totals[name], self.done[name] = total, 0

    def advance(self, size: int) -> None:
        self.done[self.last] += size


def check_reached(progress: Counted) -> None:
    """Check that every stage ended at its total, except for those whose length nothing tells.

    A tied weight may be read once more, and what is written besides the tensors is not counted.
    """
    unknown = [name for name, total in progress.totals.items() if total is None]
    assert [name for name in unknown if not name.startswith(OF_UNKNOWN_LENGTH)] == []
    known = {name: total for name, total in progress.totals.items() if total is not None}
    assert {name for name, total in known.items() if abs(progress.done[name] - total) > max(1, total / 100)} == set()
    assert known


@pytest.mark.parametrize("kind", ["rounded", "kept"])
def test_the_stages_of_an_export_reach_their_totals(tmp_path: Path, kind: str) -> None:
    progress, source, precision = Counted(), PAIR / "draft", "int4"
    if kind == "kept":
        source, precision = quantized.write(source, tmp_path / "model", "awq"), "as-is"
    export_pair(str(source), None, tmp_path / "export", precision=precision, progress=progress)
    check_reached(progress)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_the_stages_of_a_build_and_of_a_comparison_reach_their_totals(
    tmp_path: Path, tiny_exports: Callable[[str], Path], backend: str
) -> None:
    progress, bundle, export = Counted(), tmp_path / "bundle", tiny_exports("int4")
    build(export, bundle, backend=backend, k=[1, 2], capacity=64, batch=2, measured=None, progress=progress)
    check_reached(progress)
    compared = [*compare_engines(open_engines(bundle, *open_bundle(bundle)), export, progress)]
    check_reached(progress)
    assert compared


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_only_if_the_total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "100")
    shown = []
    for total in (None, 4):
        with progress_bar() as progress:
            progress.stage("working", total)
            progress.advance(2)
        shown.append(terminal.getvalue())
        terminal.truncate(0)
    assert ["━" in each for each in shown] == ["%" in each for each in shown] == [False, True]
    assert all("working" in each for each in shown)
    monkeypatch.setattr(sys, "stderr", plain := io.StringIO())
    with progress_bar() as progress:
        progress.stage("working", 4)
        progress.advance(2)
    assert plain.getvalue() == "working ...\n"
