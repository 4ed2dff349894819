"""TensorRT, both packages of it: each engine is built in a process of its own, because parser and builder can crash.

`tensorrt_rtx` builds anywhere, `tensorrt` on the GPU that will run the engine. They share nearly every name, so one module
serves both, and what only one has is looked up. The parent writes a `Job`, one line of JSON, to the child's standard input
and keeps it open: when it closes, the child ends. The child answers with `Report`s, one a line.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from outrider.bundle.manifest import EXTRAS, TENSORRT, Profile
from outrider.engines.contract import INPUT_IDS, CacheTensor
from outrider.errors import EngineError, UsageError
from outrider.progress import SILENT, Progress

TITLES = {"tensorrt-rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}
VERBOSITIES = ("error", "warning", "info", "verbose")
PARTS = 1000  # of an engine's progress
LONGEST = "Computing profile costs"  # the phase in which TensorRT compiles, which takes nearly all of the time
LOG_TAIL = 4000  # bytes
NO_GPU = ("cudaError 35:", "cudaError 100:")  # what both packages log on every machine without a driver or a GPU
NO_MEMORY = ("bad_alloc", "out of memory", "outofmemory", "out_of_memory", "could not be allocated", "cannot allocate memory")


@dataclass(frozen=True, slots=True)
class Options:
    """What may be asked of TensorRT's builder; each field is an option of `build-engine`."""

    compute_capability: tuple[str, ...] = ()  # tensorrt-rtx only; empty is what the package chooses: 8.0 and newer
    workspace: float | None = None  # GiB of GPU memory that a kernel may use besides its inputs and outputs
    optimization_level: int | None = None  # 0..5
    verbosity: str | None = None  # of `VERBOSITIES`: shows TensorRT's own log on standard error
    timing_cache: str | None = None  # a file, read and written back; the rest is for tensorrt only
    hardware_compatible: bool = False
    version_compatible: bool = False


ONLY = {
    "compute_capability": ["tensorrt-rtx"],
    "timing_cache": ["tensorrt"],
    "hardware_compatible": ["tensorrt"],
    "version_compatible": ["tensorrt"],
}


class Gpu(msgspec.Struct):
    """The first GPU."""

    name: str
    compute_capability: str
    free: int  # bytes


class Facts(msgspec.Struct):
    """What a package is, and what it can build for."""

    version: str
    compute_capabilities: list[str]  # that it knows by name
    gpu: Gpu | None


class Job(msgspec.Struct):
    """One engine to build; without a graph, only the facts are asked for."""

    backend: str
    options: Options
    graph: str = ""
    plan: str = ""
    cache: list[CacheTensor] = []
    capacity: int = 0
    profiles: list[Profile] = []
    stream_weights: bool = False


class Report(msgspec.Struct, omit_defaults=True):
    """What the child says: where it is, how far, and how it ended."""

    stage: str = ""
    done: int = 0  # parts more of `PARTS`
    facts: Facts | None = None
    missing: str = ""  # why the package cannot be imported
    error: str = ""
    errno: int = 0  # the file could not be written
    finished: bool = False


def check_options(backend: str, options: Options) -> None:
    """Raises `UsageError` where an option does not apply to the backend, or is out of range."""
    unset = asdict(Options())
    for name, value in asdict(options).items():
        backends = ONLY.get(name, list(TENSORRT))
        if value != unset[name] and backend not in backends:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} does not apply to the backend {backend}", f"leave it out; it is for {' and '.join(backends)}"
            )
    if options.workspace is not None and not 0 < options.workspace < 2**20:
        raise UsageError(f"a workspace of {options.workspace} GiB cannot be", "give for example --workspace 2")
    if options.optimization_level is not None and not 0 <= options.optimization_level <= 5:
        raise UsageError(f"there is no optimization level {options.optimization_level}", "give --optimization-level 0 to 5")
    if options.verbosity not in (None, *VERBOSITIES):
        raise UsageError(f"there is no verbosity {options.verbosity!r}", f"give --verbosity {', '.join(VERBOSITIES)}")


