"""Every CUDA call that the package makes, made through the real bindings, on a machine without a GPU.

The bindings check the number and types of the arguments before they reach the driver. So a call that is written wrongly is a
TypeError here, too, and one that is written rightly answers that there is no device or no driver.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.engines import cuda
from outrider.engines.cuda import Cuda
from outrider.errors import DeviceError, EngineError
from outrider.tests.gpu import hardware

runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings are not installed")
SOURCES = (Path(cuda.__file__), Path(hardware.__file__))
NO_DEVICE = {"cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorInitializationError", "cudaErrorStubLibrary"}
WITHOUT_DEVICE = {"cudaDriverGetVersion", "cudaRuntimeGetVersion", "cudaGetErrorString", "cudaGetLastError"}
HOST = np.zeros(1 << 16, np.uint8)  # what `cudaMallocHost` "allocates"


def is_call(attribute: object) -> bool:
    return callable(attribute) and not isinstance(attribute, type)


class Bindings:
    """The real bindings, whose answers are passed on as if the calls had succeeded."""

    def __init__(self) -> None:
        self.answers: dict[str, set[str]] = {}  # the errors of each call

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(runtime, name)
        return self._calling(name, attribute) if is_call(attribute) else attribute

    def _calling(self, name: str, call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def called(*arguments: Any) -> tuple[Any, ...]:
            error, *values = call(*arguments)
            self.answers.setdefault(name, set()).add(error.name)
            if name == "cudaGetErrorString":
                return (error, *values)
            return (runtime.cudaError_t.cudaSuccess, *(self._value(name) if each is None else each for each in values))

        return called

    def _value(self, name: str) -> Any:
        return {
            "cudaGetDeviceProperties": runtime.cudaDeviceProp(),
            "cudaStreamIsCapturing": runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone,
            "cudaMallocHost": HOST.ctypes.data,
        }.get(name, 0)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bindings]:
    try:
        Cuda()
    except DeviceError:
        bindings = Bindings()
        for module in (cuda, hardware):
            monkeypatch.setattr(module, "runtime", bindings)
        yield bindings
        gc.collect()  # what is freed is freed by these bindings
    else:
        pytest.skip("there is a GPU: the tests marked gpu make these calls")


def called_in(path: Path) -> set[str]:
    """Return the functions of the bindings that a module names."""
    names = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "runtime"
    }
    return {name for name in names if is_call(getattr(runtime, name))}


def test_every_call_is_one_that_the_bindings_take(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "cudaGetDeviceCount", lambda: (runtime.cudaError_t.cudaSuccess, 1), raising=False)
    gpu = Cuda()
    gpu.memory()
    buffer = gpu.zeros((4, 4), "float32", "a test")
    host, mirror = gpu.mirrored(64)
    gpu.upload(host, mirror)()
    gpu.download(mirror, host)()
    gpu.copy_columns(buffer, 0, buffer, 1, 2)()
    gpu.receive(buffer, buffer, Cuda())()
    gpu.read(buffer)
    gpu.write(buffer, np.ones(1))
    replay = gpu.capture([lambda: None])
    replay()
    hardware.fill(gpu, buffer, 1)()
    hardware.copy(gpu, buffer, buffer)()
    hardware.machine()
    del buffer, host, mirror, replay, gpu
    gc.collect()
    with pytest.raises(EngineError, match="CUDA failed"):
        cuda.checked((runtime.cudaError_t.cudaErrorNoDevice,))
    monkeypatch.undo()
    with pytest.raises(DeviceError, match="no NVIDIA GPU found"):
        Cuda()
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (runtime.cudaError_t.cudaSuccess, 1))
    with pytest.raises(DeviceError, match="there is no GPU cuda:1: this process sees 1"):
        Cuda(1)
    named = set.union(*map(called_in, SOURCES)) - {"cudaGetDeviceCount", "cudaRuntimeGetVersion"}
    assert {"cudaMalloc", "cudaMemcpy2DAsync"} <= named <= bindings.answers.keys()
    for name, errors in bindings.answers.items():
        assert errors <= (NO_DEVICE if name not in WITHOUT_DEVICE else NO_DEVICE | {"cudaSuccess"}), (name, errors)
