"""ONNX Runtime on CUDA, as far as it can be shown without a GPU: how its libraries are found, and when runs are recorded."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from outrider.backends.onnxruntime import cuda_graphs
from outrider.backends.onnxruntime.cuda_graphs import NO_GRAPH, CudaGraphs
from outrider.backends.onnxruntime.engine import CUDA_LIBRARY, inference_session, preload_libraries, why_no_cuda
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import graph_files
from outrider.engines.device import Cpu, nothing
from outrider.engines.precisions import DTYPES
from outrider.errors import OutriderWarning

SHARED = "libonnxruntime_providers_shared.so"


def library(path: Path, *needed: Path) -> Path:
    """Make a shared library that needs others, but does not know where they are."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: would show that libraries of NVIDIA's wheels are found wherever they are")
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ["-shared", "-x", "c", "/dev/null", "-x", "none", f"-Wl,-soname,{path.name}", "-Wl,--no-as-needed"]
    subprocess.run([compiler, *options, *map(str, needed), "-o", str(path)], check=True)
    return path


def test_libraries_of_wheels_in_another_folder_are_loaded_in_the_order_of_their_needs(tmp_path: Path) -> None:
    needed = library(tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn_needed.so.9")
    library(tmp_path / "nvidia" / "cublas" / "lib" / "libcublas_first.so.12", needed)
    provider = library(tmp_path / "provider.so", tmp_path / "nvidia" / "cublas" / "lib" / "libcublas_first.so.12")
    with pytest.raises(OSError, match="libcublas_first"):
        ctypes.CDLL(str(provider))
    preload_libraries([tmp_path / "nvidia"])
    ctypes.CDLL(str(provider))


def test_the_reason_why_cuda_does_not_start_is_the_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        assert why_no_cuda() == "it is the package without CUDA"
    capi = tmp_path / "onnxruntime" / "capi"
    library(capi / SHARED)
    library(capi / CUDA_LIBRARY, library(tmp_path / "elsewhere" / "libcudart_missing.so.12"))
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "onnxruntime" / "__init__.py"))
    assert why_no_cuda().startswith("libcudart_missing.so.12: cannot open shared object file")


class Options:
    """Run options that tell what was asked."""

    def __init__(self, graph: int | None):
        self.graph = graph


class Recording:
    """A session of a GPU as far as recorded runs go: the real one on the CPU, and what a recording does besides."""

    def __init__(self, session: Any, besides: Callable[[], None]):
        self._session = session
        self._besides = besides
        self.graphs: list[int | None] = []
        self.released: list[int] = []

    def run_with_iobinding(self, binding: Any, options: Options) -> None:
        self.graphs.append(options.graph)
        self._session.run_with_iobinding(binding)
        if options.graph != NO_GRAPH:
            self._besides()

    def release_captured_graph(self, graph: int) -> None:
        self.released.append(graph)


def fail() -> None:
    raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing\nand more")


@pytest.mark.parametrize("outcome", ["equal", "different", "refused"])
def test_a_run_is_recorded_at_its_third_time_if_a_replay_computes_the_same(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    monkeypatch.setattr(cuda_graphs, "run_options", Options)
    device, vocabulary = Cpu(), read_manifest(tiny_bundle).models["draft"].vocab_rows
    logits = device.zeros((1, 1, vocabulary), "float32", "a test")
    outputs = {name: device.zeros(shape, "int64", "a test") for name, shape in (("token", (1, 1)), ("status", (1,)))}
    besides = {"equal": nothing, "different": lambda: outputs["token"].view().fill(-1), "refused": fail}[outcome]
    session = inference_session(tiny_bundle / graph_files("greedy_draft_sampler")[0], device)
    recording, binding = Recording(session, besides), session.io_binding()
    for name, buffer in {"logits": logits, **outputs}.items():
        bind = binding.bind_input if buffer is logits else binding.bind_output
        bind(name, "cpu", 0, DTYPES[buffer.dtype].onnx, buffer.shape, buffer.address)
    launch = CudaGraphs(recording, device).launch(binding, list(outputs.values()))
    expected = nullcontext() if outcome == "equal" else pytest.warns(OutriderWarning, match="a pass runs as plain launches")
    with expected as warned:
        for token in range(5, 10):
            logits.view()[...] = np.arange(vocabulary) == token
            launch()
            assert outputs["token"].view() == token
    if warned:
        assert "and more" not in str(warned[0].message)
    del launch, binding, bind
    gc.collect()
    plain = [NO_GRAPH] * 3
    assert (recording.graphs, recording.released) == {
        "equal": ([*plain, 1, 1, 1, 1], [1]),
        "different": ([*plain, 1, *plain], []),
        "refused": ([*plain, 1, *plain], []),
    }[outcome]


def test_the_options_of_runs_are_known_to_onnx_runtime() -> None:
    options = cuda_graphs.run_options(7)
    assert options.get_run_config_entry(cuda_graphs.GRAPH_ID) == "7"
