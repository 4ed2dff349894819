"""Exports and bundles that several tests read: made once per run, never written to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest
import torch

from outrider.errors import EngineError
from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.tests.samplers import Graphs, sampler_graphs
from outrider.tests.support import PAIR, build, llama, write_checkpoint

torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a GPU says what it would show, where there is none."""
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if marked and (reason := _no_gpu()):
        for item, marker in marked:
            item.add_marker(pytest.mark.skip(reason=f"{reason}; would show that {marker.args[0]}"))


def _no_gpu() -> str | None:
    try:
        from outrider.engines.cuda import Cuda

        Cuda()
    except EngineError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny random Llamas of one vocabulary: `target` and `draft`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "target", llama(seed=0))
    write_checkpoint(folder / "draft", llama(seed=1, num_hidden_layers=1))
    return folder


@pytest.fixture(scope="session")
def tiny_export(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the tiny random pair."""
    output = tmp_path_factory.mktemp("tiny") / "onnx"
    export_pair(str(checkpoints / "target"), str(checkpoints / "draft"), output, precision="fp32")
    return output


@pytest.fixture(scope="session")
def tiny_bundle(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the tiny random pair."""
    return build(tiny_export, tmp_path_factory.mktemp("tiny") / "bundle")


@pytest.fixture(scope="session")
def shipped_exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The export of the shipped pair in a precision: made once for all processes of the run, since tracing takes longest."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def made(precision: str) -> Path:
        output = folder / f"shipped-{precision}"
        with filelock.FileLock(f"{output}.lock"):
            if not output.exists():
                export_pair(str(PAIR / "target"), str(PAIR / "draft"), output, precision=precision)
        return output

    return made


@pytest.fixture(scope="session")
def shipped_export(shipped_exports: Callable[[str], Path]) -> Path:
    """The export of the shipped pair."""
    return shipped_exports("fp32")


@pytest.fixture(scope="session")
def shipped_bundle(shipped_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped pair, with the capacity that it was trained for."""
    return build(shipped_export, tmp_path_factory.mktemp("shipped") / "bundle", capacity=512)


@pytest.fixture(scope="session")
def tiny(tiny_bundle: Path) -> Outrider:
    return Outrider.load(tiny_bundle)


@pytest.fixture(scope="session")
def shipped(shipped_bundle: Path) -> Outrider:
    return Outrider.load(shipped_bundle)


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return sampler_graphs(tmp_path_factory.mktemp("samplers"))
