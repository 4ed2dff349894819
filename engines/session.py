"""A step model with its key/value cache, on any backend whose engines run over bound buffers."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from outrider.engines.arrays import Floats, Int64s
from outrider.engines.contract import INPUT_IDS, KEY_POSITIONS, LOGITS, POSITIONS, cache_tensors
from outrider.engines.device import Arena, Buffer, Device, Engine, Launch
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.errors import EngineError

MAX_BOUND = 256  # passes that a session keeps bound; a prompt's last chunk may have any length, in any slot and window


class Session:
    """A step model for `batch` sequences, and the cache that it writes in place. `seconds` is the time spent in `write`.

    Engines silently drop writes beyond the cache's capacity, so a session checks every pass before it runs.
    """

    def __init__(
        self,
        device: Device,
        engine: Engine,
        *,
        layers: Sequence[tuple[int, int, int]],
        precision: str,
        vocab_rows: int,
        capacity: int,
        windows: list[int],
        max_rows: int,
        batch: int,
    ):
        """Allocate the cache and the buffers of a pass.

        Args:
            layers: (key/value heads, key width, value width) of each layer.
            precision: key of `PRECISIONS`.
            vocab_rows: width of the logits.
            capacity: positions of the cache.
            windows: the windows that the engine runs with, ascending; the last one is the capacity.
            max_rows: rows of the longest pass.
            batch: sequences, each with a slot of the cache.

        Raises:
            EngineError: the device has no memory for the buffers, or cannot align the slots of the cache.
        """
        self.device = device
        self.engine = engine
        self.batch = batch
        self.capacity = capacity
        self.max_rows = max_rows
        self.vocab_rows = vocab_rows
        self.seconds = 0.0
        self.windows = windows
        self._tensors = cache_tensors(layers)
        dtype, purpose = PRECISIONS[precision].dtype, f"a cache of {batch} x {capacity:,} positions"
        self._cache = {
            tensor.past: device.zeros((batch, tensor.heads, capacity + engine.spare_slots, tensor.width), dtype, purpose)
            for tensor in self._tensors
        }
        self._check_alignment()
        self._arena = Arena(device, {INPUT_IDS: ((batch * max_rows,), "int64"), POSITIONS: ((batch,), "int64")})
        self._key_positions = device.zeros((capacity,), "int64", purpose)
        device.write(self._key_positions, np.arange(capacity))
        self._logits: Buffer | None = None
        # By sequences, rows, window, rows of logits, and first slot.
        self._passes: LRUCache[tuple[int, ...], Launch] = LRUCache(MAX_BOUND)

    def _check_alignment(self) -> None:
        sizes = {buffer.nbytes // self.batch for buffer in self._cache.values()}
        unaligned = [size for size in sizes if size % self.device.alignment]
        if self.batch > 1 and unaligned:
            raise EngineError(
                f"a slot of the cache has {unaligned[0]:,} bytes, which is not a multiple of {self.device.alignment}:"
                " the next slot would be misaligned for this device",
                "build the bundle again with a --capacity that is a multiple of 64",
            )

    def window(self, rows: int, first: int, last: int) -> int:
        """Return the window for a pass of `rows` rows, at positions from `first` to `last` over the batch.

        Raises:
            EngineError: the pass would write beyond the capacity.
        """
        end = last + rows
        if rows > self.max_rows or end > self.capacity or first < 0:
            raise EngineError(
                f"a run of {self.batch}x{rows} rows up to position {end} does not fit an engine of"
                f" {self.batch}x{self.max_rows} rows and a capacity of {self.capacity}",
                "build the bundle with a larger --capacity or --max-prompt-chunk",
            )
        return self.windows[bisect_left(self.windows, end)]

    def bind(self, input_ids: Buffer, positions: Buffer, logits: Buffer, window: int, first: int = 0) -> Launch:
        """Prepare a pass over the caller's buffers.

        Args:
            input_ids: int64 [N, S], ids below `vocab_rows`.
            positions: int64 [N], the index at which each sequence's first row is written.
            logits: float32 [N, S, V], filled for every row; or [N, R, V] for the last R, where the engine `skips_logits`.
            window: what `window` returned.
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
            tensors[tensor.past] = tensors[tensor.present] = self._slots(self._cache[tensor.past], first, count)
        return self.engine.bind(tensors)

    def _slots(self, cache: Buffer, first: int, count: int) -> Buffer:
        shape = cache.shape[1:]
        return cache.part(first * math.prod(shape), count, *shape)

    def _logits_of(self, rows: int) -> Buffer:
        """Return memory for the logits of `rows` rows. It is large, so it only grows as passes from host arrays need it."""
        size = rows * self.vocab_rows
        if self._logits is None or self._logits.shape[0] < size:
            self._passes.clear()  # they are bound to the previous memory
            self._logits = None
            self._logits = self.device.zeros((size,), "float32", "the logits of a pass")
        return self._logits

    def prepare(self, input_ids: Int64s, positions: Int64s, first: int = 0, logits: bool = False) -> Launch:
        """Put `input_ids` [N, S] and `positions` [N] where a pass reads them, and return the pass, which waits for nothing.

        Args and errors are those of `write`.
        """
        batch, rows = input_ids.shape
        if not 0 <= first <= self.batch - batch:
            raise EngineError(
                f"a run of {batch}x{rows} rows from slot {first} on does not fit a session of {self.batch}",
                "open it for a larger batch",
            )
        window = self.window(rows, int(positions.min()), int(positions.max()))
        logits_rows = rows if logits or not self.engine.skips_logits else 0
        memory = self._logits_of(batch * logits_rows) if logits_rows else None
        key = batch, rows, window, logits_rows, first
        launch = self._passes.get(key)
        if launch is None:
            memory = memory or self.device.zeros((1,), "float32", "no logits")
            launch = self._passes[key] = self.bind(
                self._arena.device[INPUT_IDS].part(0, batch, rows),
                self._arena.device[POSITIONS].part(0, batch),
                memory.part(0, batch, logits_rows, self.vocab_rows),
                window,
                first,
            )
        self.device.synchronize()  # the previous pass may still be reading the arrays
        self._arena.host[INPUT_IDS][: input_ids.size] = input_ids.reshape(-1)
        self._arena.host[POSITIONS][:batch] = positions
        return launch

    def write(self, input_ids: Int64s, positions: Int64s, first: int = 0, logits: bool = False) -> None:
        """Run one pass from host arrays: write the keys and values of `input_ids` [N, S] from `positions` [N] on.

        Args:
            first: the slot of the first sequence; the others follow it.
            logits: whether to compute the logits; engines that can leave them out do so otherwise.

        Raises:
            EngineError: the rows do not fit, or the backend failed.
        """
        launch = self.prepare(input_ids, positions, first, logits)
        started = time.perf_counter()
        self._arena.upload()
        launch()
        self.seconds += time.perf_counter() - started

    def run(self, input_ids: Int64s, positions: Int64s, first: int = 0) -> Floats:
        """Run `write` and return the logits of every row: float32 [N, S, V], valid until the next pass."""
        self.write(input_ids, positions, first, logits=True)
        started = time.perf_counter()
        logits = self.device.read(self._logits_of(input_ids.size).part(0, *input_ids.shape, self.vocab_rows))
        self.seconds += time.perf_counter() - started
        return logits

    def clear(self, slot: int) -> None:
        """Zero a slot's cache. Masked values are still multiplied (by zero), so NaN of one sequence would reach the next."""
        for whole in self._cache.values():
            buffer = self._slots(whole, slot, 1)
            self.device.write(buffer, np.zeros(buffer.shape, DTYPES[buffer.dtype].numpy))

    def move(self, slot: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a slot's cache into the slot `to`."""
        for whole in self._cache.values():
            _, heads, capacity, width = whole.shape
            target, source = (self._slots(whole, each, 1).part(0, heads, capacity * width) for each in (to, slot))
            self.device.copy_columns(target, 0, source, 0, length * width)()

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        """Return the cache tensors by name, [B, Hkv, C, D]; for tests and tools."""
        return {name: self.device.read(buffer) for name, buffer in self._cache.items()}
