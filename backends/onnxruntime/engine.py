"""ONNX Runtime engines, on the CPU or on CUDA: every run binds its tensors to Outrider's buffers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from outrider.backends.base import Engines, GraphEngines, check_tensors, engine_tensors
from outrider.backends.onnxruntime.cuda_graphs import CudaGraphs, run_options
from outrider.bundle.manifest import WEIGHTS, Build, Manifest, model_file, sampler_file
from outrider.engines.contract import LOGITS, LOGITS_ROWS, Tensor
from outrider.engines.device import Buffer, Cpu, Device, Engine, Launch, host_buffer
from outrider.engines.precisions import DTYPES
from outrider.engines.session import GraphSession, Session
from outrider.engines.threads import thread_count
from outrider.errors import EngineError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
CUDA_GRAPH = "enable_cuda_graph"  # an option of CUDA's provider
CUDA_LIBRARY = "libonnxruntime_providers_cuda.so"
LIBRARIES = ("libcudart", "libcublas*", "libcufft", "libcurand", "libnvJitLink", "libnvrtc*", "libcudnn*")  # that it needs
ACCURACY = "session.qdq_matmulnbits_accuracy_level"  # 1 keeps activations in fp32
UNUSED_POSITIONS = 2  # rows that attention writes, at most, for a slot without a sequence


_has_pool = False


def create_pool(threads: int) -> None:
    """Create the pool of threads that all sessions of this process share, unless there is one.

    Draft and target take turns; with a spinning pool each, they would compete for the cores. ONNX Runtime has one pool per
    process, which cannot be replaced, and refuses sessions that ask for their own.
    """
    global _has_pool
    if not _has_pool:
        onnxruntime.set_global_thread_pool_sizes(threads, 1)
        _has_pool = True


def session_options() -> Any:
    """Return new session options that use the shared pool."""
    create_pool(thread_count())
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    return options


def optimize(path: Path, output: Path) -> None:
    """Save the graph at `path` as ONNX Runtime would run it, so that loading does not optimize it again.

    The weights are written beside `output`, and mapped into memory from there.

    Raises:
        EngineError: ONNX Runtime refuses the graph.
    """
    options = session_options()
    options.optimized_model_filepath = str(output)
    options.log_severity_level = 3  # it warns that the graph is specific to this machine, which is true of convolutions only
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", output.name + WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.disable_prepacking", "1")  # not needed for saving, and it doubles the memory
    try:
        onnxruntime.InferenceSession(str(path), options, providers=[CPU])
    except Exception as error:
        raise _failed(error, f"cannot load {path}", "build the bundle again, with this onnxruntime") from error


def inference_session(path: Path, device: Device, *, record_placement: bool = False, rounds: bool = True) -> Any:
    """Return a session of ONNX Runtime on a device: on CUDA one that can record its runs, if the graph allows that.

    Args:
        record_placement: whether `get_provider_graph_assignment_info` will be asked.
        rounds: whether products with quantized weights may round activations on the CPU.

    Raises:
        EngineError: ONNX Runtime refuses the graph, or does not start CUDA.
    """
    options = session_options()
    if not rounds:
        options.add_session_config_entry(ACCURACY, "1")
    if record_placement:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if isinstance(device, Cpu):
        return _session(path, options, [CPU])
    _preload()
    # Caches and buffers are allocated by Outrider; the rest is small, and to double it each time would take what they need.
    cuda = {"user_compute_stream": str(device.stream), "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
    try:
        session = _session(path, options, [(CUDA, cuda | {CUDA_GRAPH: "1"}), CPU])
    except EngineError:  # some node has to run on the CPU, or nothing helps
        session = _session(path, options, [(CUDA, cuda), CPU])
    if session.get_providers()[0] != CUDA:
        raise EngineError(
            f"this ONNX Runtime does not start CUDA: {why_no_cuda()}",
            "pip uninstall onnxruntime, then pip install 'outrider[cuda]', which has CUDA and cuDNN",
        )
    return session


def _session(path: Path, options: Any, providers: list[Any]) -> Any:
    try:
        # Without the fallback: it would print on standard output, and go on without the options.
        return onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=False)
    except Exception as error:
        raise _failed(error, f"cannot load {path}", "build the bundle again, with this onnxruntime") from error


class OnnxRuntimeEngines(GraphEngines):
    """A bundle's graphs, as ONNX Runtime loads them."""

    def __init__(self, folder: Path, manifest: Manifest, build: Build, device: Device, rounds: bool = True):
        """Prepare to load; `rounds` is whether products on the CPU may round activations, if the graph does not say so."""
        super().__init__(folder, manifest, build, device)
        create_pool(thread_count())  # before sessions are loaded by several threads
        self._rounds = rounds

    def unrounded(self) -> Engines | None:
        if self.build.rewrites and isinstance(self.device, Cpu):
            return None  # what was fused rounds by itself
        return OnnxRuntimeEngines(self.folder, self.manifest, self.build, self.device, rounds=False)

    def step_model(self, role: str) -> Engine:
        if self.manifest.models[role].precision == "bf16" and isinstance(self.device, Cpu):
            raise EngineError(
                "ONNX Runtime has no CPU kernels for bf16",
                "export again with --precision fp32 or --precision fp16, or use --device cuda",
            )
        return self._engine(model_file(role), role, self.build.batch)

    def session(self, role: str, batch: int) -> Session:
        session = super().session(role, batch)
        rounded = role == "target" and self.manifest.models[role].quantization is not None and isinstance(self.device, Cpu)
        if rounded and isinstance(session, GraphSession) and session.lone_rows_differ():
            session.pair_lone_rows()
        return session

    def sampler(self, name: str) -> Engine:
        return self._engine(sampler_file(name), name)

    def _engine(self, file: str, name: str, batch: int = 1) -> OnnxRuntimeEngine:
        inputs, outputs = engine_tensors(self.manifest, name)
        return OnnxRuntimeEngine(self.folder / file, [*inputs, *outputs], self.device, batch, self._rounds)


