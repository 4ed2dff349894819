"""A GPU: its memory, one stream of work, and rounds recorded as CUDA graphs. No torch, no compiler: CUDA's own Python
package (`cuda-bindings`) carries its runtime."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engines.device import DTYPES, Buffer, Device, Launch
from outrider.errors import EngineError

try:
    from cuda.bindings import runtime
except ImportError as missing:
    raise EngineError(f"CUDA's Python package cannot be imported: {missing}", "pip install 'outrider[cuda]'") from missing

SUCCESS = runtime.cudaError_t.cudaSuccess
OUT_OF_MEMORY = runtime.cudaError_t.cudaErrorMemoryAllocation
TO_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
TO_HOST = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
ON_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of CUDA's gave, after its error code.

    Raises:
        EngineError: the code says that it failed.
    """
    error, *values = result
    if error != SUCCESS:
        raise EngineError(
            f"CUDA failed: {_said(error)}",
            "run it again; if it stays, look at nvidia-smi, and at the kernel's log for errors of the GPU",
        )
    return values[0] if len(values) == 1 else values


def _said(error: Any) -> str:
    _, text = runtime.cudaGetErrorString(error)
    runtime.cudaGetLastError()  # CUDA keeps it for whoever asks next
    return f"{text.decode() if isinstance(text, bytes) else text} ({error.name})"


class Memory:
    """Memory of CUDA's, given back with the last reference to it. `np.asarray` of the host's is an array over it."""

    def __init__(self, address: int, size: int, free: Callable[[int], object]):
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        weakref.finalize(self, free, address)


class Cuda(Device):
    """The first GPU that CUDA shows this process; `CUDA_VISIBLE_DEVICES` chooses another."""

    synchronous = False
    alignment = 256  # what TensorRT asks of its tensors

    def __init__(self) -> None:
        """Take the GPU.

        Raises:
            EngineError: there is none, or its driver is missing or too old.
        """
        _find_gpu()
        checked(runtime.cudaSetDevice(0))
        self.stream = int(checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))
        weakref.finalize(self, runtime.cudaStreamDestroy, self.stream)
        properties = checked(runtime.cudaGetDeviceProperties(0))
        self.name = properties.name.decode()
        self.compute_capability = f"{properties.major}.{properties.minor}"

    def memory(self) -> tuple[int, int]:
        """Bytes of the GPU's memory that are free, and all of them."""
        free, total = checked(runtime.cudaMemGetInfo())
        return int(free), int(total)

    def zeros(self, shape: tuple[int, ...], dtype: str, what: str) -> Buffer:
        size = max(math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize, 1)
        error, address = runtime.cudaMalloc(size)
        if error == OUT_OF_MEMORY:
            runtime.cudaGetLastError()
            free, total = self.memory()
            raise EngineError(
                f"no memory for {what}: {size:,} bytes asked, {free:,} of the GPU's {total:,} free",
                "build with a smaller --capacity, --batch or --max-prompt-chunk, or end what else uses the GPU",
            )
        checked((error,))
        memory = Memory(int(address), size, runtime.cudaFree)
        checked(runtime.cudaMemsetAsync(address, 0, size, self.stream))
        return Buffer(int(address), shape, dtype, "cuda", memory)

    def mirrored(self, size: int) -> tuple[npt.NDArray[np.uint8], Buffer]:
        error, address = runtime.cudaMallocHost(size)
        if error == OUT_OF_MEMORY:
            runtime.cudaGetLastError()
            raise EngineError(
                f"no pinned memory of the host for the buffers of a round: {size:,} bytes asked",
                "end what else pins memory, or raise the limit of locked memory (ulimit -l)",
            )
        checked((error,))
        host = np.asarray(Memory(int(address), size, runtime.cudaFreeHost))
        host[...] = 0
        return host, self.zeros((size,), "uint8", "the buffers of a round")

    def upload(self, host: npt.NDArray[Any], buffer: Buffer) -> Launch:
        def launch() -> None:
            checked(runtime.cudaMemcpyAsync(buffer.address, host.ctypes.data, host.nbytes, TO_DEVICE, self.stream))

        return launch

    def download(self, buffer: Buffer, host: npt.NDArray[Any]) -> Launch:
        def launch() -> None:
            checked(runtime.cudaMemcpyAsync(host.ctypes.data, buffer.address, host.nbytes, TO_HOST, self.stream))

        return launch

    def copy_columns(self, target: Buffer, to: int, source: Buffer, first: int, count: int) -> Launch:
        rows, item = source.shape[0], source.itemsize
        where = target.address + to * item, target.shape[1] * item, source.address + first * item, source.shape[1] * item

        def launch() -> None:
            assert target.memory, source.memory  # they live as long as the launch
            checked(runtime.cudaMemcpy2DAsync(*where, count * item, rows, ON_DEVICE, self.stream))

        return launch

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        values = np.empty(buffer.shape, DTYPES[buffer.dtype])
        checked(runtime.cudaMemcpyAsync(values.ctypes.data, buffer.address, values.nbytes, TO_HOST, self.stream))
        self.synchronize()
        return values

    def write(self, buffer: Buffer, values: npt.NDArray[Any]) -> None:
        whole = np.empty(buffer.shape, DTYPES[buffer.dtype])
        whole[...] = values
        # On our stream: another would not wait for it, nor it for another.
        checked(runtime.cudaMemcpyAsync(buffer.address, whole.ctypes.data, whole.nbytes, TO_DEVICE, self.stream))
        self.synchronize()

    def synchronize(self) -> None:
        checked(runtime.cudaStreamSynchronize(self.stream))

    def capture(self, launches: Sequence[Launch]) -> Launch:
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        checked(runtime.cudaStreamBeginCapture(self.stream, mode))
        try:
            for launch in launches:
                launch()
        finally:
            error, graph = runtime.cudaStreamEndCapture(self.stream)  # also where a launch failed
        if error == SUCCESS:
            error, recorded = runtime.cudaGraphInstantiate(graph, 0)
            runtime.cudaGraphDestroy(graph)
        if error != SUCCESS:
            raise EngineError(_said(error), "nothing needs to be done: the launches run one by one")
        held = list(launches)  # and with them the buffers that the graph points to

        def replay() -> None:
            assert held
            checked(runtime.cudaGraphLaunch(recorded, self.stream))

        weakref.finalize(replay, runtime.cudaGraphExecDestroy, recorded)
        return replay


def _find_gpu() -> None:
    _, driver = runtime.cudaDriverGetVersion()
    error, count = runtime.cudaGetDeviceCount()
    if error == SUCCESS and count:
        return
    runtime.cudaGetLastError()
    if driver and error == runtime.cudaError_t.cudaErrorInsufficientDriver:
        _, needed = runtime.cudaRuntimeGetVersion()
        raise EngineError(
            f"the NVIDIA driver is too old: it knows CUDA {_version(driver)}; this needs {_version(needed)}",
            "update the driver, or install a cuda-bindings of the driver's CUDA version",
        )
    reason = "there is no driver" if not driver else _said(error) if error != SUCCESS else "CUDA shows none"
    raise EngineError(
        f"no NVIDIA GPU is there: {reason}",
        "run it on a machine with an NVIDIA GPU and driver; for a CPU, build with --backend onnxruntime and give --device cpu",
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
