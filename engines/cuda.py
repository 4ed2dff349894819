"""An NVIDIA GPU: its memory, one stream of work, and rounds recorded as CUDA graphs.

All calls go through `cuda-bindings`, which ships the CUDA runtime; neither torch nor a compiler is needed.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engines.device import Buffer, Launch, QueuedDevice
from outrider.engines.precisions import DTYPES
from outrider.errors import DeviceError, EngineError

try:
    from cuda.bindings import runtime
except ImportError as missing:
    raise DeviceError(f"cuda-bindings cannot be imported: {missing}", "pip install 'outrider[cuda]'") from missing

SUCCESS = runtime.cudaError_t.cudaSuccess
OUT_OF_MEMORY = runtime.cudaError_t.cudaErrorMemoryAllocation
TO_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
TO_HOST = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
ON_DEVICE = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice


def checked(result: tuple[Any, ...]) -> Any:
    """Return the results of a CUDA call, without its error code.

    Raises:
        EngineError: the code is an error.
    """
    error, *values = result
    if error != SUCCESS:
        raise EngineError(
            f"CUDA failed: {_describe(error)}",
            "run it again; if it fails again, look for GPU errors in nvidia-smi and in the kernel log",
        )
    return values[0] if len(values) == 1 else values


def _describe(error: Any) -> str:
    _, text = runtime.cudaGetErrorString(error)
    runtime.cudaGetLastError()  # or CUDA would report this error again in a later call
    return f"{text.decode() if isinstance(text, bytes) else text} ({error.name})"


class CudaMemory:
    """Memory that CUDA allocated, freed with the last reference. `np.asarray` turns pinned host memory into an array."""

    def __init__(self, address: int, size: int, free: Callable[[int], object]):
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        weakref.finalize(self, free, address)


class Cuda(QueuedDevice):
    """One of the GPUs that this process sees, the first by default; `CUDA_VISIBLE_DEVICES` selects others."""

    alignment = 256  # TensorRT's requirement

    def __init__(self, number: int = 0) -> None:
        """Select the GPU and create its stream.

        Raises:
            DeviceError: there is no such GPU, or its driver is missing or too old.
        """
        super().__init__()
        _find_gpu(number)
        self.number = number
        self._select()
        self.stream = int(checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))
        weakref.finalize(self, runtime.cudaStreamDestroy, self.stream)
        properties = checked(runtime.cudaGetDeviceProperties(number))
        self.name = properties.name.decode()
        self.compute_capability = f"{properties.major}.{properties.minor}"

    def _select(self) -> None:
        """Let the next calls of this thread be for this GPU: engines of another one may have run in between."""
        checked(runtime.cudaSetDevice(self.number))

    def memory(self) -> tuple[int, int]:
        self._select()
        free, total = checked(runtime.cudaMemGetInfo())
        return int(free), int(total)

    def zeros(self, shape: tuple[int, ...], dtype: str, purpose: str) -> Buffer:
        size = max(math.prod(shape) * DTYPES[dtype].numpy.itemsize, 1)
        self._select()
        error, address = runtime.cudaMalloc(size)
        if error == OUT_OF_MEMORY:
            runtime.cudaGetLastError()
            free, total = self.memory()
            raise DeviceError(
                f"no memory for {purpose}: it takes {size:,} bytes, and {free:,} of the GPU's {total:,} are free",
                "build with a smaller --capacity, --batch or --max-prompt-chunk, or stop other programs that use the GPU",
            )
        checked((error,))
        memory = CudaMemory(int(address), size, runtime.cudaFree)
        checked(runtime.cudaMemsetAsync(address, 0, size, self.stream))
        return Buffer(int(address), shape, dtype, f"cuda:{self.number}", memory)

    def mirrored(self, size: int) -> tuple[npt.NDArray[np.uint8], Buffer]:
        error, address = runtime.cudaMallocHost(size)
        if error == OUT_OF_MEMORY:
            runtime.cudaGetLastError()
            raise EngineError(
                f"no pinned host memory for the buffers of a round, which take {size:,} bytes",
                "stop other programs that pin memory, or raise the limit on locked memory (ulimit -l)",
            )
        checked((error,))
        host = np.asarray(CudaMemory(int(address), size, runtime.cudaFreeHost))
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
            assert target.memory, source.memory  # keeps both alive for as long as the launch
            checked(runtime.cudaMemcpy2DAsync(*where, count * item, rows, ON_DEVICE, self.stream))

        return launch

    def follow(self, other: Cuda) -> Launch:
        other._select()
        event = checked(runtime.cudaEventCreateWithFlags(runtime.cudaEventDisableTiming))

        def launch() -> None:
            checked(runtime.cudaEventRecord(event, other.stream))
            checked(runtime.cudaStreamWaitEvent(self.stream, event, 0))

        weakref.finalize(launch, runtime.cudaEventDestroy, event)
        return launch

    def fetch(self, target: Buffer, source: Buffer) -> Launch:
        def launch() -> None:
            assert target.memory, source.memory  # keeps both alive for as long as the launch
            # Addresses say which GPU they are of. It can be recorded, while cudaMemcpyPeerAsync is said to be refused.
            checked(runtime.cudaMemcpyAsync(target.address, source.address, source.nbytes, ON_DEVICE, self.stream))

        return launch

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        values = np.empty(buffer.shape, DTYPES[buffer.dtype].numpy)
        checked(runtime.cudaMemcpyAsync(values.ctypes.data, buffer.address, values.nbytes, TO_HOST, self.stream))
        self.synchronize()
        return values

    def write(self, buffer: Buffer, values: npt.NDArray[Any]) -> None:
        whole = np.empty(buffer.shape, DTYPES[buffer.dtype].numpy)
        whole[...] = values
        # On this stream, so that it stays in order with other work.
        checked(runtime.cudaMemcpyAsync(buffer.address, whole.ctypes.data, whole.nbytes, TO_DEVICE, self.stream))
        self.synchronize()

    def synchronize(self) -> None:
        for each in (self, *self.linked()):  # all of them, or an error on another GPU would not be reported
            checked(runtime.cudaStreamSynchronize(each.stream))

    def record(self, launches: Sequence[Launch]) -> Launch:
        if checked(runtime.cudaStreamIsCapturing(self.stream)) != runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone:
            raise EngineError("the stream is already being recorded", "no action needed: the launches run one by one")
        self._select()
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        collects = gc.isenabled()
        gc.disable()  # it may free GPU memory, which ends a capture
        try:
            checked(runtime.cudaStreamBeginCapture(self.stream, mode))
            try:
                for launch in launches:
                    launch()
            finally:
                error, graph = runtime.cudaStreamEndCapture(self.stream)  # even if a launch failed
        finally:
            if collects:
                gc.enable()
        if error == SUCCESS:
            error, recorded = runtime.cudaGraphInstantiate(graph, 0)
            runtime.cudaGraphDestroy(graph)
        if error != SUCCESS:
            raise EngineError(_describe(error), "no action needed: the launches run one by one")
        references = list(launches)  # they own the buffers that the graph uses

        def replay() -> None:
            assert references
            checked(runtime.cudaGraphLaunch(recorded, self.stream))

        weakref.finalize(replay, runtime.cudaGraphExecDestroy, recorded)
        return replay


def _find_gpu(number: int) -> None:
    _, driver = runtime.cudaDriverGetVersion()
    error, count = runtime.cudaGetDeviceCount()
    if error == SUCCESS and number < count:
        return
    if error == SUCCESS and count:
        raise DeviceError(
            f"there is no GPU cuda:{number}: this process sees {count}, counted from 0",
            "run all stages on the first one with --device cuda, or build the bundle with another --stage-device",
        )
    runtime.cudaGetLastError()
    if driver and error == runtime.cudaError_t.cudaErrorInsufficientDriver:
        _, needed = runtime.cudaRuntimeGetVersion()
        raise DeviceError(
            f"the NVIDIA driver is too old: it supports CUDA {_version(driver)}, and CUDA {_version(needed)} is required",
            "update the driver, or install the cuda-bindings of the driver's CUDA version",
        )
    reason = "there is no driver" if not driver else _describe(error) if error != SUCCESS else "no CUDA device is visible"
    raise DeviceError(
        f"no NVIDIA GPU found: {reason}",
        "run it on a machine with an NVIDIA GPU and driver; for a CPU, build with --backend onnxruntime and use --device cpu",
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
