"""A step model with its key/value cache: what all backends share, and the rest for engines that run over bound buffers."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from outrider.engines.arrays import Floats, Int64s
from outrider.engines.contract import (
    BLOCK_STATE,
    COMMITTED,
    FEATURE_POSITIONS,
    INPUT_IDS,
    KEY_POSITIONS,
    LOGITS,
    PAST_FEATURES,
    PENDING,
    POSITIONS,
    RecurrentLayer,
    cache_tensors,
)
from outrider.engines.device import Arena, Buffer, Device, Engine, Launch, in_sequence
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.engines.recurrence import Recurrence
from outrider.errors import EngineError

SNAPSHOTS = 2  # of recurrent states, for each sequence
MAX_BOUND = 256  # passes that a session keeps bound; a prompt's last chunk may have any length, in any slot and window


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a session is made for."""

    layers: Sequence[tuple[int, int, int]]
    """(key/value heads, key width, value width) of each layer with attention"""
    vocab_rows: int
    """width of the logits"""
    capacity: int
    """positions of the cache"""
    windows: list[int]
    """the windows that the engine runs with, ascending; the last one is the capacity"""
    max_rows: int
    """rows of the longest pass"""
    batch: int
    """sequences, each with a slot of the cache"""
    features: int | None = None
    """width of the features that the model writes or reads; None if it has none"""
    reads_features: bool = False
    """whether the model is a draft head"""
    mask_token: int = 0
    """of what drafts in one pass: what stands for tokens not known yet"""
    block_state: int | None = None
    """width of what a block head gives to its Markov and confidence heads; None if it has none"""
    from_anchor: bool = False
    """of a block head: whether the last confirmed token's row gives the logits of the first drafted one"""
    recurrent: Sequence[RecurrentLayer] = ()
    """its recurrent layers"""
    recent: int = 0
    """rows that these keep, R of the contract"""

    @property
    def cache(self) -> str:
        """The cache in words."""
        return f"a cache of {self.batch} x {self.capacity:,} positions"


@dataclass(frozen=True, slots=True)
class Pass:
    """The buffers of a pass of N sequences with S rows each."""

    input_ids: Buffer
    """int64 [N, S], ids below `vocab_rows`"""
    positions: Buffer
    """int64 [N], the index at which each sequence's first row is written"""
    logits: Buffer
    """float32 [N, S, V], filled for every row; or [N, R, V] for the last R, where the session `skips_logits`"""
    window: int
    """what `Session.window` returned"""
    first: int = 0
    """the slot of the first sequence; the others follow it"""
    feature_positions: Buffer | None = None
    """int64 [N], for a draft head: where each sequence's last row writes its output"""
    commits: tuple[Buffer, Buffer] | None = None
    """`pending` and `committed` of a model with recurrent layers, int64 [N], which `Session.advance` writes"""


def check_memory(device: Device, sizes: Sizes, layout: Iterable[tuple[tuple[int, ...], str]]) -> None:
    """Check that a cache fits, given the shape and type of each of its tensors, before any of them is allocated: systems hand
    out more memory than they have, and end the process that uses it.

    Raises:
        EngineError: it does not.
    """
    size = sum(math.prod(shape) * DTYPES[dtype].numpy.itemsize for shape, dtype in layout)
    if size > (total := device.memory()[1]):
        raise EngineError(
            f"no memory for {sizes.cache}: it takes {size:,} bytes, and there are {total:,}",
            "build with a smaller --capacity or --batch",
        )


