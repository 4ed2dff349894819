"""ONNX Runtime sessions: every tensor bound once to a buffer of ours, the cache written in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from outrider.engines.contract import INPUT_IDS, KEY_POSITIONS, LOGITS, POSITIONS, cache_tensors, sampler_tensors
from outrider.engines.errors import EngineError
from outrider.engines.manifest import Model
from outrider.engines.session import Floats, Int64s, Sampler, Session, Tensors

CACHE_TYPES = {"fp32": np.float32, "fp16": np.float16}
CPU = "CPUExecutionProvider"
MOST_BINDINGS = 256  # a binding costs more than a small sampler's run, but callers may come with ever new arrays


def thread_count() -> int:
    """Threads for the one pool that all sessions share: `OMP_NUM_THREADS`, or the cores this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Draft and target take turns; with a spinning pool each they fight over the cores. ONNX Runtime makes its environment
# once per process, so this stands at import. From here on it refuses sessions of any owner that ask for a pool of their
# own, so every session of ours starts from `session_options`.
onnxruntime.set_global_thread_pool_sizes(thread_count(), 1)


def session_options() -> Any:
    """Fresh session options on the pool that all sessions share."""
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    return options


class OnnxRuntimeSession(Session):
    """A step model on ONNX Runtime's CPU provider."""

    def __init__(self, path: Path, model: Model, *, batch: int, capacity: int, max_rows: int, windows: list[int]) -> None:
        """Load `path` and lay out its buffers.

        Raises:
            EngineError: ONNX Runtime refuses the graph, or has no kernels for its precision.
        """
        super().__init__(batch=batch, capacity=capacity, max_rows=max_rows, vocab_rows=model.vocab_rows, windows=windows)
        if model.precision not in CACHE_TYPES:
            raise EngineError(
                f"ONNX Runtime has no CPU kernels for {model.precision}",
                "export again with --precision fp32 or --precision fp16",
            )
        self._engine = _load(path)
        self._tensors = cache_tensors(model.layers)
        self._check_contract(path, model)
        dtype = CACHE_TYPES[model.precision]
        try:
            self._allocate(dtype, max_rows)
        except (MemoryError, ValueError, OverflowError) as error:  # numpy's for sizes that no memory has
            raise EngineError(
                f"no memory for a cache of {batch} x {capacity:,} positions", "build with a smaller --capacity or --batch"
            ) from error
        self._bindings: dict[tuple[int, int], Any] = {}  # by (rows, window)

    def _check_contract(self, path: Path, model: Model) -> None:
        """Refuse a graph whose tensors are not those that the manifest says."""
        kind = {"fp32": "tensor(float)", "fp16": "tensor(float16)"}[model.precision]
        want: Want = {
            INPUT_IDS: ("tensor(int64)", (None, None)),
            POSITIONS: ("tensor(int64)", (None,)),
            KEY_POSITIONS: ("tensor(int64)", (None,)),
            LOGITS: ("tensor(float)", (None, None, model.vocab_rows)),
        }
        for tensor in self._tensors:
            shape = (None, tensor.heads, None, tensor.width)
            want[tensor.past] = want[tensor.present] = (kind, shape)
        _check_tensors(path, self._engine, want)

    def _allocate(self, dtype: type, max_rows: int) -> None:
        self._ids = np.zeros(self.batch * max_rows, dtype=np.int64)
        self._positions = np.zeros(self.batch, dtype=np.int64)
        self._key_positions = np.arange(self.capacity, dtype=np.int64)
        self._logits = np.empty(self.batch * max_rows * self.vocab_rows, dtype=np.float32)
        self._cache: dict[str, npt.NDArray[Any]] = {
            tensor.past: np.zeros((self.batch, tensor.heads, self.capacity, tensor.width), dtype=dtype)
            for tensor in self._tensors
        }

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        return self._cache

    def _run(self, input_ids: Int64s, positions: Int64s, window: int) -> Floats:
        rows = input_ids.shape[1]
        if (rows, window) not in self._bindings:
            self._bindings[rows, window] = self._bind(rows, window)
        self._ids[: input_ids.size] = input_ids.reshape(-1)
        self._positions[:] = positions
        _run(self._engine, self._bindings[rows, window])
        return self._logits[: self.batch * rows * self.vocab_rows].reshape(self.batch, rows, self.vocab_rows)

    def _bind(self, rows: int, window: int) -> Any:
        """The binding for one shape. Past and present get the same address, or ONNX Runtime copies the cache."""
        binding = self._engine.io_binding()

        _bind(binding.bind_input, INPUT_IDS, self._ids, (self.batch, rows))
        _bind(binding.bind_input, POSITIONS, self._positions, (self.batch,))
        _bind(binding.bind_input, KEY_POSITIONS, self._key_positions, (window,))
        _bind(binding.bind_output, LOGITS, self._logits, (self.batch, rows, self.vocab_rows))
        for tensor in self._tensors:
            buffer = self._cache[tensor.past]
            _bind(binding.bind_input, tensor.past, buffer, buffer.shape)
            _bind(binding.bind_output, tensor.present, buffer, buffer.shape)
        return binding