def facts(backend: str, options: Options) -> Facts:
    """What the backend's package is.

    Raises:
        UsageError: it does not know a compute capability that is asked for.
        EngineError: it cannot be imported; or it builds only where a GPU is, and there is none.
    """
    found = _child(Job(backend, options), "asking for its version").facts
    assert found is not None
    if unknown := [each for each in options.compute_capability if each not in found.compute_capabilities]:
        raise UsageError(
            f"{TITLES[backend]} {found.version} does not build for compute capability {unknown[0]!r}",
            f"give --compute-capability some of {', '.join(found.compute_capabilities)}",
        )
    if backend == "tensorrt" and found.gpu is None:
        raise EngineError(
            "there is no GPU here, and TensorRT builds on the GPU that will run the engine",
            "run this on that machine, or build anywhere with --backend tensorrt-rtx",
        )
    return found


def build_plan(job: Job, name: str, asked: str = "", progress: Progress = SILENT) -> None:
    """Build one engine.

    Args:
        name: what messages call it.
        asked: the sizes that memory depends on, in words.

    Raises:
        EngineError: TensorRT refuses the graph (the node is named), runs out of memory, or crashes.
        OSError: the plan cannot be written.
    """
    progress.stage(f"building the {name}", PARTS)
    _child(job, f"building the {name}", asked, progress)


def _child(job: Job, what: str, asked: str = "", progress: Progress = SILENT) -> Report:
    """Run a job in a child to its end, and return its last report. It does not outlive this call, whatever happens."""
    title, stage, last = TITLES[job.backend], "starting", Report()
    # -P: what lies in the working directory is not imported.
    command = [sys.executable, "-P", "-m", "outrider.backends.tensorrt.build"]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if job.options.verbosity else log,
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it died at once; what follows says how
                child.stdin.write(msgspec.json.encode(job) + b"\n")
                child.stdin.flush()
            for line in child.stdout:
                last = msgspec.json.decode(line, type=Report)
                stage = last.stage or stage
                progress.advance(last.done)
            code = child.wait()
        finally:
            child.kill()
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - LOG_TAIL))
        tail = log.read().decode(errors="replace")
    if last.finished:
        return last
    if last.missing:
        extra = EXTRAS[job.backend]
        raise EngineError(f"what builds for {title} cannot be imported: {last.missing}", f"pip install 'outrider[{extra}]'")
    if last.errno:
        raise OSError(last.errno, os.strerror(last.errno), job.plan)
    if code == -signal.SIGKILL or any(sign in (last.error + tail).lower() for sign in NO_MEMORY):
        raise EngineError(
            f"{title} ran out of memory while {what} ({stage}): {asked}; {_free_memory()}: {last.error or 'it was killed'}",
            "give a smaller --max-prompt-chunk, --batch, --capacity or --workspace, or fewer --k; or use a larger machine",
        )
    if last.error and stage == "parsing":
        raise EngineError(
            f"{title}'s parser refuses the graph while {what}: {last.error}",
            "it lacks what this node does: choose another model (docs/models.md lists what builds), or --backend onnxruntime",
        )
    if last.error:
        raise EngineError(
            f"{title} failed while {what} ({stage}): {last.error}",
            "export in another precision, build for other GPUs or with more --workspace, or use --backend onnxruntime;"
            " --verbosity info shows more",
        )
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    said = f": {tail.strip().splitlines()[-1]}" if tail.strip() else ""
    raise EngineError(
        f"{title} crashed while {what} ({stage}, {end}){said}",
        "build again with --verbosity verbose to see where; use another release of the package, or --backend onnxruntime",
    )


def _free_memory() -> str:
    with suppress(ValueError, OSError, AttributeError):  # not every system tells
        return f"{os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB of memory are free"
    return "how much memory is free is not known"


class Refused(Exception):
    """The package says no; the message says to what."""