class OnnxRuntimeEngine(Engine):
    """One graph."""

    spare_slots = 1  # fused attention may write a row of padding there

    def __init__(self, path: Path, tensors: Iterable[Tensor], device: Device, batch: int = 1, rounds: bool = True):
        """Load `path`, a graph for up to `batch` sequences, which must have exactly these inputs and outputs.

        Args:
            rounds: whether products with quantized weights may round activations, as far as the graph leaves it open.

        Raises:
            EngineError: ONNX Runtime refuses the graph, or it has other tensors.
        """
        self._session = inference_session(path, device, rounds=rounds)
        self._graphs: CudaGraphs | None = None
        self._options = None  # empty ones would cost time in every run
        if not isinstance(device, Cpu):
            # Its work goes to the device's stream, in order with everything else, and is awaited once a round. Recording that
            # is not safe: ONNX Runtime copies from its own host memory, and a recorded copy keeps the address after it is
            # freed. It has its own way to record a run.
            self.recordable = False
            self.spare_slots = 0  # the attention is not fused there
            records = self._session.get_provider_options()[CUDA].get(CUDA_GRAPH) == "1"
            self._graphs = CudaGraphs(self._session, device) if records else None
            self._options = run_options(graph=None)
        actual = {each.name: (each.type, _sizes(each.shape)) for each in self._inputs_and_outputs()}
        expected = {each.name: (DTYPES[each.dtype].onnxruntime, _sizes(each.shape)) for each in tensors}
        self.skips_logits = LOGITS in expected and LOGITS_ROWS in actual
        if self.skips_logits:
            expected[LOGITS_ROWS] = (DTYPES["int64"].onnxruntime, (1,))
        caches = [name for name in expected if name.startswith(("past_", "present_")) and f"{name}.1" in actual]
        # Fused attention for several sequences has separate tensors for each; see `fusion.fuse`.
        self._slots: dict[str, list[str]] = {}
        if caches:
            self._slots = {name: [name, *(f"{name}.{slot}" for slot in range(1, batch))] for name in caches}
            expected |= {each: expected[name] for name, slots in self._slots.items() for each in slots}
            self._unused: dict[str, Buffer] = {}  # bound in place of the slots that a pass has no sequence for
        check_tensors(path, actual, expected)

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
        references = dict(tensors)
        run: Launch = partial(self._session.run_with_iobinding, binding, self._options)
        if self._graphs is not None:
            computed = [tensors[each.name] for each in self._session.get_outputs() if not each.name.startswith("present_")]
            run = self._graphs.launch(binding, computed)

        def launch() -> None:
            assert references  # keeps the buffers alive as long as the launch
            try:
                run()
            except Exception as error:
                raise _failed(error, "failed in a run", "build the bundle again") from error

        return launch

    def _by_slot(self, name: str, cache: Buffer) -> list[Buffer]:
        """Return the slots of a cache [N, H, C, D], and unused memory for the graph's remaining slots."""
        count, heads, capacity, width = cache.shape
        size = heads * capacity * width
        if name not in self._unused:
            shape = (1, heads, UNUSED_POSITIONS, width)
            self._unused[name] = host_buffer(np.zeros(shape, DTYPES[cache.dtype].numpy))
        unused = [self._unused[name]] * (len(self._slots[name]) - count)
        return [cache.part(slot * size, 1, heads, capacity, width) for slot in range(count)] + unused


@functools.cache
def _preload() -> None:
    """Load the CUDA and cuDNN libraries that pip installed."""
    preload_libraries(_nvidia_folders())
    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):  # it prints warnings, and commands print JSON on standard output
            onnxruntime.preload_dlls()


def _nvidia_folders() -> list[Path]:
    """Return where NVIDIA's wheels are, torch's among them. ONNX Runtime looks for them beside its own package only."""
    spec = importlib.util.find_spec("nvidia")
    beside = Path(onnxruntime.__file__).parents[1] / "nvidia"
    return [] if spec is None else [Path(each) for each in spec.submodule_search_locations or () if Path(each) != beside]


def preload_libraries(folders: Iterable[Path]) -> None:
    """Load the shared libraries of NVIDIA's wheels, each after those that it needs."""
    waiting = [library for folder in folders for name in LIBRARIES for library in sorted(folder.glob(f"*/lib/{name}.so.*"))]
    while waiting:
        left = [library for library in waiting if not _loaded(library)]
        if len(left) == len(waiting):  # what is missing is not here; ONNX Runtime says so if it needs that
            return
        waiting = left


def _loaded(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def why_no_cuda() -> str:
    """Return why ONNX Runtime's part for CUDA cannot be loaded, in the words of the system's loader."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    if not (folder / CUDA_LIBRARY).exists():
        return "it is the package without CUDA"
    try:
        for name in ("libonnxruntime_providers_shared.so", CUDA_LIBRARY):
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return "its log on standard error has the reason"


def _failed(error: Exception, where: str, hint: str) -> EngineError:
    """Return the `EngineError` for an exception of ONNX Runtime, which have no common base but Exception."""
    message = first_line(error)
    if "memory" in message.lower() and "alloc" in message.lower():
        hint = "build with a smaller --capacity, --batch or --max-prompt-chunk, or stop other programs that use memory"
    return EngineError(f"ONNX Runtime {where}: {message}", hint)


def _bind(bound: Any, name: str, buffer: Buffer) -> None:
    bound(name, buffer.place, 0, DTYPES[buffer.dtype].onnx, buffer.shape, buffer.address)


def _sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in shape)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