class OnnxRuntimeSampler(Sampler):
    """A sampler graph on ONNX Runtime's CPU provider."""

    def __init__(self, path: Path, name: str, vocab_rows: int, draft_rows: int) -> None:
        """Load `path`, one of `contract.SAMPLERS`.

        Raises:
            EngineError: ONNX Runtime refuses the graph, or it is not the one that the contract describes.
        """
        self._engine = _load(path)
        inputs, outputs = sampler_tensors(name, vocab_rows, draft_rows)
        types = {"int64": "tensor(int64)", "float32": "tensor(float)"}
        _check_tensors(path, self._engine, {each.name: (types[each.dtype], _sizes(each.shape)) for each in inputs + outputs})
        self._inputs, self._outputs = ([each.name for each in tensors] for tensors in (inputs, outputs))
        self._bindings: dict[tuple[Any, ...], Any] = {}  # by every tensor's address and shape

    def _run(self, inputs: Tensors, outputs: Tensors) -> None:
        tensors = [*(inputs[name] for name in self._inputs), *(outputs[name] for name in self._outputs)]
        key = tuple((tensor.__array_interface__["data"][0], tensor.shape) for tensor in tensors)
        binding = self._bindings.get(key)
        if binding is None:
            if len(self._bindings) == MOST_BINDINGS:
                self._bindings.clear()
            binding = self._bindings[key] = self._engine.io_binding()
            for name in self._inputs:
                _bind(binding.bind_input, name, inputs[name], inputs[name].shape)
            for name in self._outputs:
                _bind(binding.bind_output, name, outputs[name], outputs[name].shape)
        _run(self._engine, binding)


Want = dict[str, tuple[str, tuple[int | None, ...]]]
"""ONNX Runtime's type and the shape of each tensor; None where the size is free."""


def _load(path: Path) -> Any:
    try:
        return onnxruntime.InferenceSession(str(path), session_options(), providers=[CPU])
    except Exception as error:  # its exceptions share no base but Exception
        raise EngineError(
            f"ONNX Runtime cannot load {path}: {first_line(error)}", "build the bundle again, with this onnxruntime"
        ) from error


def _run(engine: Any, binding: Any) -> None:
    try:
        engine.run_with_iobinding(binding)
    except Exception as error:
        raise EngineError(f"ONNX Runtime failed in a run: {first_line(error)}", "build the bundle again") from error


def _bind(bound: Any, name: str, buffer: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    bound(name, "cpu", 0, buffer.dtype.type, shape, buffer.ctypes.data)


def _sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in shape)


def _check_tensors(path: Path, engine: Any, want: Want) -> None:
    found = {each.name: (each.type, _sizes(each.shape)) for each in (*engine.get_inputs(), *engine.get_outputs())}
    for name in sorted(want.keys() | found.keys()):
        if want.get(name) != found.get(name):
            raise EngineError(
                f"{path} is not the engine that the manifest describes: {name} is {found.get(name)}, not {want.get(name)}",
                "make the bundle again: outrider export, then outrider build-engine",
            )


def first_line(error: Exception) -> str:
    """What a library's exception says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