def main() -> None:
    """The child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too, and ends this process
    with open(os.dup(1), "wb", buffering=0) as reports:
        os.dup2(2, 1)  # what the libraries print must not come between the reports

        def send(report: Report) -> None:
            reports.write(msgspec.json.encode(report) + b"\n")

        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
        threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
        try:
            _work(job, send)
        except MemoryError as error:
            send(Report(error=f"out of memory: {error}"))
        except OSError as error:
            send(Report(error=str(error), errno=error.errno or 0))
        except Exception as error:
            send(Report(error=str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"))
        sys.stderr.flush()
        os._exit(0)  # the libraries' own ends have nothing left to do but crash


def _work(job: Job, send: Callable[[Report], None]) -> None:
    try:
        trt = importlib.import_module(TENSORRT[job.backend])
        importlib.import_module("onnx")
    except (ImportError, OSError) as error:  # an OSError where the package is there and its libraries are not
        send(Report(missing=str(error)))
        return
    if not job.graph:
        names = sorted(getattr(getattr(trt, "ComputeCapability", None), "__members__", {}), key=lambda name: (len(name), name))
        known = [f"{name[2:-1]}.{name[-1]}" for name in names if name.startswith("SM")]
        gpu = _gpu() if job.backend == "tensorrt" else None
        send(Report(facts=Facts(trt.__version__, known, gpu), finished=True))
        return
    log = _logger(trt, job.options.verbosity)
    with open(job.plan, "wb") as plan:
        builder = trt.Builder(log)
        typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # TensorRT 11 knows nothing else
        network = builder.create_network(0 if typed is None else 1 << int(typed))
        parser = trt.OnnxParser(network, log)
        send(Report(stage="parsing"))
        _parse(trt, job, network, parser)
        config = _config(trt, job, builder, network)
        monitor = _monitor(trt, send)
        config.progress_monitor = monitor
        send(Report(stage="compiling"))
        _compile(trt, builder, network, config, plan, log.errors)
        _keep_timing_cache(job, config)
    send(Report(finished=True))


def _parse(trt: Any, job: Job, network: Any, parser: Any) -> None:
    import onnx

    model = onnx.load(job.graph, load_external_data=False)
    names = {name for tensor in job.cache for name in (tensor.past, tensor.present)}
    for value in (*model.graph.input, *model.graph.output):
        if value.name in names:
            value.type.tensor_type.shape.dim[2].dim_value = job.capacity  # TensorRT scatters into a fixed one only
    if names:
        del model.graph.value_info[:]  # they name the capacity, too
    if not parser.parse(model.SerializeToString(), job.graph):  # by the path it finds the weights
        errors = [parser.get_error(at) for at in range(parser.num_errors)]
        # Of an operator that it does not know, the parser says "false".
        reasons = [each.code().name.lower() if each.desc() == "false" else each.desc() for each in errors]
        nodes = [f"node {each.node_name()!r} ({each.node_operator()})" for each in errors]
        raise Refused("; ".join(f"{node}: {reason}" for node, reason in zip(nodes, reasons, strict=True)) or "no reason given")
    updates = set()
    for at in range(network.num_layers):
        layer = network.get_layer(at)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            # A fused kernel is still taken where there is one; without this, a shape that has none (any in fp32, decoding
            # with 3 heads to a key in fp16) fails the build.
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            layer.__class__ = trt.IKVCacheUpdateLayer
            updates.add((layer.get_input(0).name, layer.get_output(0).name))
    for tensor in job.cache:
        if (tensor.past, tensor.present) not in updates:
            raise Refused(f"{tensor.present} is not {tensor.past} updated in place")


def _config(trt: Any, job: Job, builder: Any, network: Any) -> Any:
    options, config = job.options, builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 is there to compare with; TF32 keeps 10 bits
    config.set_flag(trt.BuilderFlag.STRICT_NANS)  # the samplers look for NaN
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # what allocates in a run cannot be recorded
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(options.workspace * 2**30))
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.compute_capability:
        config.num_compute_capabilities = len(options.compute_capability)
        for at, each in enumerate(options.compute_capability):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{each.replace('.', '')}"), at):
                raise Refused(f"compute capability {each} is refused")
    if options.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if job.stream_weights:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    if options.timing_cache is not None:
        file = Path(options.timing_cache)
        known = file.read_bytes() if file.exists() else b""
        if not config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False):
            raise Refused(f"the timing cache {options.timing_cache} is damaged, or of another GPU or release")
    for shapes in job.profiles:
        profile = builder.create_optimization_profile()
        for at in range(network.num_inputs):
            tensor = network.get_input(at)
            if tensor.name in shapes:
                set_shape = profile.set_shape_input if tensor.is_shape_tensor else profile.set_shape
                set_shape(tensor.name, *shapes[tensor.name])
        for cache in job.cache:
            batches = [shape[0] for shape in shapes[INPUT_IDS]]
            profile.set_shape(cache.past, *([batch, cache.heads, job.capacity, cache.width] for batch in batches))
        if config.add_optimization_profile(profile) < 0:
            raise Refused(f"the profile {shapes} is refused")
    return config


def _compile(trt: Any, builder: Any, network: Any, config: Any, plan: Any, errors: list[str]) -> None:
    """Write the plan as a stream where the package can; a second copy of a large model's weights is worth avoiding."""
    if not hasattr(builder, "build_serialized_network_to_stream"):
        made = builder.build_serialized_network(network, config)
        if made is None:
            raise Refused(" ".join(errors) or "no reason given")
        plan.write(made)
        return

    failed: list[OSError] = []

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def write(self, data: bytes) -> int:
            try:
                return int(plan.write(data))
            except OSError as error:  # none may pass through the library
                failed.append(error)
                return 0

    built = builder.build_serialized_network_to_stream(network, config, Writer())
    if failed:
        raise failed[0]
    if not built:
        raise Refused(" ".join(errors) or "no reason given")


