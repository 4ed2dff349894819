"""The engines of a bundle for OpenVINO: step models over a paged cache, and samplers in ONNX Runtime.

The blocks of a slot are contiguous, so a slot is one piece of memory. Every pass gives attention the blocks of its slots, and
attention reads only those that hold the sequence's positions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from outrider.backends.base import Engines
from outrider.backends.onnxruntime.engine import OnnxRuntimeEngine, create_pool
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
from outrider.engines.arrays import Floats
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
        block = int(compiled.input(tensors[0].past).get_partial_shape()[BLOCK_DIM].get_length())
        self._blocks = -(-(sizes.capacity + FEWEST - 1) // block)  # of a slot, with room for the second row
        self._block = block
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
                self._feature_type = compiled.output(
                    NEW_FEATURES
                ).get_element_type()  # a bf16 model's cache may have another type
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
        self.bind(
            Pass(ids, positions, logits, self.windows[0], 0, features if self.reads_features else None, boundary=passed)
        )()
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
        first, logits, feature_positions = buffers.first, buffers.logits, buffers.feature_positions
        sequences, rows = buffers.input_ids.shape
        answered = logits.shape[1]
        alone = sequences * rows < FEWEST
        ids, starts = buffers.input_ids.view().reshape(-1, 1), buffers.positions.view()
        output = logits.view().reshape(sequences * answered, 1, self.vocab_rows)
        tensors, update = self._inputs(sequences, FEWEST if alone else rows, starts, first)
        total = max(sequences * rows, FEWEST)
        for each in self._passed:
            sizes = total, *sized(each.shape[1:], {ROWS_DIM: 1})
            tensors[each.name] = _typed(buffers.boundary[each.name].part(0, *sizes).view(), self._types[each.name])
        if alone:
            given, ids = ids, np.zeros((FEWEST, 1), np.int64)
        tensors[INPUT_IDS] = _tensor(ids)
        wanted = (np.arange(sequences)[:, None] * rows + np.arange(rows - answered, rows)).reshape(-1)
        single = 0 < wanted.size < FEWEST
        computed = np.empty((FEWEST, 1, self.vocab_rows), np.float32) if single else output
        tensors[LOGITS_ROWS] = _tensor(np.repeat(wanted, FEWEST) if single else wanted)
        tensors[LOGITS] = _tensor(computed)
        request = self._request
        tensors = {name: tensor for name, tensor in tensors.items() if name in self._types}
        before, after = self._feature_copies(tensors, sequences, rows, starts, first, feature_positions)

        def launch() -> None:
            assert buffers  # keeps their memory alive for as long as the launch
            update()
            if alone:
                ids[:] = given
            before()
            try:
                for name, tensor in tensors.items():
                    request.set_tensor(name, tensor)  # an input or an output
                request.infer(share_outputs=True)  # or it would copy the logits again
            except (RuntimeError, MemoryError) as error:  # without a context manager, which costs microseconds
                raise failed(error, "failed in a pass") from error
            if single:
                output[:] = computed[:1]
            after()

        return launch

    def _feature_copies(
        self, tensors: Tensors, sequences: int, rows: int, starts: npt.NDArray[np.int64], first: int, to: Buffer | None
    ) -> tuple[Launch, Launch]:
        """Add the tensors of features to `tensors`, and return launches that load and store features around a pass.

        The target stores the features of all its rows. A draft head stores each sequence's last feature at the entry `to`.
        """
        kept = self._features
        if kept is None:
            return nothing, nothing
        slots, counts = np.arange(first, first + sequences), np.arange(rows)
        total, width = max(sequences * rows, FEWEST), kept.shape[2]
        made = np.empty((total, 1, 1, width), kept.dtype)
        by_row = made[: sequences * rows].reshape(sequences, rows, width)
        tensors[NEW_FEATURES] = _typed(made, self._feature_type)

        if to is None:

            def store() -> None:
                kept[slots[:, None], starts[:, None] + counts] = by_row

            return nothing, store
        read, places = np.zeros((total, 1, width), kept.dtype), to.view()
        tensors[READ_FEATURES] = _typed(read, self._feature_type)

        def load() -> None:
            read[: sequences * rows, 0] = kept[slots[:, None], starts[:, None] + counts].reshape(-1, width)

        def store_last() -> None:
            kept[slots, places] = by_row[:, -1]

        return load, store_last

    def _inputs(
        self, sequences: int, rows: int, starts: npt.NDArray[np.int64], first: int
    ) -> tuple[Tensors, Callable[[], None]]:
        """Return the other inputs of a pass, except the rows of logits, and a function that updates them from `starts` [N]."""
        attended = max(rows, FEWEST)  # rows of attention for each sequence
        counts, placed = np.arange(rows), np.zeros((sequences, rows), np.int64)
        past, longest = np.zeros(sequences, np.int32), np.zeros((), np.int32)
        sequence = np.arange(sequences + 1, dtype=np.int32)
        inputs: dict[str, npt.NDArray[Any]] = {
            POSITIONS: placed.reshape(-1),
            PAST_LENS: past,
            MAX_CONTEXT_LEN: longest,
            SUBSEQUENCE_BEGINS: sequence * attended,
            BLOCK_INDICES: np.arange(first * self._blocks, (first + sequences) * self._blocks, dtype=np.int32),
            BLOCK_INDICES_BEGINS: sequence * self._blocks,
            ATTENTION_ROWS: np.repeat(np.arange(sequences * rows), attended // rows),
            ATTENDED_ROWS: (sequence[:-1, None] * attended + counts).reshape(-1),
        }

        def update() -> None:
            np.add(starts[:, None], counts, out=placed)
            past[:] = starts
            longest[...] = starts.max() + attended

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
        # ONNX Runtime gets one thread. A second spinning pool would slow OpenVINO down by 40%; with one thread, samplers take a
        # quarter of a millisecond longer at a vocabulary of 151,936.
        create_pool(threads=1)
        self._processor, self._rounds = processor, rounds

    def unrounded(self) -> Engines:
        return OpenVinoEngines(self.folder, self.manifest, self.build, self._processor, rounds=False)

    def model(self, role: str, sizes: Sizes) -> Session:
        model = self.manifest.models[role]
        group = model.quantization.block if model.quantization is not None and self._rounds else 0
        path, stage = self.folder / step_file(role, sizes.stage), sizes.stage
        with compiling(path, self._processor, model.precision, group) as compiled:
            cached = [each for each in sizes.tensors if each.past != PAST_FEATURES]
            expected: dict[str, object] = {each.past: (each.shape[0], each.shape[-1]) for each in cached}
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
        return OnnxRuntimeEngine(self.folder / sampler_file(name), [*inputs, *outputs], self.device)


def _dtype(kind: Any) -> str:
    """Return OpenVINO's element type as a key of `DTYPES`."""
    return next(name for name, each in DTYPES.items() if each.openvino == kind.to_string())


def _typed(array: npt.NDArray[Any], kind: Any) -> Any:
    """Return an array as a tensor of an element type over the same memory; NumPy has no bfloat16."""
    return ov.Tensor(array, ov.Shape(array.shape), kind)


def _tensor(array: npt.NDArray[Any]) -> Any:
    """Return an array as a tensor over the same memory."""
    return ov.Tensor(array, shared_memory=True)
