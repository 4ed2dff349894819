"""The engines of a bundle for OpenVINO: step models over a paged cache, and samplers in ONNX Runtime.

The blocks of a slot are contiguous, so a slot is one piece of memory. Every pass gives attention the blocks of its slots, and
attention reads only those that hold the sequence's positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from cachetools import LRUCache

from outrider.backends.base import Engines
from outrider.backends.onnxruntime.engine import OnnxRuntimeEngine
from outrider.backends.onnxruntime.pool import create_pool
from outrider.backends.openvino.names import (
    ATTENDED_ROWS,
    ATTENTION_ROWS,
    BLOCK_INDICES,
    BLOCK_INDICES_BEGINS,
    MAX_CONTEXT_LEN,
    NEW_FEATURES,
    PAST_LENS,
    READ_FEATURES,
    SUBSEQUENCE_BEGINS,
)
from outrider.backends.openvino.reader import compiling, failed, shapes, translated
from outrider.backends.tensors import check_tensors, engine_tensors
from outrider.bundle.manifest import Build, Manifest, sampler_file, step_file
from outrider.engines.arrays import Floats, Int64s
from outrider.engines.contract import INPUT_IDS, LOGITS, LOGITS_ROWS, PAST_FEATURES, POSITIONS, ROWS_DIM, sized
from outrider.engines.device import Buffer, Cpu, Engine, Launch, nothing
from outrider.engines.precisions import DTYPES
from outrider.engines.session import Pass, Session
from outrider.engines.sizes import Sizes, check_memory
from outrider.engines.staged_session import FEWEST, boundary_buffers

BLOCK_DIM = 2  # of a cache [blocks, heads, positions of a block, width]

Tensors = dict[str, Any]
"""OpenVINO's tensors, by the name of the input."""


