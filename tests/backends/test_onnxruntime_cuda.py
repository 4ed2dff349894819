"""How ONNX Runtime finds CUDA, as far as that can be shown without a GPU: with libraries that need each other."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import onnxruntime
import pytest

from outrider.backends.onnxruntime.engine import CUDA_LIBRARY, preload_libraries, why_no_cuda

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
