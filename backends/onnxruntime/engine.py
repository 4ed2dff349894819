"""ONNX Runtime engines, on the CPU or on CUDA. Every run binds its tensors to Outrider's buffers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from outrider.backends.base import Engines, GraphEngines
from outrider.backends.mapped import page_out, repeatedly
from outrider.backends.onnxruntime import pool
from outrider.backends.onnxruntime.cuda_graphs import CudaGraphs
from outrider.backends.onnxruntime.lone_rows import lone_rows_differ, lone_rows_vary
from outrider.backends.onnxruntime.package import first_line
from outrider.backends.tensors import check_tensors, engine_tensors
from outrider.bundle.manifest import WEIGHTS, Build, Manifest, sampler_file, step_file
from outrider.engines.contract import LOGITS, LOGITS_ROWS, Stage, Tensor
from outrider.engines.device import Buffer, Cpu, Device, Engine, Launch, host_buffer
from outrider.engines.precisions import DTYPES
from outrider.engines.session import Session
from outrider.engines.threads import thread_count
from outrider.errors import EngineError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
CUDA_GRAPH = "enable_cuda_graph"  # an option of CUDA's provider
CUDA_LIBRARY = "libonnxruntime_providers_cuda.so"
LIBRARIES = ("libcudart", "libcublas*", "libcufft", "libcurand", "libnvJitLink", "libnvrtc*", "libcudnn*")  # its dependencies
ACCURACY = "session.qdq_matmulnbits_accuracy_level"  # 1 keeps activations in fp32
LARGE = 2**31  # bytes of weights that leave memory scarce, so that it is not held by what a second load would find there
UNUSED_POSITIONS = 2  # the most rows that attention writes for a slot without a sequence


def optimize(path: Path, output: Path) -> None:
    """Save the graph at `path` after ONNX Runtime's optimizations, so that loading does not repeat them.

    The weights are written beside `output`, from where they are mapped into memory.

    Raises:
        EngineError: ONNX Runtime refuses the graph.
    """
    options = pool.session_options()
    options.optimized_model_filepath = str(output)
    options.log_severity_level = 3  # it warns that the graph is specific to this machine, which applies only to convolutions
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", output.name + WEIGHTS)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.disable_prepacking", "1")  # not needed for saving, and it doubles the memory
    _session(path, options, [CPU])


def inference_session(
    path: Path, device: Device, *, record_placement: bool = False, rounds: bool = True, threads: int | None = None
) -> Any:
    """Return a session of ONNX Runtime on a device. On CUDA it can record its runs, if the graph allows it.

    Args:
        record_placement: whether to collect data for `get_provider_graph_assignment_info`.
        rounds: whether products with quantized weights may round activations on the CPU.
        threads: see `session_options`.

    Raises:
        EngineError: ONNX Runtime refuses the graph, or does not start CUDA.
    """
    options = pool.session_options(threads)
    if not rounds:
        options.add_session_config_entry(ACCURACY, "1")
    if record_placement:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if isinstance(device, Cpu):
        return _session(path, options, [CPU])
    _preload()
    # Outrider allocates caches and buffers. The rest is small; an arena that doubles would take the memory that they need.
    cuda = {"device_id": str(device.number), "user_compute_stream": str(device.stream)}
    cuda |= {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
    options.log_severity_level = 4  # that a node runs on the CPU is logged as a warning, and as an error in the first session
    try:
        session = _session(path, options, [(CUDA, cuda | {CUDA_GRAPH: "1"}), CPU])
    except EngineError:  # perhaps because some node must run on the CPU
        options.log_severity_level = 3
        session = _session(path, options, [(CUDA, cuda), CPU])
    if session.get_providers()[0] != CUDA:
        raise EngineError(
            f"this ONNX Runtime does not start CUDA: {why_no_cuda()}",
            "pip uninstall onnxruntime, then pip install 'outrider[cuda]', which has CUDA and cuDNN",
        )
    return session


def _session(path: Path, options: Any, providers: list[Any]) -> Any:
    try:
        # Without the fallback, which would print to standard output and then ignore the options.
        return onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=False)
    except Exception as error:
        raise _failed(error, f"cannot load {path}", "build the bundle again, with this onnxruntime") from error


class OnnxRuntimeEngines(GraphEngines):
    """A bundle's graphs, loaded by ONNX Runtime."""

    def __init__(self, folder: Path, manifest: Manifest, build: Build, device: Device, rounds: bool = True):
        """Prepare to load.

        Args:
            rounds: whether products on the CPU may round activations, unless the graph specifies it.
        """
        super().__init__(folder, manifest, build, device)
        pool.create_pool(thread_count(), shared=not build.separates_pools)  # before sessions are loaded by several threads
        self._rounds = rounds

    def unrounded(self) -> Engines | None:
        if self.build.rewrites and isinstance(self.device, Cpu):
            return None  # fused products always round
        return OnnxRuntimeEngines(self.folder, self.manifest, self.build, self.device, rounds=False)

    def step_model(self, role: str, stage: Stage | None = None) -> Engine:
        if self.manifest.models[role].precision == "bf16" and isinstance(self.device, Cpu):
            raise EngineError(
                "ONNX Runtime has no CPU kernels for bf16",
                "export again with --precision fp32 or --precision fp16, or use --device cuda",
            )
        return self._engine(step_file(role, stage), role, self.build.batch, stage)

    def pairs_lone_rows(self, target: Session, on_cpu: bool) -> bool:
        if not on_cpu:
            return lone_rows_vary(target)
        return self.manifest.models["target"].quantization is not None and lone_rows_differ(target)

    def sampler(self, name: str) -> Engine:
        return self._engine(sampler_file(name), name)

    def _engine(self, file: str, name: str, batch: int = 1, stage: Stage | None = None) -> OnnxRuntimeEngine:
        inputs, outputs = engine_tensors(self.manifest, name, stage)
        path, tensors, threads = self.folder / file, [*inputs, *outputs], self.build.threads(stage)
        return OnnxRuntimeEngine(path, tensors, self.device, batch, self._rounds, threads, scarce=stage is not None)


