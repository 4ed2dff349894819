"""A device in memory that behaves as a GPU does: nothing runs before somebody waits, memory of its own, recorded launches.

Its engines are real: ONNX Runtime's on the CPU. So everything above the calls of CUDA is tested with real numbers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.backends import registry
from outrider.backends.base import Backend, Engines
from outrider.backends.onnxruntime.backend import OnnxRuntimeBackend
from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines
from outrider.backends.open import open_bundle
from outrider.bundle.manifest import Build, Manifest
from outrider.engines.contract import Stage
from outrider.engines.device import Buffer, Cpu, Engine, Launch, QueuedDevice
from outrider.engines.precisions import DTYPES
from outrider.engines.session import Session
from outrider.engines.sizes import Sizes
from outrider.errors import EngineError
from outrider.runtime.generation import Outrider
from outrider.runtime.text.text import Text

STREAMS = count(1)


class Deferred(QueuedDevice, Cpu):
    """Work waits in a queue until `synchronize`; in between, what the host reads is old.

    A device that waits for work of another one lets it run as far ahead as it may.
    """

    synchronous = False
    alignment = 256

    def __init__(self) -> None:
        super().__init__()
        self.stream = next(STREAMS)
        self.queue: deque[Launch] = deque()
        self.owned: list[Any] = []  # its memory
        self.recording: Recording | None = None
        self.waits = 0
        self.recorded = 0
        self.replayed = 0
        self.refusal: str | None = None  # why nothing can be recorded
        self.spoil: Callable[[], None] | None = None  # what a replay does besides

    def deferred(self, work: Launch) -> Launch:
        """A launch that only queues its work."""
        return lambda: self.push(work)

    def push(self, work: Launch) -> None:
        """Queue work, or record it."""
        if self.recording is None:
            self.queue.append(work)
        else:
            self.recording.push(self, work)

    def zeros(self, shape: tuple[int, ...], dtype: str, what: str) -> Buffer:
        item = DTYPES[dtype].numpy.itemsize
        raw = np.zeros(int(np.prod(shape)) * item + 2 * self.alignment, dtype=np.uint8)
        self.owned.append(weakref.ref(raw))
        return Buffer(raw.ctypes.data + -raw.ctypes.data % self.alignment, shape, dtype, "cpu", raw)

    def mirrored(self, size: int) -> tuple[npt.NDArray[np.uint8], Buffer]:
        return np.zeros(size, dtype=np.uint8), self.zeros((size,), "uint8", "a mirror")

    def upload(self, host: npt.NDArray[Any], buffer: Buffer) -> Launch:
        return self.deferred(lambda: np.copyto(buffer.view(), host))

    def download(self, buffer: Buffer, host: npt.NDArray[Any]) -> Launch:
        return self.deferred(lambda: np.copyto(host, buffer.view()))

    def copy_columns(self, target: Buffer, to: int, source: Buffer, first: int, count: int) -> Launch:
        return self.deferred(super().copy_columns(target, to, source, first, count))

    def follow(self, other: Deferred) -> Launch:
        return lambda: Mark(other).hold(self)

    def fetch(self, target: Buffer, source: Buffer) -> Launch:
        assert self.owns(target)
        assert not self.owns(source)
        return self.deferred(lambda: np.copyto(target.view(), source.view()))

    def owns(self, buffer: Buffer) -> bool:
        """Whether a tensor is in its memory."""
        return any(each() is buffer.memory for each in self.owned)

    def read(self, buffer: Buffer) -> npt.NDArray[Any]:
        self.synchronize()
        return buffer.view().copy()

    def write(self, buffer: Buffer, values: npt.NDArray[Any]) -> None:
        self.synchronize()
        buffer.view()[...] = values

    def synchronize(self) -> None:
        if self.recording is not None:
            raise EngineError("operation not permitted when stream is capturing (cudaErrorStreamCaptureUnsupported)", "none")
        self.waits += 1
        self.run()

    def run(self) -> None:
        """Do all the work that waits."""
        while self.queue:
            self.queue.popleft()()

    def record(self, launches: Sequence[Launch]) -> Launch:
        if self.refusal:
            raise EngineError(self.refusal, "none")
        recording = Recording(self)
        try:
            for launch in launches:
                launch()
        finally:
            recording.end()
        recording.check()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            self.queue.append(recording.replay)
            if self.spoil is not None:
                self.queue.append(self.spoil)

        return replay


class Recording:
    """The work of several devices as one launch of the first. Errors are those of CUDA."""

    def __init__(self, origin: Deferred):
        self.origin = origin
        self.work: dict[Deferred, list[Launch]] = {}
        self.marks: list[Mark] = []
        self.before: dict[Deferred, dict[Deferred, int]] = {}  # by device, how much work of each comes before its next work
        self.left: dict[Deferred, deque[Launch]] = {}  # of a replay
        self.join(origin)

    def join(self, device: Deferred) -> None:
        """Record what a device launches from now on."""
        device.recording = self
        self.work[device], self.before[device] = [], {}

    def push(self, device: Deferred, work: Launch) -> None:
        self.work[device].append(work)
        self.before[device][device] = len(self.work[device])

    def end(self) -> None:
        for device in self.work:
            device.recording = None

    def check(self) -> None:
        """Refuse a recording whose origin does not wait for all the others' work."""
        if any(self.before[self.origin].get(device, 0) < self.before[device].get(device, 0) for device in self.work):
            raise EngineError("capturing stream has unjoined work (cudaErrorStreamCaptureUnjoined)", "none")

    def replay(self) -> None:
        """Let each device run as far ahead as it may: the first one or, in every other replay, the last one."""
        for mark in self.marks:
            mark.reached = False
        self.work = dict(reversed(self.work.items()))
        self.left = {device: deque(work) for device, work in self.work.items()}
        for device in self.work:
            self.run(device)

    def run(self, device: Deferred) -> None:
        while self.left[device]:
            self.left[device].popleft()()


