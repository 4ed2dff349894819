"""A session for engines that run over bound buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engines.arrays import Floats
from outrider.engines.contract import (
    BATCH_DIM,
    BLOCK_STATE,
    COMMITTED,
    FEATURE_POSITIONS,
    INPUT_IDS,
    KEY_POSITIONS,
    LOGITS,
    PAST_FEATURES,
    PENDING,
    POSITIONS,
    ROWS_DIM,
    sized,
)
from outrider.engines.device import Buffer, Device, Engine, Launch, in_sequence
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.engines.session import SNAPSHOTS, Pass, Session
from outrider.engines.sizes import Sizes, check_memory
from outrider.errors import EngineError


class GraphSession(Session):
    """A session of an engine that runs over bound buffers, with a slot of the cache [Hkv, C, D] for each sequence."""

    def __init__(self, device: Device, engine: Engine, precision: str, sizes: Sizes):
        """Allocate the cache and the buffers of a pass.

        Args:
            precision: key of `PRECISIONS`.

        Raises:
            EngineError: the device has no memory for the buffers, or cannot align the slots of the cache.
        """
        self._tensors = sizes.tensors
        dtype, slots = PRECISIONS[precision].dtype, sizes.capacity + engine.spare_slots
        layout = {
            tensor.past: ((sizes.batch, *tensor.sizes(slots, sizes.recent)), tensor.dtype or dtype) for tensor in self._tensors
        }
        check_memory(device, sizes, layout.values())
        # The cache comes first: if memory runs out, its size is the most likely reason.
        self._cache = {name: device.zeros(*each, sizes.cache) for name, each in layout.items()}
        self._positional = {tensor.past for tensor in self._tensors if tensor.positional}
        states = {name: whole for name, whole in self._cache.items() if name not in self._positional}
        self._snapshots = {
            name: device.zeros((SNAPSHOTS * sizes.batch, *whole.shape[1:]), whole.dtype, "snapshots of recurrent states")
            for name, whole in states.items()
        }
        self._outputs = {  # of states, for engines that may not overwrite their inputs
            name: device.zeros(whole.shape, whole.dtype, sizes.cache) for name, whole in states.items() if not engine.overwrites
        }
        self._features = self._cache.get(PAST_FEATURES)
        if sizes.reads_features:
            self._cache.pop(PAST_FEATURES)  # the target's session clears and copies them
        super().__init__(device, sizes)
        self._boundary = [] if sizes.stage is None else [*sizes.stage.takes, *sizes.stage.gives]
        self._block_state: Buffer | None = None
        if sizes.block_state is not None:
            shape = sizes.batch * sizes.max_rows, sizes.block_state
            self._block_state = device.zeros(shape, "float32", "the state of a block head")
        self.engine = engine
        self.skips_logits = engine.skips_logits
        self.recordable = engine.recordable and not sizes.recurrent  # a round that is run again would commit its rows twice
        self._fewest_rows = 1  # of a pass
        self._pair: tuple[Buffer, Buffer] | None = None  # tokens and logits of a single row and its companion
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
                else "build the bundle again with --batch 1: the size of a recurrent state does not depend on the capacity",
            )

    def pair_lone_rows(self) -> None:
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
        names = {BATCH_DIM: count, ROWS_DIM: rows}
        tensors |= {each.name: buffers.boundary[each.name].part(0, *sized(each.shape, names)) for each in self._boundary}
        copies: list[Launch] = []
        for tensor in self._tensors:  # past and present are the same memory, or the engine would copy the cache
            whole = self._features if tensor.past == PAST_FEATURES else self._cache[tensor.past]
            assert whole is not None
            past = tensors[tensor.past] = tensors[tensor.present] = self._slots(whole, buffers.first, count)
            if tensor.past in self._outputs:
                tensors[tensor.present] = self._slots(self._outputs[tensor.past], buffers.first, count)
                copies.append(self._copying(past, tensors[tensor.present]))
        return in_sequence([self.engine.bind(tensors), *copies])

    def _paired(self, buffers: Pass) -> Launch:
        """Prepare a pass of one row with a companion behind it, whose cache entry is overwritten or lies in a spare slot."""
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
        """Return the last pass's output for the heads of a block head, float32 [count, rows, A]."""
        assert self._block_state is not None
        return self._block_state.part(0, count, rows, self._block_state.shape[1])

    def share_features(self, target: Session) -> None:
        target = target.with_features
        assert isinstance(target, GraphSession)
        self._features = target._cache[PAST_FEATURES]
        self.unbind()

    def set_features(self, features: Floats) -> None:
        assert self._features is not None
        kind = DTYPES[self._features.dtype]
        whole = np.zeros(self._features.shape, kind.numpy)
        whole[:, 0, : features.shape[1]] = kind.encode(features)
        self.device.write(self._features, whole)

    def _slots(self, cache: Buffer, first: int, count: int = 1) -> Buffer:
        shape = cache.shape[1:]
        return cache.part(first * math.prod(shape), count, *shape)

    def _copying(self, target: Buffer, source: Buffer) -> Launch:
        """Prepare a copy of a whole tensor."""
        size = math.prod(source.shape)
        return self.device.copy_columns(target.part(0, 1, size), 0, source.part(0, 1, size), 0, size)

    def clear(self, slot: int) -> None:
        self._zero(slot, self._cache.values())

    def restart(self, slot: int) -> None:
        self._zero(slot, [whole for name, whole in self._cache.items() if name not in self._positional])

    def _zero(self, slot: int, tensors: Iterable[Buffer]) -> None:
        for whole in tensors:
            buffer = self._slots(whole, slot)
            self.device.write(buffer, np.zeros(buffer.shape, DTYPES[buffer.dtype].numpy))
        if self.recurrence is not None:
            self.recurrence.assume(slot, 0)

    def copy(self, slot: int, to: int, length: int) -> None:
        for name, whole in self._cache.items():
            target, source = self._slots(whole, to), self._slots(whole, slot)
            if name not in self._positional:
                self._copying(target, source)()
                continue
            _, heads, capacity, width = whole.shape
            target, source = (each.part(0, heads, capacity * width) for each in (target, source))
            self.device.copy_columns(target, 0, source, 0, length * width)()
        if self.recurrence is not None:
            self.recurrence.copy(slot, to)

    def snapshot(self, slot: int, place: int) -> None:
        for name, kept in self._snapshots.items():
            self._copying(self._slots(kept, place), self._slots(self._cache[name], slot))()

    def restore(self, place: int, slot: int, position: int) -> None:
        assert self.recurrence is not None
        for name, kept in self._snapshots.items():
            self._copying(self._slots(self._cache[name], slot), self._slots(kept, place))()
        self.recurrence.assume(slot, position)

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        shared = {} if self._features is None else {PAST_FEATURES: self._features}
        return {name: self.device.read(buffer) for name, buffer in (self._cache | shared).items()}
