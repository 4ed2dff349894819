"""Weights are in memory once: pages of their files are given back where engines have copied them."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outrider.backends.base import GraphEngines
from outrider.backends.mapped import mapped, page_out, repeatedly
from outrider.backends.onnxruntime import engine
from outrider.backends.open import open_bundle, open_engines
from outrider.bundle.manifest import WEIGHTS, model_file, step_file
from outrider.tests.backends.openvino_slots import SLOTS, rows, target

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="reads /proc; shows that weights are in memory once")


def resident(weights: Path) -> list[int]:
    """Return the resident bytes of each of the mappings of a file."""
    found, inside = list[int](), False
    for line in SMAPS.read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(weights.resolve()))
        elif inside and line.startswith("Rss:"):
            found.append(int(line.split()[1]) * 1024)
    return found


def test_openvino_gives_back_pages_that_were_copied(trained_bundles: Callable[..., Path]) -> None:
    bundle = trained_bundles("int4", backend="openvino", batch=SLOTS, k=[1, 4])
    session = target(bundle)
    weights = bundle / (model_file("target") + WEIGHTS)
    assert resident(weights)
    assert sum(resident(weights)) < weights.stat().st_size / 10
    assert np.isfinite(rows(session, 0, 4, np.array([0]))).all()


@pytest.mark.parametrize("stages", [None, "2"], ids=["a large model", "a stage"])
def test_onnxruntime_gives_back_pages_that_were_packed(
    trained_bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, stages: str | None
) -> None:
    bundle = trained_bundles("int4", stages=stages)
    if stages is None:
        monkeypatch.setattr(engine, "LARGE", 0)
    engines = open_engines(bundle, *open_bundle(bundle))
    assert isinstance(engines, GraphEngines)
    stage = next(iter(engines.build.stages), None)
    weights = bundle / (step_file("target", stage) + WEIGHTS)
    with weights.open("r+b") as file:
        os.fsync(file.fileno())  # only what is on the disk is paged out
    kept = engines.step_model("target", stage)
    assert resident(weights)
    assert sum(resident(weights)) == 0, kept


def test_pages_are_given_back_again_and_again() -> None:
    released, third = [], threading.Event()

    def release() -> None:
        released.append(threading.current_thread())
        if len(released) == 3:
            third.set()

    with repeatedly(release):
        assert third.wait(10)
    assert {*released[:-1]} != {released[-1]} == {threading.current_thread()}


def test_what_was_written_stays(tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    weights = tmp_path / (graph.name + WEIGHTS)
    weights.write_bytes(b"w" * 4 * mmap.PAGESIZE)
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as private:
        private[0] = ord("x")
        assert not mapped(graph)
        page_out(graph)
        assert private[: mmap.PAGESIZE + 1] == b"x" + b"w" * mmap.PAGESIZE
