"""What a backend runs on: memory at fixed addresses, copies, the order of work, and engines over it.

The CPU's is here; a GPU's is in `engines/cuda.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_byte
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from outrider.errors import EngineError

Launch = Callable[[], None]
"""Puts one prepared piece of work after all that was launched before."""

DTYPES = {"int64": np.int64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "uint8": np.uint8}
"""What holds each type on the host; NumPy has no bfloat16, so its bits are held."""

Layout = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensors by name: shape and type."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous tensor at an address that never changes."""

    address: int
    shape: tuple[int, ...]
    dtype: str  # a key of `DTYPES`
    place: str  # "cpu" or "cuda": whose memory it is
    memory: object  # keeps it alive

    @property
    def itemsize(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def part(self, first: int, *shape: int) -> Buffer:
        """A tensor of that shape, from the item of that number on, in the same memory."""
        return Buffer(self.address + first * self.itemsize, shape, self.dtype, self.place, self.memory)

    def view(self) -> npt.NDArray[Any]:
        """The tensor itself, where it is the CPU's."""
        memory: Any = (c_byte * self.nbytes).from_address(self.address)
        return np.frombuffer(memory, dtype=np.dtype(DTYPES[self.dtype])).reshape(self.shape)


def host_buffer(array: npt.NDArray[Any]) -> Buffer:
    """An array of the host's as a tensor; engines read the number of candidates from the host on every backend."""
    return Buffer(array.ctypes.data, array.shape, array.dtype.name, "cpu", array)


class Device(ABC):
    """One processor's memory, and the order of work on it."""

    name: str  # "cpu", or the GPU's own
    synchronous: bool  # whether a launch is done when it returns
    stream: int  # the handle of the CUDA stream that all work goes to; 0 on a CPU
    alignment: int  # bytes that the address of an engine's tensor must be a multiple of

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str, what: str) -> Buffer:
        """Memory that is the device's for as long as the buffer is held.

        Raises:
            EngineError: there is none left for `what`.
        """

    @abstractmethod
    def mirrored(self, size: int) -> tuple[npt.NDArray[np.uint8], Buffer]:
        """So many bytes on the host, and as many on the device; where both are the same memory, the same bytes."""

    @abstractmethod
    def upload(self, host: npt.NDArray[Any], buffer: Buffer) -> Launch:
        """A copy of `host`, which `mirrored` gave, into its buffer, at each launch of what is there then."""

    @abstractmethod
    def download(self, buffer: Buffer, host: npt.NDArray[Any]) -> Launch:
        """A copy the other way; to be read after `synchronize`."""

    @abstractmethod
    def copy_columns(self, target: Buffer, to: int, source: Buffer, first: int, count: int) -> Launch:
        """A copy of `count` columns, from `first` on, of the matrix `source` [R, C1] into `target` [R, C2], from `to` on."""

    @abstractmethod
    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        """What a tensor holds after all that was launched; on a CPU a view."""

    @abstractmethod
    def write(self, buffer: Buffer, values: npt.NDArray[Any]) -> None:
        """Replace what a tensor holds, after all that was launched."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that was launched.

        Raises:
            EngineError: some of it failed.
        """

    @abstractmethod
    def capture(self, launches: Sequence[Launch]) -> Launch:
        """These launches as one, which have run once already; cheaper where the device can record them.

        Raises:
            EngineError: it cannot record these; they run as well one by one.
        """


class Engine(ABC):
    """One compiled graph."""

    max_candidates: int | None = None  # the greatest K that its TopK takes, where there is one
    spare_slots = 0  # that a step model's cache must have beyond its capacity
    skips_logits = False  # whether a step model computes logits of the last rows alone, of as many as its buffer holds
    recordable = True  # whether its launches may be recorded, on a device that records

    @abstractmethod
    def bind(self, tensors: Mapping[str, Buffer]) -> Launch:
        """A run over exactly these buffers, whose shapes are the run's. Whatever fails then is an `EngineError`."""


class Arena:
    """Tensors in one piece of memory, here and on the device, so that one copy moves them all."""

    def __init__(self, device: Device, layout: Layout):
        offsets, size = {}, 0
        for name, (shape, dtype) in layout.items():
            offsets[name] = size
            nbytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
            size += -(-nbytes // device.alignment) * device.alignment
        host, whole = device.mirrored(size)
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, Buffer] = {}
        for name, (shape, dtype) in layout.items():
            nbytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
            self.host[name] = host[offsets[name] : offsets[name] + nbytes].view(DTYPES[dtype]).reshape(shape)
            self.device[name] = Buffer(whole.address + offsets[name], shape, dtype, whole.place, whole.memory)
        self.upload = device.upload(host, whole)
        self.download = device.download(whole, host)


Key = TypeVar("Key")
Made = TypeVar("Made")


def kept(made: dict[Key, Made], key: Key, most: int, make: Callable[[], Made]) -> Made:
    """What was made for a key, or is made now; of all that was made, the `most` that were used last are kept."""
    if key in made:
        made[key] = made.pop(key)
    else:
        new = make()
        while len(made) >= most:
            del made[next(iter(made))]
        made[key] = new
    return made[key]


def nothing() -> None:
    """The launch of nothing."""


class Cpu(Device):
    """The CPU: what is launched is done, and the device's memory is the host's."""

    name = "cpu"
    synchronous = True
    stream = 0
    alignment = 8

    def zeros(self, shape: tuple[int, ...], dtype: str, what: str) -> Buffer:
        try:
            array = np.zeros(shape, DTYPES[dtype])
        except (MemoryError, ValueError, OverflowError) as error:  # numpy's for sizes that no memory has
            raise EngineError(f"no memory for {what}", "build with a smaller --capacity or --batch") from error
        return Buffer(array.ctypes.data, shape, dtype, "cpu", array)

    def mirrored(self, size: int) -> tuple[npt.NDArray[np.uint8], Buffer]:
        host = np.zeros(size, dtype=np.uint8)
        return host, Buffer(host.ctypes.data, (size,), "uint8", "cpu", host)

    def upload(self, host: npt.NDArray[Any], buffer: Buffer) -> Launch:
        return nothing

    def download(self, buffer: Buffer, host: npt.NDArray[Any]) -> Launch:
        return nothing

    def copy_columns(self, target: Buffer, to: int, source: Buffer, first: int, count: int) -> Launch:
        into, values = target.view()[:, to : to + count], source.view()[:, first : first + count]

        def launch() -> None:
            into[...] = values

        return launch

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        return buffer.view()

    def write(self, buffer: Buffer, values: npt.NDArray[Any]) -> None:
        buffer.view()[...] = values

    def synchronize(self) -> None:
        pass

    def capture(self, launches: Sequence[Launch]) -> Launch:
        raise EngineError("a CPU does not record", "let the launches run one by one")