class Session(ABC):
    """A step model for `batch` sequences, and the cache that it writes in place. `seconds` is the time spent in `write`.

    Engines silently drop writes beyond the cache's capacity, so a session checks every pass before it runs.
    """

    skips_logits: bool  # whether it can compute the logits of only as many of the last rows as their buffer holds
    recordable: bool  # whether the device may record its launches

    def __init__(self, device: Device, sizes: Sizes):
        """Allocate the buffers of a pass.

        Raises:
            EngineError: the device has no memory for the buffers.
        """
        self.device = device
        self.batch = sizes.batch
        self.capacity = sizes.capacity
        self.max_rows = sizes.max_rows
        self.vocab_rows = sizes.vocab_rows
        self.seconds = 0.0
        self.windows = sizes.windows
        self.reads_features = sizes.reads_features
        self.mask_token, self.from_anchor = sizes.mask_token, sizes.from_anchor
        self.recurrence = Recurrence(sizes.batch) if sizes.recurrent else None
        self.places = SNAPSHOTS * sizes.batch if sizes.recurrent else 0  # for snapshots
        ids, one = ((sizes.batch * sizes.max_rows,), "int64"), ((sizes.batch,), "int64")
        self._arena = Arena(device, {INPUT_IDS: ids, **dict.fromkeys((POSITIONS, FEATURE_POSITIONS, PENDING, COMMITTED), one)})
        self._arena.host[FEATURE_POSITIONS][:] = self.spare_feature
        self._logits: Buffer | None = None
        # By sequences, rows, window, rows of logits, and first slot.
        self._passes: LRUCache[tuple[int, ...], Launch] = LRUCache(MAX_BOUND)

    @property
    def spare_feature(self) -> int:
        """The entry of the features that no pass reads: a text that ends there is full, and nothing is drafted after it."""
        return self.capacity - 1

    def unbind(self) -> None:
        """Forget the passes that were bound to host arrays; each is bound again when it is needed."""
        self._passes.clear()

    @abstractmethod
    def bind(self, buffers: Pass) -> Launch:
        """Prepare a pass over the caller's buffers."""

    def advance(
        self, first: int, positions: Int64s, rows: int, certain: Sequence[int], pending: Int64s, committed: Int64s
    ) -> None:
        """Write what a pass of a model with recurrent layers does to their states; the pass has to follow.

        Args:
            first: the slot of the first sequence.
            positions: where each sequence's rows begin.
            rows: of the pass.
            certain: how many of them are confirmed; 0 of a sequence that takes no part.
            pending, committed: int64 [N], on the host, to write to.

        Raises:
            EngineError: the state before a position is gone.
        """
        if self.recurrence is None:
            return
        for index, position in enumerate(positions):
            if certain[index] and self.recurrence.begins(first + index, int(position)):
                self.restart(first + index)
        pending[: len(certain)], committed[: len(certain)] = self.recurrence.advance(first, positions, rows, certain)

    def usable(self, slot: int, length: int) -> int:
        """Return after how many of the first `length` tokens in a slot's cache another text can go on."""
        return length if self.recurrence is None else self.recurrence.usable(slot, length)

    def assume(self, positions: Int64s, first: int = 0) -> None:
        """Take the states of the slots from `first` on for those before `positions`, whatever they are; for measurements and
        comparisons."""
        for slot, position in enumerate(positions if self.recurrence is not None else (), first):
            assert self.recurrence is not None
            self.recurrence.assume(slot, int(position))

    @abstractmethod
    def share_features(self, target: Session) -> None:
        """Read the features that `target` writes; a draft head alone has its own, which are zeros."""

    @abstractmethod
    def set_features(self, features: Floats) -> None:
        """Replace what a draft head reads by float32 [B, C, H]; for comparisons."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Zero a slot's cache. Masked values are still multiplied (by zero), so NaN of one sequence would reach the next."""

    def restart(self, slot: int) -> None:
        """Zero the recurrent states of a slot, for another text; its keys and values are overwritten as that goes on."""
        self.clear(slot)

    @abstractmethod
    def copy(self, slot: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a slot's cache, and its recurrent states, into the slot `to`."""

    def snapshot(self, slot: int, place: int) -> None:  # noqa: B027
        """Copy the recurrent states of a slot to one of the `places`."""

    def restore(self, place: int, slot: int, position: int) -> None:  # noqa: B027
        """Copy the states at a place back to a slot: those after `position` tokens, with nothing behind them."""

    @abstractmethod
    def cache(self) -> dict[str, npt.NDArray[Any]]:
        """Return the cache tensors by name, [B, ...] as in `contract.cache_tensors`; for tests and tools."""

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

    def _logits_of(self, rows: int) -> Buffer:
        """Return memory for the logits of `rows` rows. It is large, so it only grows as passes from host arrays need it."""
        size = rows * self.vocab_rows
        if self._logits is None or self._logits.shape[0] < size:
            self.unbind()  # from the previous memory
            self._logits = None
            self._logits = self.device.zeros((size,), "float32", "the logits of a pass")
        return self._logits

    def prepare(
        self,
        input_ids: Int64s,
        positions: Int64s,
        first: int = 0,
        logits: bool = False,
        certain: Sequence[int] | None = None,
    ) -> Launch:
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
        logits_rows = rows if logits or not self.skips_logits else 0
        memory = self._logits_of(batch * logits_rows) if logits_rows else None
        key = batch, rows, window, logits_rows, first
        launch = self._passes.get(key)
        if launch is None:
            memory = memory or self.device.zeros((1,), "float32", "no logits")
            arena = self._arena.device
            buffers = Pass(
                arena[INPUT_IDS].part(0, batch, rows),
                arena[POSITIONS].part(0, batch),
                memory.part(0, batch, logits_rows, self.vocab_rows),
                window,
                first,
                arena[FEATURE_POSITIONS].part(0, batch) if self.reads_features else None,
                None if self.recurrence is None else (arena[PENDING].part(0, batch), arena[COMMITTED].part(0, batch)),
            )
            launch = self._passes[key] = self.bind(buffers)
        self.device.synchronize()  # the previous pass may still be reading the arrays
        commits = self._arena.host[PENDING], self._arena.host[COMMITTED]
        self.advance(first, positions, rows, [rows] * batch if certain is None else certain, *commits)
        self._arena.host[INPUT_IDS][: input_ids.size] = input_ids.reshape(-1)
        self._arena.host[POSITIONS][:batch] = positions
        return launch

    def write(
        self,
        input_ids: Int64s,
        positions: Int64s,
        first: int = 0,
        logits: bool = False,
        certain: Sequence[int] | None = None,
    ) -> None:
        """Run one pass from host arrays: write the keys and values of `input_ids` [N, S] from `positions` [N] on.

        Args:
            first: the slot of the first sequence; the others follow it.
            logits: whether to compute the logits; engines that can leave them out do so otherwise.
            certain: how many rows of each sequence are confirmed; None is all of them. See `advance`.

        Raises:
            EngineError: the rows do not fit, or the backend failed.
        """
        launch = self.prepare(input_ids, positions, first, logits, certain)
        started = time.perf_counter()
        self._arena.upload()
        launch()
        self.seconds += time.perf_counter() - started

    def run(self, input_ids: Int64s, positions: Int64s, first: int = 0, certain: Sequence[int] | None = None) -> Floats:
        """Run `write` and return the logits of every row: float32 [N, S, V], valid until the next pass."""
        self.write(input_ids, positions, first, logits=True, certain=certain)
        started = time.perf_counter()
        logits = self.device.read(self._logits_of(input_ids.size).part(0, *input_ids.shape, self.vocab_rows))
        self.seconds += time.perf_counter() - started
        return logits


class GraphSession(Session):
    """A session of an engine that runs over bound buffers, with a slot of the cache [Hkv, C, D] for each sequence."""

    def __init__(self, device: Device, engine: Engine, precision: str, sizes: Sizes):
        """Allocate the cache, too.

        Args:
            precision: key of `PRECISIONS`.

        Raises:
            EngineError: the device has no memory for the buffers, or cannot align the slots of the cache.
        """
        self._tensors = cache_tensors(sizes.layers, sizes.features, sizes.recurrent)
        dtype, slots = PRECISIONS[precision].dtype, sizes.capacity + engine.spare_slots
        layout = {
            tensor.past: ((sizes.batch, *tensor.sizes(slots, sizes.recent)), tensor.dtype or dtype) for tensor in self._tensors
        }
        check_memory(device, sizes, layout.values())
        # First, because what is too large is most likely this.
        self._cache = {name: device.zeros(*each, sizes.cache) for name, each in layout.items()}
        self._positional = {tensor.past for tensor in self._tensors if tensor.positional}
        self._snapshots = {
            name: device.zeros((SNAPSHOTS * sizes.batch, *whole.shape[1:]), whole.dtype, "snapshots of recurrent states")
            for name, whole in self._cache.items()
            if name not in self._positional
        }
        self._apart = {  # where the engine writes what it may not write over
            name: device.zeros(whole.shape, whole.dtype, sizes.cache)
            for name, whole in self._cache.items()
            if name not in self._positional and not engine.overwrites
        }
        self._features = self._cache.get(PAST_FEATURES)
        if sizes.reads_features:
            self._cache.pop(PAST_FEATURES)  # the target's to clear and to move
        super().__init__(device, sizes)
        self._block_state: Buffer | None = None
        if sizes.block_state is not None:
            shape = sizes.batch * sizes.max_rows, sizes.block_state
            self._block_state = device.zeros(shape, "float32", "what a block head makes of its rows")
        self.engine = engine
        self.skips_logits = engine.skips_logits
        self.recordable = engine.recordable and not sizes.recurrent  # a round that is run again would commit its rows twice
        self._fewest_rows = 1  # of a pass
        self._pair: tuple[Buffer, Buffer] | None = None  # tokens and logits of a row and of the one that is run along
        self._check_alignment()
        self._key_positions = device.zeros((sizes.capacity,), "int64", sizes.cache)
        device.write(self._key_positions, np.arange(sizes.capacity))

    def _check_alignment(self) -> None:
        sizes = {name: buffer.nbytes // self.batch for name, buffer in self._cache.items()}
        unaligned = [name for name, size in sizes.items() if size % self.device.alignment]
        if self.batch > 1 and unaligned:
            raise EngineError(
                f"a slot of the cache has {sizes[unaligned[0]]:,} bytes, which is not a multiple of {self.device.alignment}:"
                " the next slot would be misaligned for this device",
                "build the bundle again with a --capacity that is a multiple of 64"
                if unaligned[0] in self._positional
                else "build the bundle again with --batch 1: what a recurrent layer keeps does not depend on the capacity",
            )

    def lone_rows_differ(self) -> bool:
        """Return whether a row alone has other bits than beside another one. The first slot is cleared.

        ONNX Runtime's 4-bit products do so on a processor with AVX2 alone. Tokens would then depend on whether they are decoded
        alone or verified with others.

        Raises:
            EngineError: the backend failed.
        """
        row = self.run(np.array([[1, 2]]), np.array([0]))[0, 0].copy()
        differ = bool((self.run(np.array([[1]]), np.array([0]))[0, 0] != row).any())
        self.clear(0)
        return differ

    def pair_lone_rows(self) -> None:
        """Run no row alone from now on, but with another one behind it."""
        self._fewest_rows = 2
        self.unbind()

    def bind(self, buffers: Pass) -> Launch:
        count, rows = buffers.input_ids.shape
        return self._paired(buffers) if count * rows < self._fewest_rows else self._bound(buffers)

    def _bound(self, buffers: Pass) -> Launch:
        tensors = {
            INPUT_IDS: buffers.input_ids,
            POSITIONS: buffers.positions,
            KEY_POSITIONS: self._key_positions.part(0, buffers.window),
            LOGITS: buffers.logits,
        }
        if buffers.feature_positions is not None:
            tensors[FEATURE_POSITIONS] = buffers.feature_positions
        if buffers.commits is not None:
            tensors[PENDING], tensors[COMMITTED] = buffers.commits
        count, rows = buffers.input_ids.shape
        if self._block_state is not None:
            tensors[BLOCK_STATE] = self.block_state(count, rows)
        copies: list[Launch] = []
        for tensor in self._tensors:  # past and present are the same memory, or the engine would copy the cache
            whole = self._features if tensor.past == PAST_FEATURES else self._cache[tensor.past]
            assert whole is not None
            past = tensors[tensor.past] = tensors[tensor.present] = self._slots(whole, buffers.first, count)
            if tensor.past in self._apart:
                present = tensors[tensor.present] = self._slots(self._apart[tensor.past], buffers.first, count)
                size = past.nbytes // past.itemsize
                copies.append(self.device.copy_columns(past.part(0, 1, size), 0, present.part(0, 1, size), 0, size))
        return in_sequence([self.engine.bind(tensors), *copies])

    def _paired(self, buffers: Pass) -> Launch:
        """Prepare a pass of one row, with a second one behind it. What that writes is overwritten, or lies in a spare slot."""
        rows, width, logits = self._fewest_rows, self.vocab_rows, buffers.logits
        if self._pair is None:
            memory = "the logits of a pass"
            self._pair = self.device.zeros((1, rows), "int64", memory), self.device.zeros((rows, width), "float32", memory)
        ids, both = self._pair
        launches = [self.device.copy_columns(ids, 0, buffers.input_ids, 0, 1)]
        wanted = rows if logits.shape[1] else 0
        launches.append(self._bound(replace(buffers, input_ids=ids, logits=both.part(0, 1, wanted, width))))
        if wanted:
            launches.append(self.device.copy_columns(logits.part(0, 1, width), 0, both.part(0, 1, wanted * width), 0, width))
        return in_sequence(launches)

    def block_state(self, count: int, rows: int) -> Buffer:
        """Return what the last pass of so many sequences and rows gave to the heads of a block head, float32 [N, S, A]."""
        assert self._block_state is not None
        return self._block_state.part(0, count, rows, self._block_state.shape[1])

    def share_features(self, target: Session) -> None:
        assert isinstance(target, GraphSession)
        self._features = target._cache[PAST_FEATURES]
        self.unbind()

    def set_features(self, features: Floats) -> None:
        assert self._features is not None
        kind = DTYPES[self._features.dtype]
        whole = np.zeros(self._features.shape, kind.numpy)
        whole[:, 0, : features.shape[1]] = kind.encode(features)
        self.device.write(self._features, whole)

    def _slots(self, cache: Buffer, first: int, count: int) -> Buffer:
        shape = cache.shape[1:]
        return cache.part(first * math.prod(shape), count, *shape)

    def clear(self, slot: int) -> None:
        self._zero(slot, self._cache.values())

    def restart(self, slot: int) -> None:
        self._zero(slot, [whole for name, whole in self._cache.items() if name not in self._positional])

    def _zero(self, slot: int, tensors: Iterable[Buffer]) -> None:
        for whole in tensors:
            buffer = self._slots(whole, slot, 1)
            self.device.write(buffer, np.zeros(buffer.shape, DTYPES[buffer.dtype].numpy))
        if self.recurrence is not None:
            self.recurrence.clear(slot)

    def copy(self, slot: int, to: int, length: int) -> None:
        for name, whole in self._cache.items():
            target, source = (self._slots(whole, each, 1) for each in (to, slot))
            rows, columns = 1, source.nbytes // source.itemsize
            copied = columns
            if name in self._positional:
                _, heads, capacity, width = whole.shape
                rows, columns, copied = heads, capacity * width, length * width
            self.device.copy_columns(target.part(0, rows, columns), 0, source.part(0, rows, columns), 0, copied)()
        if self.recurrence is not None:
            self.recurrence.copy(slot, to)

    def snapshot(self, slot: int, place: int) -> None:
        for name, kept in self._snapshots.items():
            self._copy_whole(self._slots(self._cache[name], slot, 1), self._slots(kept, place, 1))

    def restore(self, place: int, slot: int, position: int) -> None:
        assert self.recurrence is not None
        for name, kept in self._snapshots.items():
            self._copy_whole(self._slots(kept, place, 1), self._slots(self._cache[name], slot, 1))
        self.recurrence.assume(slot, position)

    def _copy_whole(self, source: Buffer, target: Buffer) -> None:
        size = source.nbytes // source.itemsize
        self.device.copy_columns(target.part(0, 1, size), 0, source.part(0, 1, size), 0, size)()

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        shared = {} if self._features is None else {PAST_FEATURES: self._features}
        return {name: self.device.read(buffer) for name, buffer in (self._cache | shared).items()}
