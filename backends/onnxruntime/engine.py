"""ONNX Runtime engines, on the CPU or on CUDA: every run binds tensors to buffers of ours."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from outrider.bundle.manifest import Model, model_file, sampler_file
from outrider.engines.contract import (
    INPUT_IDS,
    KEY_POSITIONS,
    LOGITS,
    LOGITS_ROWS,
    POSITIONS,
    cache_tensors,
    sampler_tensors,
)
from outrider.engines.device import DTYPES, Buffer, Cpu, Device, Engine, Launch, host_buffer
from outrider.engines.session import CACHE_TYPES, Engines
from outrider.errors import EngineError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
UNUSED_POSITIONS = 2  # rows that attention without a sequence is given, at most
BFLOAT16 = 16  # its number in ONNX; NumPy has no such type
TYPES = {"int64": "tensor(int64)", "float32": "tensor(float)", "float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}


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


def optimize(path: Path, output: Path) -> None:
    """Save the graph at `path` as ONNX Runtime would run it, so that loading need not optimize it again; the weights lie
    beside `output` and are mapped into memory from there.

    Raises:
        EngineError: it refuses the graph.
    """
    options = session_options()
    options.optimized_model_filepath = str(output)
    options.log_severity_level = 3  # it warns that such a graph is for machines like this one, which is so of convolutions
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", output.name + ".data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.disable_prepacking", "1")  # not needed to save it, and twice the memory
    try:
        onnxruntime.InferenceSession(str(path), options, providers=[CPU])
    except Exception as error:
        raise _failed(error, f"cannot load {path}", "build the bundle again, with this onnxruntime") from error


class OnnxRuntime(Engines):
    """The exported graphs, as ONNX Runtime loads them."""

    def step_model(self, role: str) -> Engine:
        model = self.manifest.models[role]
        if model.precision == "bf16" and isinstance(self.device, Cpu):
            raise EngineError(
                "ONNX Runtime has no CPU kernels for bf16",
                "export again with --precision fp32 or --precision fp16, or give --device cuda",
            )
        return OnnxRuntimeEngine(self.folder / model_file(role), _step_tensors(model), self.device, self.build.batch)

    def sampler(self, name: str) -> Engine:
        return OnnxRuntimeEngine(self.folder / sampler_file(name), sampler_types(name, *self.manifest.widths), self.device)


Want = dict[str, tuple[str, tuple[int | None, ...]]]
"""ONNX Runtime's type and the shape of each tensor; None where the size is free."""


def _step_tensors(model: Model) -> Want:
    kind = TYPES[CACHE_TYPES[model.precision]]
    want: Want = {
        INPUT_IDS: ("tensor(int64)", (None, None)),
        POSITIONS: ("tensor(int64)", (None,)),
        KEY_POSITIONS: ("tensor(int64)", (None,)),
        LOGITS: ("tensor(float)", (None, None, model.vocab_rows)),
    }
    for tensor in cache_tensors(model.layers):
        want[tensor.past] = want[tensor.present] = (kind, (None, tensor.heads, None, tensor.width))
    return want


def sampler_types(name: str, vocab_rows: int, draft_rows: int) -> Want:
    """What the graph of a sampler must have."""
    inputs, outputs = sampler_tensors(name, vocab_rows, draft_rows)
    return {each.name: (TYPES[each.dtype], _sizes(each.shape)) for each in inputs + outputs}


