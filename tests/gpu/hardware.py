"""The GPU and the packages beside it, two launches for the checks, and how fast its memory is."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
import time
from importlib import metadata

from cuda.bindings import runtime

from outrider.engines.cuda import ON_DEVICE, Cuda, checked
from outrider.engines.device import Buffer, Launch

PACKAGES = {"cuda-bindings", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt_rtx", "torch", "transformers"}


def machine() -> dict[str, str]:
    """Return the GPU, its driver, and the versions of the packages.

    Raises:
        DeviceError: there is no GPU.
    """
    gpu = Cuda()
    _, cuda = runtime.cudaDriverGetVersion()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else "unknown"
    free, total = gpu.memory()
    return {
        "GPU": gpu.name,
        "compute capability": gpu.compute_capability,
        "memory": f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free",
        "driver": driver,
        "driver's CUDA": str(cuda),
        "Python": platform.python_version(),
        **{each.name: metadata.version(each.name) for each in metadata.distributions() if each.name in PACKAGES},
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


def bandwidth(gpu: Cuda, size: int = 1 << 30) -> float:
    """Return the GB/s that a copy of `size` bytes within the GPU's memory reads and writes, the median of ten."""
    source, target = (gpu.zeros((size,), "uint8", "a copy") for _ in range(2))
    whole, rates = copy(gpu, target, source), []
    for _ in range(11):  # the first is a warm-up
        gpu.synchronize()
        started = time.perf_counter()
        whole()
        gpu.synchronize()
        rates.append(2 * size / (time.perf_counter() - started) / 1e9)
    return round(statistics.median(rates[1:]), 1)
