"""The GPU, the packages beside it, and how fast its memory is."""

from __future__ import annotations

import importlib
import platform
import shutil
import statistics
import subprocess
import time

from cuda.bindings import runtime

from outrider.engines.cuda import ON_DEVICE, Cuda, checked
from outrider.engines.device import Buffer, Launch

PACKAGES = ("tensorrt_rtx", "tensorrt", "onnxruntime", "cuda.bindings", "torch", "transformers")


def machine() -> dict[str, str]:
    """Return the GPU, its driver, and the versions of the packages.

    Raises:
        DeviceError: there is no GPU.
    """
    gpu = Cuda()
    _, cuda = runtime.cudaDriverGetVersion()
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = str(importlib.import_module(package).__version__)
        except (ImportError, OSError):
            versions[package] = "not installed"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else "unknown"
    free, total = gpu.memory()
    return {
        "GPU": gpu.name,
        "compute capability": gpu.compute_capability,
        "memory": f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free",
        "driver": driver,
        "driver's CUDA": str(cuda),
        **versions,
        "Python": platform.python_version(),
    }


def fill(gpu: Cuda, buffer: Buffer, value: int) -> Launch:
    """Prepare a kernel that sets every byte of a buffer."""

    def launch() -> None:
        checked(runtime.cudaMemsetAsync(buffer.address, value, buffer.nbytes, gpu.stream))

    return launch


def copy(gpu: Cuda, target: Buffer, source: Buffer) -> Launch:
    """Prepare a copy within the device."""

    def launch() -> None:
        checked(runtime.cudaMemcpyAsync(target.address, source.address, source.nbytes, ON_DEVICE, gpu.stream))

    return launch


def bandwidth(gpu: Cuda | None = None) -> float:
    """Return the GB/s that a copy within the GPU's memory reads and writes, the median of ten."""
    gpu, size = gpu or Cuda(), 1 << 30
    source, target = (gpu.zeros((size,), "uint8", "a copy") for _ in range(2))
    whole, rates = copy(gpu, target, source), []
    for _ in range(11):  # the first is a warm-up
        gpu.synchronize()
        started = time.perf_counter()
        whole()
        gpu.synchronize()
        rates.append(2 * size / (time.perf_counter() - started) / 1e9)
    return round(statistics.median(rates[1:]), 1)