class OnnxRuntimeEngine(Engine):
    """One graph."""

    spare_slots = 1  # fused attention may write a row of padding there

    def __init__(self, path: Path, want: Want, device: Device, batch: int = 1):
        """Load `path`, a graph for up to `batch` sequences.

        Raises:
            EngineError: ONNX Runtime refuses the graph, or its tensors are not those that are wanted.
        """
        providers: list[Any] = [CPU]
        self._options: Any = None  # ONNX Runtime takes its time to look into empty ones
        if not isinstance(device, Cpu):
            _preload()
            # Its work goes onto our stream, in order with all else, and we wait for it once a round. Recording it there is
            # not safe: it copies from host memory of its own, whose address a recorded copy keeps after it is freed.
            self.recordable = False
            self.spare_slots = 0  # nor is its attention fused
            providers.insert(0, (CUDA, {"user_compute_stream": str(device.stream), "use_tf32": "0"}))
            self._options = onnxruntime.RunOptions()
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        try:
            self._session = onnxruntime.InferenceSession(str(path), session_options(), providers=providers)
        except Exception as error:
            raise _failed(error, f"cannot load {path}", "build the bundle again, with this onnxruntime") from error
        if self._session.get_providers()[0] != (providers[0] if len(providers) == 1 else CUDA):
            raise EngineError(
                "this ONNX Runtime does not start CUDA: it is the package without, or CUDA's or cuDNN's libraries are missing",
                "pip uninstall onnxruntime, then pip install 'outrider[cuda]'",
            )
        found = {each.name: (each.type, _sizes(each.shape)) for each in self._inputs_and_outputs()}
        self.skips_logits = LOGITS in want and LOGITS_ROWS in found
        if self.skips_logits:
            want = want | {LOGITS_ROWS: ("tensor(int64)", (1,))}
        caches = [name for name in want if name.startswith(("past_", "present_"))]
        # Fused attention for several sequences has tensors of its own for each; see `builder.fusion.fuse`.
        self._slots: dict[str, list[str]] = {}
        if any(f"{name}.1" in found for name in caches):
            self._slots = {name: [name, *(f"{name}.{slot}" for slot in range(1, batch))] for name in caches}
            want = want | {each: want[name] for name, each_of in self._slots.items() for each in each_of}
            self._unused: dict[str, Buffer] = {}  # of a slot that a pass has no sequence for
        for name in sorted(want.keys() | found.keys()):
            if want.get(name) != found.get(name):
                raise EngineError(
                    f"{path} is not the engine that the manifest describes: {name} is {found.get(name)}, not {want.get(name)}",
                    "make the bundle again: outrider export, then outrider build-engine",
                )

    def _inputs_and_outputs(self) -> list[Any]:
        return [*self._session.get_inputs(), *self._session.get_outputs()]

    def bind(self, tensors: Mapping[str, Buffer]) -> Launch:
        if self.skips_logits:
            tensors = {**tensors, LOGITS_ROWS: host_buffer(np.array([tensors[LOGITS].shape[1]], dtype=np.int64))}
        for name, names in self._slots.items():
            tensors = {**tensors, **dict(zip(names, self._by_slot(name, tensors[name]), strict=True))}
        binding = self._session.io_binding()
        try:
            for each in self._session.get_inputs():
                _bind(binding.bind_input, each.name, tensors[each.name])
            for each in self._session.get_outputs():
                _bind(binding.bind_output, each.name, tensors[each.name])
        except Exception as error:
            raise _failed(error, "refuses a tensor", "build the bundle again, with this onnxruntime") from error
        held = dict(tensors)

        def launch() -> None:
            assert held  # the buffers live as long as the launch
            try:
                self._session.run_with_iobinding(binding, self._options)
            except Exception as error:
                raise _failed(error, "failed in a run", "build the bundle again") from error

        return launch

    def _by_slot(self, name: str, cache: Buffer) -> list[Buffer]:
        """The parts of a cache [N, H, C, D], and for the graph's slots beyond them a piece of memory that nobody reads."""
        count, heads, capacity, width = cache.shape
        size = heads * capacity * width
        if name not in self._unused:
            shape = (1, heads, UNUSED_POSITIONS, width)
            self._unused[name] = host_buffer(np.zeros(shape, DTYPES[cache.dtype]))
        left = [self._unused[name]] * (len(self._slots[name]) - count)
        return [cache.part(slot * size, 1, heads, capacity, width) for slot in range(count)] + left


@functools.cache
def _preload() -> None:
    """Load CUDA's and cuDNN's libraries, where pip installed them."""
    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):  # where commands print JSON, it prints what it did not find
            onnxruntime.preload_dlls()


def _failed(error: Exception, where: str, hint: str) -> EngineError:
    """What ONNX Runtime's exception is to us; its exceptions share no base but Exception."""
    said = first_line(error)
    if "memory" in said.lower() and "alloc" in said.lower():
        hint = "give a smaller --capacity, --batch or --max-prompt-chunk to build-engine, or end what else uses the memory"
    return EngineError(f"ONNX Runtime {where}: {said}", hint)


def _bind(bound: Any, name: str, buffer: Buffer) -> None:
    kind = BFLOAT16 if buffer.dtype == "bfloat16" else DTYPES[buffer.dtype]
    bound(name, buffer.place, 0, kind, buffer.shape, buffer.address)


def _sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in shape)


def first_line(error: Exception) -> str:
    """What a library's exception says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