def _keep_timing_cache(job: Job, config: Any) -> None:
    if job.options.timing_cache is not None:
        path = Path(job.options.timing_cache)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(config.get_timing_cache().serialize())
        partial.replace(path)


def _logger(trt: Any, verbosity: str | None) -> Any:
    levels = trt.ILogger.Severity
    shown = getattr(levels, verbosity.upper()) if verbosity else None

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if any(sign in message for sign in NO_GPU):
                return
            if severity <= levels.ERROR:
                self.errors.append(message)
            if shown is not None and severity <= shown:
                print(f"{severity.name.lower()}: {message}", file=sys.stderr, flush=True)

    return Log()


def _monitor(trt: Any, send: Callable[[Report], None]) -> Any:
    """Reports how much of `LONGEST` is done. Phases nest; each counts as a share of the step of its parent that it is in."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases: dict[str, list[int]] = {}  # steps done, steps in all; `LONGEST` first, then what is inside it
            self._told = 0
            self._lock = threading.Lock()  # it is called from several threads

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                if phase_name == LONGEST or parent_phase in self._phases:
                    self._phases[phase_name] = [0, max(num_steps, 1)]

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                if phase_name in self._phases:
                    self._phases[phase_name][0] = step + 1
                share, done = 1.0, 0.0
                for steps, total in self._phases.values():
                    done += share * steps / total
                    share /= total
                if (parts := min(int(PARTS * done), PARTS)) > self._told:
                    send(Report(done=parts - self._told))
                    self._told = parts
            return True

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._phases.pop(phase_name, None)

    return Monitor()


def _gpu() -> Gpu | None:
    """The first GPU, asked of the driver's own library: TensorRT's package does not tell."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    device, context, major, minor = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    free, total, name = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    calls: tuple[Callable[[], int], ...] = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuDeviceGetName(name, len(name), device),
        lambda: cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device),
        lambda: cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: cuda.cuCtxSetCurrent(context),
        lambda: cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
    )
    if any(call() for call in calls):
        return None
    return Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", free.value)


if __name__ == "__main__":
    main()
