"""The report and the time limit of the tests that need a GPU, over tests that need none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from outrider.tests.gpu import conftest

TESTS = """
import os
import time

import pytest

pytestmark = pytest.mark.gpu("")

@pytest.fixture(scope="session")
def machine():
    return {"GPU": "none"}

def test_with_figures(record_property):
    record_property("copy bandwidth, GB/s", 3.5)
    record_property("timing", {"backend": "x"})
    record_property("timing", {"backend": "y", "k": 4})

def test_that_fails():
    raise ValueError("a | bug")

def test_that_is_skipped():
    pytest.skip("not installed")

def test_that_crashes():
    os._exit(139)

@pytest.mark.gpu("", limit=1)
def test_that_hangs():
    time.sleep(60)

def test_after_these():
    pass

def test_that_crashes_last():
    os._exit(139)
"""


def test_one_test_that_crashes_or_hangs_does_not_hide_the_others(tmp_path: Path) -> None:
    shutil.copy(conftest.__file__, tmp_path)
    (tmp_path / "test_sample.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    (tmp_path / "build" / "gpu").mkdir(parents=True)
    earlier = {"date": "", "outcome": "passed", "reason": "", "seconds": 1, "figures": {}, "timings": []}
    contents = {"machine": {}, "tests": {"test_other.py::test_earlier": earlier}}
    (tmp_path / "build" / "gpu" / "report.json").write_text(json.dumps(contents))
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-m", "gpu", "-n", "1", "--max-worker-restart", "9"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 1, done
    report = json.loads((tmp_path / "build" / "gpu" / "report.json").read_text())
    assert report["machine"] == {"GPU": "none"}
    tests = {name.rpartition("::")[2]: test for name, test in report["tests"].items()}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_earlier": "passed",
        "test_with_figures": "passed",
        "test_that_fails": "failed",
        "test_that_is_skipped": "skipped",
        "test_that_crashes": "failed",
        "test_that_hangs": "failed",
        "test_after_these": "passed",
        "test_that_crashes_last": "failed",
    }
    assert tests["test_that_fails"]["reason"] == "ValueError: a | bug"
    assert tests["test_that_is_skipped"]["reason"] == "not installed"
    assert "crashed while running" in tests["test_that_crashes"]["reason"]
    assert "Timeout (0:00:01)!" in tests["test_that_hangs"]["reason"]
    assert "in test_that_hangs" in tests["test_that_hangs"]["reason"]
    lines = (tmp_path / "build" / "gpu" / "report.md").read_text().splitlines()
    assert "GPU: none  " in lines
    assert {"| x | - |", "| y | 4 |"} <= {*lines}
    for line in (
        "| test_sample.py::test_with_figures | passed; copy bandwidth, GB/s: 3.5 |",  # the seconds follow
        r"| test_sample.py::test_that_fails | **failed**; ValueError: a \| bug |",
        "| test_sample.py::test_that_is_skipped | skipped; not installed |",
    ):
        assert any(each.startswith(line) for each in lines), lines
