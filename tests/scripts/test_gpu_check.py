"""`scripts/gpu-check` on a machine without a GPU: the report of items that fail, and what it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.errors import EngineError
from outrider.scripts.gpu_check.checks import outrider
from outrider.scripts.gpu_check.report import Report
from outrider.tests.support import ROOT


def fail(error: Exception) -> str:
    raise error


def test_an_item_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    report = Report(tmp_path)
    assert report.run("one", lambda: {"GPU": "none"}) == {"GPU": "none"}
    assert report.passed
    assert report.run("two", lambda: fail(EngineError("it broke", "fix it"))) is None
    assert report.run("three", lambda: fail(ValueError("a bug"))) is None
    report.skip("four", "not installed")
    assert report.run("five", lambda: "done") == "done"
    assert not report.passed
    report.timings.append({"backend": "x", "k": 4})
    report.write()
    text = (tmp_path / "gpu-check.md").read_text()
    for line in (
        "| one | GPU none |",
        "| two | **failed**: it broke (hint: fix it) |",
        "| three | **failed**: ValueError: a bug |",
        "| four | not checked: not installed |",
        "| five | done |",
        "| x | 4 |",
    ):
        assert line in text
    items = json.loads((tmp_path / "gpu-check.json").read_text())["items"]
    assert [item["ok"] for item in items] == [True, False, False, None, True]


def test_a_command_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    assert "Usage" in outrider("inspect", "--help")
    with pytest.raises(RuntimeError, match="outrider inspect ended with 1"):
        outrider("inspect", tmp_path / "absent")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="shows what it says without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu-check"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "== machine\n   FAILED: " in done.stdout
    assert f"wrote {tmp_path / 'gpu-check.json'}" in done.stdout