class Mark:
    """A place in a device's work that another device waits for: an event of CUDA."""

    def __init__(self, device: Deferred):
        self.device, self.recording, self.reached = device, device.recording, False
        if self.recording is None:
            device.queue.append(self.reach)
            return
        self.before = dict(self.recording.before[device])
        self.recording.marks.append(self)
        self.recording.work[device].append(self.reach)

    def reach(self) -> None:
        self.reached = True

    def hold(self, device: Deferred) -> None:
        """Let a device wait."""
        if self.recording is not None and device.recording is None:
            self.recording.join(device)
        if self.recording is not device.recording:
            raise EngineError("dependency on uncaptured work in another stream (cudaErrorStreamCaptureIsolation)", "none")
        device.push(self.wait)
        if self.recording is not None:
            own = self.recording.before[device]
            own |= {each: max(count, own.get(each, 0)) for each, count in self.before.items()}

    def wait(self) -> None:
        if not self.reached:
            self.device.run() if self.recording is None else self.recording.run(self.device)
        assert self.reached


class DeferredEngine(Engine):
    """An engine of ONNX Runtime, whose runs wait in the device's queue."""

    def __init__(self, engine: Engine, device: Deferred, max_candidates: int | None):
        self._engine = engine
        self._device = device
        self.max_candidates = max_candidates
        self.spare_slots = engine.spare_slots

    def bind(self, tensors: Mapping[str, Buffer]) -> Launch:
        for name, buffer in tensors.items():
            assert name == "candidates" or buffer.address % self._device.alignment == 0, name
            assert name == "candidates" or not buffer.nbytes or self._device.owns(buffer), name
        return self._device.deferred(self._engine.bind(tensors))


class DeferredEngines(OnnxRuntimeEngines):
    """A bundle of ONNX Runtime on such a device. `max_candidates` is a TopK's limit, as TensorRT has one."""

    device: Deferred

    def __init__(self, folder: Path, manifest: Manifest, build: Build, max_candidates: int | None = None):
        super().__init__(folder, manifest, build, Deferred())
        self._most_candidates = max_candidates

    def step_model(self, role: str, stage: Stage | None = None) -> Engine:
        return DeferredEngine(super().step_model(role, stage), self.device, None)

    def sampler(self, name: str) -> Engine:
        limit = None if name == "logprobs" else self._most_candidates
        return DeferredEngine(super().sampler(name), self.device, limit)


def opened(_: Backend, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
    """In place of ONNX Runtime's `open`, where every GPU is such a device."""
    if (device or build.device) == "cpu":
        return OnnxRuntimeEngines(folder, manifest, build, Cpu())
    return DeferredEngines(folder, manifest, build)


def pretend() -> None:
    """Let this process have such GPUs."""
    OnnxRuntimeBackend.open = opened  # type: ignore[method-assign, assignment]


def deferred(
    bundle: Path,
    max_candidates: int | None = None,
    slots: int = 1,
    elsewhere: Callable[[Engines, Sequence[Sizes]], Session] | None = None,
) -> Outrider:
    """A bundle loaded onto such a device, or onto one for each GPU of its stages and drafts; those of the CPU stay there.

    Stages that `elsewhere` opens are on real devices.
    """
    manifest, build = open_bundle(bundle)
    places, drafts = build.places, [build.draft_device] if build.draft_device else []
    others: dict[str, Engines] = {
        place: OnnxRuntimeEngines(bundle, manifest, build, Cpu())
        if place == "cpu" and len({*places, *drafts}) > 1
        else DeferredEngines(bundle, manifest, build, max_candidates)
        for place in (*places, *drafts)
    }
    for home, place in zip(build.homes, places, strict=True):
        if home != place:  # of another backend
            name = home.split()[0]
            others[home] = registry.get(name).open(bundle, manifest, build.seen_by(name), place)
    engines = others[places[-1]]
    engines.others, engines.elsewhere = others, elsewhere
    return Outrider(engines, Text.load(bundle, manifest), slots)