class PagedSession(Session):
    """A model of OpenVINO with a cache in blocks.

    A row has the same bits whatever other rows are in the pass. For this, attention gets a second row beside a sequence's
    single row, and a pass of a single row gets a second row everywhere: the kernels for one row add in another order, and are
    no faster. Only the target needs this. But then passes of one and two rows have the same shape, and preparing for another
    shape takes OpenVINO 20% of the time of a draft's pass.
    """

    skips_logits = True
    recordable = False
    ragged = True

    def __init__(self, compiled: Any, sizes: Sizes):
        """Allocate the cache and the buffers of a pass.

        Args:
            compiled: a model from `compiling`.

        Raises:
            EngineError: there is no memory for the buffers.
        """
        device = Cpu()
        tensors = [each for each in sizes.tensors if each.past != PAST_FEATURES]
        cache_type = compiled.input(tensors[0].past).get_element_type()
        dtype = _dtype(cache_type)
        block = self._block = int(compiled.input(tensors[0].past).get_partial_shape()[BLOCK_DIM].get_length())
        self._blocks = -(-(sizes.capacity + FEWEST - 1) // block)  # of a slot, with room for the second row
        layout = [((sizes.batch * self._blocks, *tensor.sizes(block, 0)), dtype) for tensor in tensors]
        check_memory(device, sizes, layout)
        self._memory = [device.zeros(*each, sizes.cache) for each in layout]  # the memory of the arrays in `_cache`
        self._cache = {tensor.past: buffer.view() for tensor, buffer in zip(tensors, self._memory, strict=True)}
        super().__init__(device, sizes)
        self._sizes = sizes
        self._types = {name: port.get_element_type() for port in (*compiled.inputs, *compiled.outputs) for name in port.names}
        self._passed = [] if sizes.stage is None else [*sizes.stage.takes, *sizes.stage.gives]
        with translated("cannot bind the cache"):
            self._request = compiled.create_infer_request()
            self._features: npt.NDArray[Any] | None = None  # [B, C, H]
            if sizes.features is not None:
                self._feature_type = compiled.output(NEW_FEATURES).get_element_type()  # a bf16 model's cache may have another
                self._feature_dtype = DTYPES[_dtype(self._feature_type)]
                self._features = np.zeros((sizes.batch, sizes.capacity, sizes.features), self._feature_dtype.numpy)
            for name, array in self._cache.items():
                self._request.set_tensor(name, _typed(array, cache_type))

    def pack(self) -> None:
        """Run a pass of one row, in which kernels copy all weights into their own layout, and clear the cache again.

        Raises:
            EngineError: OpenVINO failed, or there is no memory.
        """
        ids, positions, features = (self.device.zeros(shape, "int64", "a pass") for shape in ((1, 1), (1,), (1,)))
        logits = self.device.zeros((1, 1, self.vocab_rows), "float32", "a pass")
        passed = boundary_buffers(self.device, self._passed, self._sizes)
        read = features if self.reads_features else None
        self.bind(Pass(ids, positions, logits, self.windows[0], feature_positions=read, boundary=passed))()
        self.clear(0)

    def share_features(self, target: Session) -> None:
        target = target.with_features
        assert isinstance(target, PagedSession)
        self._features = target._features
        self._passes.clear()

    def set_features(self, features: Floats) -> None:
        assert self._features is not None
        self._features[:, : features.shape[1]] = self._feature_dtype.encode(features)

    def bind(self, buffers: Pass) -> Launch:
        sequences, rows = buffers.input_ids.shape
        if buffers.drafted is None:
            return self._bound(buffers, [rows] * sequences)
        drafted = buffers.drafted.view()
        bound: LRUCache[tuple[int, ...], Launch] = LRUCache(16)  # few: with features, each takes memory

        def launch() -> None:
            key = tuple(drafted.tolist())
            if (ready := bound.get(key)) is None:
                ready = bound[key] = self._bound(buffers, [count + 1 for count in key])
            ready()

        return launch

    def _bound(self, buffers: Pass, counts: Sequence[int]) -> Launch:
        """Prepare a pass over the first rows of each sequence, as many as `counts` says."""
        first, feature_positions, starts = buffers.first, buffers.feature_positions, buffers.positions.view()
        rows, answered = buffers.input_ids.shape[1], buffers.logits.shape[1]
        given, output = buffers.input_ids.view().reshape(-1), buffers.logits.view().reshape(-1, 1, self.vocab_rows)
        sequence, row = _rows(counts)
        sources, unanswered = sequence * rows + row, rows - answered
        ids = np.zeros((max(len(row), FEWEST), 1), np.int64)
        tensors, update = self._inputs([FEWEST] if len(row) < FEWEST else counts, starts, first)
        for each in self._passed:
            sizes = len(ids), *sized(each.shape[1:], {ROWS_DIM: 1})
            tensors[each.name] = _typed(buffers.boundary[each.name].part(0, *sizes).view(), self._types[each.name])
        tensors[INPUT_IDS] = _tensor(ids)
        wanted = np.flatnonzero(row >= unanswered)
        places = sequence[wanted] * answered + row[wanted] - unanswered
        moves = [(to, at) for at, to in enumerate(places.tolist()) if to != at][::-1]  # to higher places, the last one first
        single = 0 < wanted.size < FEWEST
        computed = np.empty((FEWEST, 1, self.vocab_rows), np.float32) if single else output[: wanted.size]
        tensors[LOGITS_ROWS] = _tensor(np.repeat(wanted, FEWEST) if single else wanted)
        tensors[LOGITS] = _tensor(computed)
        request = self._request
        tensors = {name: tensor for name, tensor in tensors.items() if name in self._types}
        before, after = self._feature_copies(tensors, counts, starts, first, feature_positions)

        def launch() -> None:
            assert buffers  # keeps their memory alive for as long as the launch
            update()
            ids[: len(row), 0] = given[sources]
            before()
            try:
                for name, tensor in tensors.items():
                    request.set_tensor(name, tensor)  # an input or an output
                request.infer(share_outputs=True)  # or it would copy the logits again
            except (RuntimeError, MemoryError) as error:  # without a context manager, which costs microseconds
                raise failed(error, "failed in a pass") from error
            if single:
                output[:1] = computed[:1]
            for to, at in moves:
                output[to] = output[at]
            after()

        return launch

    def _feature_copies(
        self, tensors: Tensors, counts: Sequence[int], starts: Int64s, first: int, to: Buffer | None
    ) -> tuple[Launch, Launch]:
        """Add the tensors of features to `tensors`, and return launches that load and store features around a pass.

        The target stores the features of all its rows. A draft head stores each sequence's last feature at the entry `to`.
        """
        kept = self._features
        if kept is None:
            return nothing, nothing
        sequence, row = _rows(counts)
        slots, total, width = first + sequence, max(len(row), FEWEST), kept.shape[2]
        made = np.empty((total, 1, 1, width), kept.dtype)
        by_row = made[: len(row), 0, 0]
        tensors[NEW_FEATURES] = _typed(made, self._feature_type)
        if to is None:

            def store() -> None:
                kept[slots, starts[sequence] + row] = by_row

            return nothing, store
        read, places = np.zeros((total, 1, width), kept.dtype), to.view()
        tensors[READ_FEATURES] = _typed(read, self._feature_type)
        last = np.cumsum(counts) - 1

        def load() -> None:
            read[: len(row), 0] = kept[slots, starts[sequence] + row]

        def store_last() -> None:
            kept[slots[last], places] = by_row[last]

        return load, store_last

    def _inputs(self, counts: Sequence[int], starts: Int64s, first: int) -> tuple[Tensors, Callable[[], None]]:
        """Return the other inputs of a pass, except the rows of logits, and a function that updates them from `starts` [N]."""
        sequence, row = _rows(counts)
        own = np.array(counts)
        sequences, attended = len(own), np.maximum(own, FEWEST)  # rows of attention for each sequence
        begins, each = np.zeros(sequences + 1, np.int32), np.arange(sequences + 1, dtype=np.int32)
        begins[1:] = attended.cumsum()
        placed, past, longest = np.zeros(len(row), np.int64), np.zeros(sequences, np.int32), np.zeros((), np.int32)
        inputs: dict[str, npt.NDArray[Any]] = {
            POSITIONS: placed,
            PAST_LENS: past,
            MAX_CONTEXT_LEN: longest,
            SUBSEQUENCE_BEGINS: begins,
            BLOCK_INDICES: np.arange(first * self._blocks, (first + sequences) * self._blocks, dtype=np.int32),
            BLOCK_INDICES_BEGINS: each * self._blocks,
            ATTENTION_ROWS: np.repeat(np.arange(len(row)), (attended // own)[sequence]),
            ATTENDED_ROWS: begins[sequence] + row,
        }

        def update() -> None:
            np.add(starts[sequence], row, out=placed)
            past[:] = starts
            longest[...] = (starts + attended).max()

        return {name: _tensor(array) for name, array in inputs.items()}, update

    def _slot(self, cache: npt.NDArray[Any], slot: int) -> npt.NDArray[Any]:
        return cache[slot * self._blocks : (slot + 1) * self._blocks]

    def clear(self, slot: int) -> None:
        for cache in self._cache.values():
            self._slot(cache, slot)[:] = 0
        if self._features is not None and not self.reads_features:
            self._features[slot] = 0

    def copy(self, slot: int, to: int, length: int) -> None:
        blocks, rest = divmod(length, self._block)
        for cache in self._cache.values():
            source, target = self._slot(cache, slot), self._slot(cache, to)
            target[:blocks] = source[:blocks]
            target[blocks : blocks + 1, :, :rest] = source[blocks : blocks + 1, :, :rest]  # entries beyond may contain NaN
        if self._features is not None and not self.reads_features:
            self._features[to, :length] = self._features[slot, :length]

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        caches = {name: self._contiguous(array) for name, array in self._cache.items()}
        return caches if self._features is None else caches | {PAST_FEATURES: self._features[:, None]}

    def _contiguous(self, cache: npt.NDArray[Any]) -> npt.NDArray[Any]:
        _, heads, block, width = cache.shape
        by_slot = cache.reshape(self.batch, self._blocks, heads, block, width).transpose(0, 2, 1, 3, 4)
        return by_slot.reshape(self.batch, heads, -1, width)[:, :, : self.capacity]


class OpenVinoEngines(Engines):
    """A bundle's models, compiled for a processor of this machine. Everything is bound to host memory."""

    def __init__(self, folder: Path, manifest: Manifest, build: Build, processor: str, rounds: bool = True):
        """Prepare to load.

        Args:
            processor: "cpu", "gpu" or "npu".
            rounds: whether products with quantized weights may round activations, which makes them fast.
        """
        super().__init__(folder, manifest, build, Cpu())
        # A second spinning pool would slow OpenVINO down by 40%. One thread costs samplers 0.25 ms at a vocabulary of 151,936.
        create_pool(threads=1, shared=not build.separates_pools)
        self._processor, self._rounds = processor, rounds

    def unrounded(self) -> Engines:
        return OpenVinoEngines(self.folder, self.manifest, self.build, self._processor, rounds=False)

    def model(self, role: str, sizes: Sizes) -> Session:
        model = self.manifest.models[role]
        group = model.quantization.block if model.quantization is not None and self._rounds else 0
        path, stage = self.folder / step_file(role, sizes.stage), sizes.stage
        with compiling(path, self._processor, model.precision, group, self.build.threads(stage)) as compiled:
            kept = {each.past: (each.shape[0], each.shape[-1]) for each in sizes.tensors}
            expected: dict[str, object] = {name: shape for name, shape in kept.items() if name != PAST_FEATURES}
            passed = [] if stage is None else [*stage.takes, *stage.gives]
            expected |= {each.name: (DTYPES[each.dtype].openvino, *each.shape[2:]) for each in passed}
            if stage is None or not stage.gives:
                expected[LOGITS] = (model.vocab_rows,)
            check_tensors(path, shapes(compiled), expected)
            session = PagedSession(compiled, sizes)
            session.pack()
        return session

    def sampler(self, name: str) -> Engine:
        """Return a sampler in ONNX Runtime, whose TopK and ArgMax take a quarter of OpenVINO's time."""
        inputs, outputs = engine_tensors(self.manifest, name)
        return OnnxRuntimeEngine(self.folder / sampler_file(name), [*inputs, *outputs], self.device, threads=1)


def _rows(counts: Sequence[int]) -> tuple[Int64s, Int64s]:
    """Return for each row of a pass its sequence, and its place in the sequence, given the sequences' numbers of rows."""
    return np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(count) for count in counts])


def _dtype(kind: Any) -> str:
    """Return OpenVINO's element type as a key of `DTYPES`."""
    return next(name for name, each in DTYPES.items() if each.openvino == kind.to_string())


def _typed(array: npt.NDArray[Any], kind: Any) -> Any:
    """Return an array as a tensor of an element type over the same memory; NumPy has no bfloat16."""
    return ov.Tensor(array, ov.Shape(array.shape), kind)


def _tensor(array: npt.NDArray[Any]) -> Any:
    """Return an array as a tensor over the same memory."""
    return ov.Tensor(array, shared_memory=True)
