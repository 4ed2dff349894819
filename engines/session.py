"""The one place where backends differ: a session runs a step model over a cache that it keeps in place, a sampler one of
the sampler graphs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engines.errors import EngineError

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Tensors = Mapping[str, npt.NDArray[Any]]


class Session(ABC):
    """A step model with its cache, ready to run. `seconds` is what the engine's own runs took."""

    def __init__(self, *, batch: int, capacity: int, max_rows: int, vocab_rows: int, windows: list[int]):
        self.batch = batch
        self.capacity = capacity
        self.max_rows = max_rows
        self.vocab_rows = vocab_rows
        self.seconds = 0.0
        self._windows = windows

    def run(self, input_ids: Int64s, positions: Int64s) -> Floats:
        """One pass: write the keys and values of `input_ids` from `positions` on, and return the logits of every row.

        Args:
            input_ids: int64 [B, S], S at most `max_rows`, ids below `vocab_rows`.
            positions: int64 [B], the index at which each sequence's first row is written.

        Returns:
            float32 [B, S, V]: a view of the session's own buffer, valid until the next run.

        Raises:
            EngineError: the rows would be written past the capacity (engines drop such writes silently), or the
                backend failed.
        """
        batch, rows = input_ids.shape
        end = int(positions.max()) + rows
        if batch != self.batch or rows > self.max_rows or end > self.capacity or int(positions.min()) < 0:
            raise EngineError(
                f"a run of {batch}x{rows} rows up to position {end} does not fit an engine of {self.batch}x{self.max_rows}"
                f" rows and a capacity of {self.capacity}",
                "build the bundle with a larger --capacity or --max-prompt-chunk",
            )
        window = self._windows[bisect_left(self._windows, end)]
        started = time.perf_counter()
        logits = self._run(input_ids, positions, window)
        self.seconds += time.perf_counter() - started
        return logits

    @abstractmethod
    def _run(self, input_ids: Int64s, positions: Int64s, window: int) -> Floats:
        """The pass itself, over the first `window` positions of the cache."""

    def clear(self) -> None:
        """Zero the cache, for what was NaN in one sequence would be NaN in the next: masked values still multiply."""
        for tensor in self.cache().values():
            tensor[...] = 0

    @abstractmethod
    def cache(self) -> dict[str, npt.NDArray[Any]]:
        """The cache tensors by name, [B, Hkv, C, D]; for tests and tools."""


class Sampler(ABC):
    """One of the sampler graphs, ready to run. `seconds` is what its own runs took."""

    seconds = 0.0

    def run(self, inputs: Tensors, outputs: Tensors) -> None:
        """Read `inputs` and fill `outputs`, both by the names of the contract, each a contiguous array of the contract's
        type and shape. Arrays that are used again are cheaper than new ones.

        Raises:
            EngineError: the backend failed.
        """
        started = time.perf_counter()
        self._run(inputs, outputs)
        self.seconds += time.perf_counter() - started

    @abstractmethod
    def _run(self, inputs: Tensors, outputs: Tensors) -> None:
        """The run itself."""
