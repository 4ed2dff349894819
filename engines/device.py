"""Devices: memory at fixed addresses, copies, and one queue of work. The CPU is here; GPUs are in `engines/cuda.py`."""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import c_byte
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from outrider.engines.precisions import DTYPES
from outrider.errors import EngineError

MEMINFO, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
Launch = Callable[[], None]
"""Queues one prepared piece of work after everything launched before it."""

Layout = Mapping[str, tuple[tuple[int, ...], str]]
"""Tensors by name: shape, and type as a key of `DTYPES`."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous tensor at an address that never changes."""

    address: int
    shape: tuple[int, ...]
    dtype: str  # a key of `DTYPES`
    place: str  # where its memory is, such as "cpu" or "cuda:0"
    memory: object  # owns the memory; referenced here to keep it alive

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].numpy.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def part(self, first: int, *shape: int) -> Buffer:
        """Return a tensor of `shape` in the same memory, starting at item number `first`."""
        return Buffer(self.address + first * self.itemsize, shape, self.dtype, self.place, self.memory)

    def view(self) -> npt.NDArray[Any]:
        """Return the tensor as an array; only for CPU memory."""
        memory: Any = (c_byte * self.nbytes).from_address(self.address)
        return np.frombuffer(memory, dtype=DTYPES[self.dtype].numpy).reshape(self.shape)


def host_buffer(array: npt.NDArray[Any]) -> Buffer:
    """Return a host array as a tensor, such as the number of candidates, which every backend reads from host memory."""
    return Buffer(array.ctypes.data, array.shape, array.dtype.name, "cpu", array)


class Device(ABC):
    """One processor, with its memory and one queue of work."""

    name: str  # "cpu", or the GPU's product name
    number = 0  # of a GPU among several
    synchronous: bool  # whether a launch has finished when it returns
    stream: int  # the handle of the CUDA stream that all work goes to, another one on each device; 0 on a CPU
    alignment: int  # addresses of tensors are multiples of this number of bytes

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device's memory."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str, purpose: str) -> Buffer:
        """Allocate a zeroed tensor. Its memory is freed with the last reference to it.

        Args:
            purpose: the use of the tensor, for the error message.

        Raises:
            EngineError: the device has too little memory.
        """

    @abstractmethod
    def mirrored(self, size: int) -> tuple[npt.NDArray[np.uint8], Buffer]:
        """Allocate `size` bytes on both the host and the device. On a CPU, they are the same bytes."""

    @abstractmethod
    def upload(self, host: npt.NDArray[Any], buffer: Buffer) -> Launch:
        """Prepare a copy of `host`, an array from `mirrored`, into its buffer. Each launch copies the current contents."""

    @abstractmethod
    def download(self, buffer: Buffer, host: npt.NDArray[Any]) -> Launch:
        """Prepare a copy of the buffer into `host`, which may be read after `synchronize`."""

    @abstractmethod
    def copy_columns(self, target: Buffer, to: int, source: Buffer, first: int, count: int) -> Launch:
        """Prepare a copy of `count` columns of `source` [R, C1] into `target` [R, C2], from column `first` to column `to`."""

    def receive(self, target: Buffer, source: Buffer, sender: Device) -> Launch:
        """Prepare a copy of a tensor of another device, the `sender`, into one of the same size here.

        It comes after everything that was launched on both, and before everything that is launched on either later. Devices
        that cannot do better wait for each other, and copy through the host.
        """

        def launch() -> None:
            self.write(target, sender.read(source))

        return launch

    @abstractmethod
    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        """Return a tensor's contents after everything launched has finished; on a CPU, a view of them."""

    @abstractmethod
    def write(self, buffer: Buffer, values: npt.NDArray[Any]) -> None:
        """Replace a tensor's contents after everything launched has finished."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything launched.

        Raises:
            EngineError: some of that work failed.
        """

    @abstractmethod
    def capture(self, launches: Sequence[Launch]) -> Launch:
        """Record launches as one launch, with their work on other devices. Each of them must have run at least once.

        Raises:
            EngineError: the device cannot record them; they can still be launched one by one.
        """


class QueuedDevice(Device):
    """A device whose work waits in its queue while the host goes on, such as a GPU. Several of a kind copy from each other."""

    synchronous = False

    def __init__(self) -> None:
        self._senders: dict[int, QueuedDevice] = {}  # whose tensors are copied here, by stream

    @abstractmethod
    def follow(self, other: Self) -> Launch:
        """Prepare to let what is launched here later wait for what was launched on another device before."""

    @abstractmethod
    def fetch(self, target: Buffer, source: Buffer) -> Launch:
        """Prepare a copy of a tensor of another device, whose work is not waited for."""

    @abstractmethod
    def record(self, launches: Sequence[Launch]) -> Launch:
        """Record launches as one launch of this device.

        From the first time on that another device follows this one, its launches are recorded, too. At the end, this one must
        follow all that they launched. Errors are those of `capture`.
        """

    def receive(self, target: Buffer, source: Buffer, sender: Device) -> Launch:
        if not isinstance(sender, QueuedDevice):
            return super().receive(target, source, sender)
        self._senders[sender.stream] = sender
        return in_sequence([self.follow(sender), self.fetch(target, source), sender.follow(self)])

    def linked(self) -> Sequence[Self]:
        """Return the other devices that tensors come from, here or on the way here."""
        found = {self.stream: self}
        ways: list[Any] = [self]
        for each in ways:  # which grows
            ways += [sender for stream, sender in each._senders.items() if stream not in found]
            found |= each._senders
        return [each for each in found.values() if each is not self]

    def capture(self, launches: Sequence[Launch]) -> Launch:
        others = self.linked()
        begin, end = [each.follow(self) for each in others], [self.follow(each) for each in others]
        # A replay is work of this device only, so the others' earlier and later work is kept out of it.
        return in_sequence([*end, self.record([*begin, *launches, *end]), *begin])


