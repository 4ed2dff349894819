"""The GPU, the packages, and which backends can be checked."""

from __future__ import annotations

import importlib
import platform
import shutil
import statistics
import subprocess
import time

from outrider.backends.tensorrt.package import RTX

PACKAGES = ("tensorrt_rtx", "tensorrt", "onnxruntime", "cuda.bindings", "torch", "transformers")
BACKENDS = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt", "onnxruntime": "onnxruntime"}  # backend -> package


def machine() -> dict[str, str]:
    """Return the GPU, its driver, and the versions of the packages.

    Raises:
        EngineError: there is no GPU.
    """
    from cuda.bindings import runtime

    from outrider.engines.cuda import Cuda

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
    return {
        "GPU": gpu.name,
        "compute capability": gpu.compute_capability,
        "memory": f"{gpu.memory()[1] / 2**30:.0f} GiB",
        "driver": driver,
        "driver's CUDA": str(cuda),
        **versions,
        "Python": platform.python_version(),
    }


def missing(backend: str) -> str | None:
    """Return why a backend cannot be checked; None if it can."""
    try:
        package = importlib.import_module(BACKENDS[backend])
    except (ImportError, OSError) as error:
        return str(error)
    if backend == "onnxruntime" and "CUDAExecutionProvider" not in package.get_available_providers():
        return "the installed onnxruntime has no CUDA"
    if backend == RTX.backend:
        from outrider.engines.cuda import Cuda

        return RTX.unsupported(Cuda().compute_capability)
    return None


def bandwidth() -> float:
    """Return the GB/s that a copy within the GPU's memory reads and writes, the median of ten.

    Raises:
        EngineError: there is no GPU.
    """
    from cuda.bindings import runtime

    from outrider.engines.cuda import ON_DEVICE, Cuda, checked

    gpu, size = Cuda(), 1 << 30
    source, target = (gpu.zeros((size,), "uint8", "a copy") for _ in range(2))
    rates = []
    for _ in range(11):  # the first is a warm-up
        gpu.synchronize()
        started = time.perf_counter()
        checked(runtime.cudaMemcpyAsync(target.address, source.address, size, ON_DEVICE, gpu.stream))
        gpu.synchronize()
        rates.append(2 * size / (time.perf_counter() - started) / 1e9)
    return round(statistics.median(rates[1:]), 1)
