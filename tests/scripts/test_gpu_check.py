"""`scripts/gpu-check` on a machine without a GPU: its stages, their reports, and what it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.engines.device import Buffer, Cpu, Launch, nothing
from outrider.errors import EngineError
from outrider.scripts.gpu_check import main
from outrider.scripts.gpu_check.report import Report, summarize
from outrider.scripts.gpu_check.stages import STAGES, device, onnxruntime_cuda
from outrider.scripts.gpu_check.stages.base import Folders, outrider
from outrider.scripts.gpu_check.stages.exports import EXPORTS
from outrider.tests.deferred import Deferred
from outrider.tests.support import ROOT


def fail(error: Exception) -> str:
    raise error


def test_an_item_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    report = Report(tmp_path, "device")
    assert report.run("one", lambda: {"GPU": "none"}) == {"GPU": "none"}
    assert report.passed
    assert report.run("two", lambda: fail(EngineError("it broke", "fix it"))) is None
    assert report.run("three", lambda: fail(ValueError("a bug"))) is None
    report.skip("four", "not installed")
    assert json.loads((tmp_path / "device.json").read_text())["items"][-1]["item"] == "four"  # saved as they come
    assert report.run("five", lambda: "done") == "done"
    assert not report.passed
    report.timings.append({"backend": "x", "k": 4})
    report.write()
    Report(tmp_path, "exports").run("six", lambda: None)
    assert not summarize(tmp_path, STAGES)
    text = (tmp_path / "gpu-check.md").read_text()
    for line in (
        "| one | GPU: none |",  # the seconds follow
        "| two | **failed**: it broke (hint: fix it) |",
        "| three | **failed**: ValueError: a bug |",
        "| four | not checked: not installed |",
        "| five | done |",
        "| x | 4 |",
        "| six | ok |",
    ):
        assert any(each.startswith(line) for each in text.splitlines())
    assert text.index("## exports") < text.index("## device")
    items = json.loads((tmp_path / "gpu-check.json").read_text())["device"]["items"]
    assert [item["ok"] for item in items] == [True, False, False, None, True]


def test_a_command_that_fails_is_an_error_with_its_output(tmp_path: Path) -> None:
    assert "Usage" in outrider("inspect", "--help")
    with pytest.raises(RuntimeError, match="outrider inspect ended with 1"):
        outrider("inspect", tmp_path / "absent")


def check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu-check"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="shows what it says without a GPU")
def test_without_a_gpu_each_stage_says_so(tmp_path: Path) -> None:
    stages = [name for name, stage in STAGES.items() if stage.needs_gpu][:2]
    done = check("--out", tmp_path / "out", "--work", tmp_path / "work", *(f"--stage={name}" for name in stages))
    assert done.returncode == 1, done.stderr
    for name in stages:
        assert f"=== {name}: " in done.stdout
        (item,) = json.loads((tmp_path / "out" / f"{name}.json").read_text())["items"]
        assert "no NVIDIA GPU found" in item["error"]
    assert f"wrote {tmp_path / 'out' / 'gpu-check.json'}" in done.stdout


ONLY_NUMPY_AND_CUDA = """
import importlib.abc, runpy, sys

class Others(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"msgspec", "onnx", "onnxruntime", "tokenizers", "torch", "transformers", "click"}:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Others())
import outrider.scripts.gpu_check.stages.device
script, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="shows what it says without a GPU")
def test_the_stage_of_the_device_needs_numpy_and_the_bindings_only(tmp_path: Path) -> None:
    arguments = [str(ROOT / "scripts" / "gpu-check"), "--inside", "device", "--out", str(tmp_path), "--work", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", ONLY_NUMPY_AND_CUDA, *arguments], capture_output=True, text=True)
    assert "no NVIDIA GPU found" in done.stdout, done.stderr


def test_exports_that_are_there_are_used(tmp_path: Path) -> None:
    for name in EXPORTS:
        (tmp_path / "ready" / name).mkdir(parents=True)
    done = check("--out", tmp_path, "--work", tmp_path, "--exports", tmp_path / "ready", "--stage", "exports")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("it is there already") == len(EXPORTS)


def test_a_stage_that_takes_too_long_is_ended_and_reported(tmp_path: Path) -> None:
    done = check("--out", tmp_path, "--work", tmp_path, "--stage", "exports", "--limit", "0.2")
    assert done.returncode == 1
    (item,) = json.loads((tmp_path / "exports.json").read_text())["items"]
    assert item["error"] == "the stage did not end in 0.2 s"


def test_a_stage_that_crashes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu-check").write_text("import os; os.abort()")
    monkeypatch.setattr(main, "ROOT", tmp_path)
    main.run_stage("device", tmp_path, Folders(tmp_path, tmp_path), 60)
    (item,) = json.loads((tmp_path / "device.json").read_text())["items"]
    assert item["error"] == "the stage ended with -6"


class Simulated(Deferred):
    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 31

    def zeros(self, shape: tuple[int, ...], dtype: str, what: str) -> Buffer:
        if shape[0] >= 1 << 30:
            raise EngineError(f"no memory for {what}", "none")
        return super().zeros(shape, dtype, what)


def fill(gpu: Simulated, buffer: Buffer, value: int) -> Launch:
    return gpu.deferred(lambda: buffer.view().fill(value))


def copy(gpu: Simulated, target: Buffer, source: Buffer) -> Launch:
    return gpu.deferred(lambda: np.copyto(target.view(), source.view()))


def test_the_stage_of_the_device_on_a_simulated_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks do is right; what a GPU does is for a GPU to show."""
    for name, value in {"fill": fill, "copy": copy, "REPEATS": 3, "KERNELS": 20, "GRAPHS": 3}.items():
        monkeypatch.setattr(device, name, value)
    report = Report(tmp_path, "device")
    gpu: Any = Simulated()
    device.check_device(report, gpu)
    failed = {item["item"]: item["error"] for item in report.items if not item["ok"]}
    assert failed == {"copy bandwidth, GB/s": "no memory for a copy (hint: none)"}
    monkeypatch.setattr(device, "copy", lambda gpu, target, source: nothing)  # a device that does not copy is found out
    with pytest.raises(RuntimeError, match="a replay gave 0 for 3"):
        device.replay_reads_host_memory(gpu)


def test_placement_counts_the_nodes_of_every_engine(tiny_bundle: Path) -> None:
    placed = onnxruntime_cuda.placement(tiny_bundle, Cpu())
    assert {"target", "draft", "verifier"} <= placed.keys()
    assert all(each.endswith(" CPU") and int(each.split()[0]) > 1 for each in placed.values()), placed