class Engine(ABC):
    """One compiled graph."""

    max_candidates: int | None = None  # the largest K of its TopK; None if there is no limit
    spare_slots = 0  # extra positions of a step model's cache, beyond the capacity
    skips_logits = False  # whether a step model can compute the logits of only the last rows, as many as their buffer holds
    recordable = True  # whether the device may record its launches
    overwrites = True  # whether it may write recurrent states over its inputs

    @abstractmethod
    def bind(self, tensors: Mapping[str, Buffer]) -> Launch:
        """Prepare a run over these buffers, whose shapes determine the run's. A failing launch raises `EngineError`."""


class Arena:
    """Tensors in one block of host memory, mirrored on the device, so that one copy moves all of them."""

    def __init__(self, device: Device, layout: Layout):
        """Allocate both sides; `layout` lists the tensors."""
        sizes = [math.prod(shape) * DTYPES[dtype].numpy.itemsize for shape, dtype in layout.values()]
        offsets = [0, *accumulate(-(-size // device.alignment) * device.alignment for size in sizes)]
        host, whole = device.mirrored(offsets[-1])
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, Buffer] = {}
        for (name, (shape, dtype)), size, at in zip(layout.items(), sizes, offsets, strict=False):
            self.host[name] = host[at : at + size].view(DTYPES[dtype].numpy).reshape(shape)
            self.device[name] = Buffer(whole.address + at, shape, dtype, whole.place, whole.memory)
        self.upload = device.upload(host, whole)
        self.download = device.download(whole, host)


def in_sequence(launches: Sequence[Launch]) -> Launch:
    """Return several launches as one."""
    if len(launches) == 1:
        return launches[0]

    def launch() -> None:
        for each in launches:
            each()

    return launch


def nothing() -> None:
    """Do nothing: the launch of a copy between two views of the same memory."""


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file of the system, by its first word."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines()) if len(words) > 1}


class Cpu(Device):
    """The CPU: a launch runs at once, and device memory is host memory."""

    name = "cpu"
    synchronous = True
    stream = 0
    alignment = 8

    def memory(self) -> tuple[int, int]:
        try:
            page = os.sysconf("SC_PAGE_SIZE")
            free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):  # not every system reports it
            return sys.maxsize, sys.maxsize
        with suppress(OSError, ValueError, KeyError):  # Linux also knows what it can take back from its cache of files
            free = 1024 * _numbers(MEMINFO)["MemAvailable:"]
        with suppress(OSError, ValueError, KeyError):  # a container may have a lower limit
            total = min(total, limit := int((CONTAINER / "memory.max").read_text()))
            used = int((CONTAINER / "memory.current").read_text()) - _numbers(CONTAINER / "memory.stat")["inactive_file"]
            free = min(free, limit - used)
        return max(0, min(free, total)), total

    def zeros(self, shape: tuple[int, ...], dtype: str, purpose: str) -> Buffer:
        try:
            array = np.zeros(shape, DTYPES[dtype].numpy)
        except (MemoryError, ValueError, OverflowError) as error:  # NumPy raises the last two for impossible sizes
            raise EngineError(f"no memory for {purpose}", "build with a smaller --capacity or --batch") from error
        return Buffer(array.ctypes.data, shape, dtype, "cpu", array)

    def mirrored(self, size: int) -> tuple[npt.NDArray[np.uint8], Buffer]:
        host = np.zeros(size, dtype=np.uint8)
        return host, Buffer(host.ctypes.data, (size,), "uint8", "cpu", host)

    def upload(self, host: npt.NDArray[Any], buffer: Buffer) -> Launch:
        return nothing

    def download(self, buffer: Buffer, host: npt.NDArray[Any]) -> Launch:
        return nothing

    def copy_columns(self, target: Buffer, to: int, source: Buffer, first: int, count: int) -> Launch:
        output, values = target.view()[:, to : to + count], source.view()[:, first : first + count]

        def launch() -> None:
            output[...] = values

        return launch

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        return buffer.view()

    def write(self, buffer: Buffer, values: npt.NDArray[Any]) -> None:
        buffer.view()[...] = values

    def synchronize(self) -> None:
        pass

    def capture(self, launches: Sequence[Launch]) -> Launch:
        raise EngineError("a CPU cannot record launches", "run them one by one")