class OnnxRuntimeEngine(Engine):
    """One graph."""

    spare_slots = 1  # fused attention may write a padding row there

    def __init__(
        self,
        path: Path,
        tensors: Iterable[Tensor],
        device: Device,
        batch: int = 1,
        rounds: bool = True,
        threads: int | None = None,
        scarce: bool = False,
    ):
        """Load `path`, a graph for up to `batch` sequences, which must have exactly these inputs and outputs.

        Args:
            rounds: whether products with quantized weights may round activations, unless the graph specifies it.
            threads: see `session_options`.
            scarce: whether memory is scarce with fewer weights than `LARGE`, too.

        Raises:
            EngineError: ONNX Runtime refuses the graph, or it has other tensors.
        """
        weights = path.with_name(path.name + WEIGHTS)
        scarce = weights.exists() and (scarce or weights.stat().st_size >= LARGE)
        with repeatedly(partial(page_out, path)) if scarce else nullcontext():  # products make packed copies of most weights
            self._session = inference_session(path, device, rounds=rounds, threads=threads)
        self._graphs: CudaGraphs | None = None
        if not isinstance(device, Cpu):
            # Runs go to the device's stream, in order with all other work. Recording the stream is not safe: ONNX Runtime
            # copies from its own host memory, and a recorded copy keeps the address after the memory is freed. ONNX Runtime has
            # its own way to record a run. A run that it cannot record waits for its end. Without the wait, ONNX Runtime 1.31
            # keeps each run's host memory, and ends the process when the session frees it (cudaFreeHost in a callback).
            self.recordable = False
            self.spare_slots = 0  # attention is not fused on CUDA
            records = self._session.get_provider_options()[CUDA].get(CUDA_GRAPH) == "1"
            self._graphs = CudaGraphs(self._session, device) if records else None
        everything = [*self._session.get_inputs(), *self._session.get_outputs()]
        actual = {each.name: (each.type, _sizes(each.shape)) for each in everything}
        expected = {each.name: (DTYPES[each.dtype].onnxruntime, _sizes(each.shape)) for each in tensors}
        self.skips_logits = LOGITS in expected and LOGITS_ROWS in actual
        if self.skips_logits:
            expected[LOGITS_ROWS] = (DTYPES["int64"].onnxruntime, (1,))
        caches = [name for name in expected if name.startswith(("past_", "present_")) and f"{name}.1" in actual]
        # Fused attention for several sequences has separate tensors for each sequence; see `fusion.fuse`.
        self._slots = {name: [name, *(f"{name}.{slot}" for slot in range(1, batch))] for name in caches}
        expected |= {each: expected[name] for name, slots in self._slots.items() for each in slots}
        self._unused: dict[str, Buffer] = {}  # bound in place of slots without a sequence
        check_tensors(path, actual, expected)

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
        run: Launch = partial(self._session.run_with_iobinding, binding)
        if self._graphs is not None:
            computed = [tensors[each.name] for each in self._session.get_outputs() if not each.name.startswith("present_")]
            run = self._graphs.launch(binding, computed)

        def launch() -> None:
            assert references  # keeps the buffers alive for as long as the launch
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
    """Return the folders of NVIDIA's wheels, including torch's. ONNX Runtime only looks beside its own package."""
    spec = importlib.util.find_spec("nvidia")
    beside = Path(onnxruntime.__file__).parents[1] / "nvidia"
    return [] if spec is None else [Path(each) for each in spec.submodule_search_locations or () if Path(each) != beside]


def preload_libraries(folders: Iterable[Path]) -> None:
    """Load the shared libraries of NVIDIA's wheels, each one after its dependencies."""
    waiting = [library for folder in folders for name in LIBRARIES for library in sorted(folder.glob(f"*/lib/{name}.so.*"))]
    while waiting:
        left = [library for library in waiting if not _loaded(library)]
        if len(left) == len(waiting):  # a dependency is missing; ONNX Runtime reports it if it needs it
            return
        waiting = left


def _loaded(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def why_no_cuda() -> str:
    """Return the system loader's reason why ONNX Runtime's CUDA provider cannot be loaded."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    if not (folder / CUDA_LIBRARY).exists():
        return "it is the package without CUDA"
    try:
        for name in ("libonnxruntime_providers_shared.so", CUDA_LIBRARY):
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return "see its log on standard error"


def _failed(error: Exception, where: str, hint: str) -> EngineError:
    """Return the `EngineError` for an exception of ONNX Runtime. They have no common base but Exception."""
    message = first_line(error)
    if "memory" in message.lower() and "alloc" in message.lower():
        hint = "build with a smaller --capacity, --batch or --max-prompt-chunk, or stop other programs that use memory"
    return EngineError(f"ONNX Runtime {where}: {message}", hint)


def _bind(bound: Any, name: str, buffer: Buffer) -> None:
    kind, _, number = buffer.place.partition(":")
    bound(name, kind, int(number or 0), DTYPES[buffer.dtype].onnx, buffer.shape, buffer.address)


def _sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in shape)
