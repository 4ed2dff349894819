"""Stages on a CPU with a number of threads each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.backends.onnxruntime.pool import create_pool
from outrider.backends.open import open_bundle, open_engines
from outrider.backends.openvino.reader import compiling
from outrider.bundle.folder import read_manifest
from outrider.errors import OutriderWarning
from outrider.tests.support import build, run_here

# Prints how many threads each stage adds to the process, if the process may use that many, and how an answer ends. The thread
# that runs a stage counts.
COUNT = """
import os, sys, time
from pathlib import Path
from outrider.backends.open import open_bundle, open_engines
from outrider.runtime.generation import Outrider, SamplingParams

def threads():
    time.sleep(0.1)  # one that has ended may still be listed
    return len(os.listdir("/proc/self/task"))

folder, kept = Path(sys.argv[1]), []
for most in sys.argv[2:]:
    os.environ["OMP_NUM_THREADS"] = most
    engines = open_engines(folder, *open_bundle(folder))
    whole = engines.sizes("target", 1)
    for stage, home in zip(engines.build.stages, engines.build.homes):
        before = threads()
        kept.append(engines.others.get(home, engines).model("target", whole.of(stage)))
        print(1 + threads() - before)
*_, last = Outrider.load(folder).generate("the quick", SamplingParams(max_new_tokens=4), k=2)
print(last.finish_reason)
"""


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def bundle(request: pytest.FixtureRequest, tiny_export: Path, once: Callable[..., Path]) -> Path:
    places = ("cpu:threads=3", "cpu:threads=1")

    def make(output: Path) -> Path:
        return build(tiny_export, output, backend=request.param, stages="2", stage_devices=places)

    return once(f"tiny-threads-{request.param}", make)


def counted(bundle: Path, *most: int) -> list[str]:
    done = subprocess.run([sys.executable, "-c", COUNT, bundle, *map(str, most)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_bundle_shows_the_threads_of_its_stages(bundle: Path) -> None:
    made = read_manifest(bundle).build
    assert made is not None
    assert [(stage.device, stage.threads) for stage in made.stages] == [(None, 3), (None, 1)]
    assert [stage.threads for stage in made.in_one_place("cpu").stages] == [None, None]
    shown = " ".join(run_here("inspect", bundle).stdout.replace("\u2502", " ").split())
    assert "on 3 threads" in shown
    assert "on 1 thread" in shown


@pytest.mark.parametrize("bundle", ["onnxruntime"], indirect=True)
def test_each_stage_of_onnxruntime_has_its_own_threads(bundle: Path) -> None:
    """As many as it names, but not more than its process may use, such as an actor of Ray with two cores."""
    assert counted(bundle, 4, 2) == ["3", "1", "2", "1", "length"]


def test_onnxruntime_has_all_threads_before_a_stage_of_openvino(tiny_export: Path, tmp_path: Path) -> None:
    """Without other stages than OpenVINO's, it only runs samplers, in one thread."""
    bundle = build(tiny_export, tmp_path / "bundle", stages="2", stage_backends=("onnxruntime", "openvino"))
    first, *_ = counted(bundle, 4)
    assert first == "4"


@pytest.mark.parametrize("bundle", ["onnxruntime"], indirect=True)
def test_a_process_with_one_pool_for_all_says_so(bundle: Path) -> None:
    create_pool(1)
    with pytest.warns(OutriderWarning, match="because this process has opened a bundle without"):
        open_engines(bundle, *open_bundle(bundle))


@pytest.mark.parametrize("bundle", ["openvino"], indirect=True)
def test_each_stage_of_openvino_has_its_own_threads(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    @contextmanager
    def noted(*arguments: Any) -> Iterator[Any]:
        with compiling(*arguments) as compiled:
            found.append(compiled.get_property("INFERENCE_NUM_THREADS"))
            yield compiled

    monkeypatch.setattr("outrider.backends.openvino.session.compiling", noted)
    for most in (4, 2):
        monkeypatch.setenv("OMP_NUM_THREADS", str(most))
        open_engines(bundle, *open_bundle(bundle)).session("target", 1)
        assert found == [min(3, most, os.cpu_count() or 1), 1]
        found.clear()
