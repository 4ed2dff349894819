"""A step model with its cache, on any backend: the guards, the windows, and the buffers of a pass."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.bundle.manifest import Build, Manifest, Model
from outrider.engines.contract import INPUT_IDS, KEY_POSITIONS, LOGITS, POSITIONS, cache_tensors
from outrider.engines.device import DTYPES, Arena, Buffer, Device, Engine, Launch, kept
from outrider.errors import EngineError

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
MAX_BOUND = 256  # passes that a session keeps bound; a prompt's last chunk may have any length, in any slot and window
CACHE_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int4": "float32", "int8": "float32"}


class Engines(ABC):
    """What a backend makes of a bundle: its engines on a device."""

    def __init__(self, folder: Path, manifest: Manifest, build: Build, device: Device):
        self.folder = folder
        self.manifest = manifest
        self.build = build
        self.device = device

    @abstractmethod
    def step_model(self, role: str) -> Engine:
        """The model of one role.

        Raises:
            EngineError: the backend refuses it, or it is not what the manifest says.
        """

    @abstractmethod
    def sampler(self, name: str) -> Engine:
        """One of `contract.SAMPLERS`.

        Raises:
            EngineError: as for `step_model`.
        """

    def session(self, role: str, batch: int) -> Session:
        """The model of one role with a fresh cache for `batch` sequences.

        Raises:
            EngineError: as for `step_model`; or there is no memory for the cache.
        """
        return Session(self.device, self.step_model(role), self.manifest.models[role], self.build, batch)


class Session:
    """A step model for `batch` sequences, and the cache that it writes in place. `seconds` is what `write` took."""

    def __init__(self, device: Device, engine: Engine, model: Model, build: Build, batch: int):
        """Lay out the buffers.

        Raises:
            EngineError: there is no memory for them, or slots would not begin where the device must have them.
        """
        self.device = device
        self.batch = batch
        self.seconds = 0.0
        self.capacity = build.capacity
        self.max_rows = build.max_rows
        self.vocab_rows = model.vocab_rows
        self._windows = build.windows
        self.engine = engine
        self._tensors = cache_tensors(model.layers)
        dtype, what = CACHE_TYPES[model.precision], f"a cache of {batch} x {self.capacity:,} positions"
        self._cache = {
            tensor.past: device.zeros((batch, tensor.heads, self.capacity + engine.spare_slots, tensor.width), dtype, what)
            for tensor in self._tensors
        }
        crooked = [each for each in self._cache.values() if each.nbytes // batch % device.alignment]
        if batch > 1 and crooked:
            raise EngineError(
                f"the cache of a slot has {crooked[0].nbytes // batch:,} bytes, so that the next would not begin at a multiple"
                f" of {device.alignment}, as engines here must have it",
                "build the bundle again with a --capacity that is a multiple of 64",
            )
        self._arena = Arena(device, {INPUT_IDS: ((batch * self.max_rows,), "int64"), POSITIONS: ((batch,), "int64")})
        self._key_positions = device.zeros((self.capacity,), "int64", what)
        device.write(self._key_positions, np.arange(self.capacity))
        self._logits: Buffer | None = None
        self._passes: dict[tuple[int, ...], Launch] = {}  # by sequences, rows, window, rows of logits, and first slot

    def window(self, rows: int, first: int, last: int) -> int:
        """The window for a pass of so many rows at positions from `first` to `last` over the batch.

        Raises:
            EngineError: it would write past the capacity, which engines do not notice: they drop such writes.
        """
        end = last + rows
        if rows > self.max_rows or end > self.capacity or first < 0:
            raise EngineError(
                f"a run of {self.batch}x{rows} rows up to position {end} does not fit an engine of"
                f" {self.batch}x{self.max_rows} rows and a capacity of {self.capacity}",
                "build the bundle with a larger --capacity or --max-prompt-chunk",
            )
        return self._windows[bisect_left(self._windows, end)]

    def bind(self, input_ids: Buffer, positions: Buffer, logits: Buffer, window: int, first: int = 0) -> Launch:
        """A pass over buffers of the caller's, at a window that `window` gave.

        Args:
            input_ids: int64 [N, S], ids below `vocab_rows`.
            positions: int64 [N], the index at which each sequence's first row is written.
            logits: float32 [N, S, V], filled for every row; or [N, R, V] for the last R, where the engine `skips_logits`.
            first: the slot of the first sequence; the others follow it.
        """
        tensors = {
            INPUT_IDS: input_ids,
            POSITIONS: positions,
            KEY_POSITIONS: self._key_positions.part(0, window),
            LOGITS: logits,
        }
        count = input_ids.shape[0]
        for tensor in self._tensors:  # past and present are the same memory, or the engine would copy the cache
            tensors[tensor.past] = tensors[tensor.present] = self._of_slots(self._cache[tensor.past], first, count)
        return self.engine.bind(tensors)

    def _of_slots(self, cache: Buffer, first: int, count: int) -> Buffer:
        shape = cache.shape[1:]
        return cache.part(first * math.prod(shape), count, *shape)

    def _room(self, rows: int) -> Buffer:
        """Memory for so many rows of logits; large, so no more than passes from host arrays have needed so far."""
        size = rows * self.vocab_rows
        if self._logits is None or self._logits.shape[0] < size:
            self._passes.clear()  # they are bound to what was there before
            self._logits = None
            self._logits = self.device.zeros((size,), "float32", "the logits of a pass")
        return self._logits

    def write(self, input_ids: Int64s, positions: Int64s, first: int = 0, logits: bool = False) -> None:
        """One pass from host arrays: write the keys and values of `input_ids` [N, S] from `positions` [N] on.

        Args:
            first: the slot of the first sequence; the others follow it.
            logits: whether they must be computed; without, engines that can save it do.

        Raises:
            EngineError: the rows do not fit, or the backend failed.
        """
        batch, rows = input_ids.shape
        if not 0 <= first <= self.batch - batch:
            raise EngineError(
                f"a run of {batch}x{rows} rows from slot {first} on does not fit a session of {self.batch}",
                "open it for a larger batch",
            )
        window = self.window(rows, int(positions.min()), int(positions.max()))
        answered = rows if logits or not self.engine.skips_logits else 0
        room = self._room(batch * answered) if answered else None

        def bound() -> Launch:
            ids = self._arena.device[INPUT_IDS].part(0, batch, rows)
            whole = room or self.device.zeros((1,), "float32", "no logits")
            buffer = whole.part(0, batch, answered, self.vocab_rows)
            return self.bind(ids, self._arena.device[POSITIONS].part(0, batch), buffer, window, first)

        launch = kept(self._passes, (batch, rows, window, answered, first), MAX_BOUND, bound)
        self.device.synchronize()  # or the arrays might still be on their way to the pass before
        self._arena.host[INPUT_IDS][: input_ids.size] = input_ids.reshape(-1)
        self._arena.host[POSITIONS][:batch] = positions
        started = time.perf_counter()
        self._arena.upload()
        launch()
        self.seconds += time.perf_counter() - started

    def run(self, input_ids: Int64s, positions: Int64s, first: int = 0) -> Floats:
        """`write`, and the logits of every row: float32 [N, S, V], valid until the next pass."""
        self.write(input_ids, positions, first, logits=True)
        started = time.perf_counter()
        logits = self.device.read(self._room(input_ids.size).part(0, *input_ids.shape, self.vocab_rows))
        self.seconds += time.perf_counter() - started
        return logits

    def clear(self, slot: int) -> None:
        """Zero the cache of a slot, for what was NaN in one sequence would be NaN in the next: masked values still multiply."""
        for whole in self._cache.values():
            buffer = self._of_slots(whole, slot, 1)
            self.device.write(buffer, np.zeros(buffer.shape, DTYPES[buffer.dtype]))

    def move(self, slot: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a slot's cache into another slot."""
        for whole in self._cache.values():
            _, heads, capacity, width = whole.shape
            into, out = (self._of_slots(whole, each, 1).part(0, heads, capacity * width) for each in (to, slot))
            self.device.copy_columns(into, 0, out, 0, length * width)()

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        """The cache tensors by name, [B, Hkv, C, D]; for tests and tools."""
        return {name: self.device.read(buffer) for name, buffer in self._cache.items()}
