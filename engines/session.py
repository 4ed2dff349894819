"""A step model with its key/value cache: the interface, and the parts that all backends share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
from cachetools import LRUCache

from outrider.engines.arrays import Floats, Int64s
from outrider.engines.contract import COMMITTED, FEATURE_POSITIONS, INPUT_IDS, PENDING, POSITIONS
from outrider.engines.device import Arena, Buffer, Device, Launch
from outrider.engines.recurrence import Recurrence
from outrider.engines.sizes import Sizes
from outrider.errors import EngineError

SNAPSHOTS = 2  # of recurrent states, per sequence
MAX_BOUND = 256  # passes that a session keeps bound: a prompt's last chunk may have any length, in any slot and window


@dataclass(frozen=True, slots=True)
class Pass:
    """The buffers of a pass of N sequences with S rows each."""

    input_ids: Buffer
    """int64 [N, S], ids below `vocab_rows`"""
    positions: Buffer
    """int64 [N], the index at which each sequence's first row is written"""
    logits: Buffer
    """float32 [N, S, V], filled for every row; or [N, R, V] for the last R rows, if the session `skips_logits`"""
    window: int
    """the result of `Session.window`"""
    first: int = 0
    """the slot of the first sequence; the others follow it"""
    feature_positions: Buffer | None = None
    """int64 [N], for a draft head: where each sequence's last row writes its output"""
    commits: tuple[Buffer, Buffer] | None = None
    """`pending` and `committed` of a model with recurrent layers, int64 [N], which `Session.advance` writes"""
    boundary: Mapping[str, Buffer] = field(default_factory=dict)
    """for a stage: memory of what stages give each other, by name, for the largest pass"""
    drafted: Buffer | None = None
    """int64 [N], the rows after its first one that each sequence needs; may change between runs, see `Session.ragged`"""


class Session(ABC):
    """A step model for `batch` sequences, and the cache that it writes in place. `seconds` is the time spent in `write`.

    Engines silently drop writes beyond the cache's capacity, so a session checks every pass before it runs.
    """

    skips_logits: bool  # whether it can compute the logits of only the last rows, as many as their buffer holds
    recordable: bool  # whether the device may record its launches
    overlaps: bool = False  # whether a pass begins in other processes, where the next one may begin before this one has ended
    ragged: bool = False  # whether it runs only the rows that `Pass.drafted` asks for; the logits of others are undefined then

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
        """The entry of the features that no pass reads: a text that reaches it is full, and nothing is drafted after it."""
        return self.capacity - 1

    def unbind(self) -> None:
        """Forget the passes that are bound to host arrays. Each is bound again when it is needed."""
        self._passes.clear()

    @abstractmethod
    def bind(self, buffers: Pass) -> Launch:
        """Prepare a pass over the caller's buffers."""

    def bind_parts(self, buffers: Pass) -> Sequence[Launch]:
        """Prepare a pass as one launch or, if it `overlaps`, as two: the first begins it elsewhere, and the second waits for
        that and runs the rest. The second parts of several passes run in the order of their first ones."""
        return [self.bind(buffers)]

    def pair_lone_rows(self) -> None:  # noqa: B027
        """From now on, run a second row with every single row. Sessions that always do so need nothing."""

    def advance(
        self, first: int, positions: Int64s, rows: int, certain: Sequence[int], pending: Int64s, committed: Int64s
    ) -> None:
        """Update the recurrent state's bookkeeping for a pass, which the caller must run next.

        Args:
            first: the slot of the first sequence.
            positions: where each sequence's rows begin.
            rows: rows of the pass.
            certain: confirmed rows of each sequence; 0 for a sequence that takes no part.
            pending, committed: outputs, int64 [N] on the host.

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
        """Return how many of the first `length` tokens in a slot's cache another text can reuse."""
        return length if self.recurrence is None else self.recurrence.usable(slot, length)

    def assume(self, positions: Int64s, first: int = 0) -> None:
        """Treat the recurrent states of the slots from `first` on as those before `positions`, whatever they contain.

        For measurements and comparisons.
        """
        if self.recurrence is not None:
            for slot, position in enumerate(positions, first):
                self.recurrence.assume(slot, int(position))

    @property
    def with_features(self) -> Session:
        """The session that has a target's features: this one, or the last of its stages."""
        return self

    def share_features(self, target: Session) -> None:
        """Let a draft head read the features that `target` writes. Without this call, it reads zeros."""
        raise NotImplementedError

    def set_features(self, features: Floats) -> None:
        """Replace a draft head's features by float32 [B, C, H]; for comparisons."""
        raise NotImplementedError

    def check(self) -> None:  # noqa: B027
        """Find out, without waiting, whether what runs in other processes has failed since the last pass.

        Raises:
            StageError: it has.
        """

    def reopen(self) -> None:  # noqa: B027
        """Replace what runs in other processes, after a `StageError`. Its caches are empty then.

        Raises:
            EngineError: it cannot be replaced now.
        """

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Zero a slot's cache. Masked values are still multiplied (by zero), so NaN of one sequence would reach the next."""

    def restart(self, slot: int) -> None:
        """Zero a slot's recurrent states for another text. The new text overwrites the keys and values as it grows."""
        self.clear(slot)

    @abstractmethod
    def copy(self, slot: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a slot's cache, and its recurrent states, into the slot `to`."""

    def snapshot(self, slot: int, place: int) -> None:  # noqa: B027
        """Copy the recurrent states of a slot to one of the `places`."""

    def restore(self, place: int, slot: int, position: int) -> None:  # noqa: B027
        """Copy the states at a place back to a slot. They are the states after `position` tokens."""

    @abstractmethod
    def cache(self) -> dict[str, npt.NDArray[Any]]:
        """Return the cache tensors by name, [B, ...] as in `contract.cache_tensors`; for tests and tools."""

    def window(self, rows: int, first: int, last: int) -> int:
        """Return the window for a pass of `rows` rows whose sequences begin at positions from `first` to `last`.

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
        """Return memory for the logits of `rows` rows. It is large, so it grows only when a pass from host arrays needs it."""
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
        """Copy `input_ids` [N, S] and `positions` [N] to where a pass reads them, and return the pass, which does not wait.

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
        """Run one pass from host arrays: write the keys and values of `input_ids` [N, S], starting at `positions` [N].

        Args:
            first: the slot of the first sequence; the others follow it.
            logits: whether to compute the logits; without it, engines skip them if they can.
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
