"""TensorRT and TensorRT-RTX engines: one module, for the two packages share their names.

TensorRT does not guard a cache write past the capacity (the session does) and knows no NaN (the samplers' status does).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bundle.manifest import ENGINES, EXTRAS, ROLES, TENSORRT, Build, Manifest, Profile, engine_file
from outrider.engines.contract import (
    CANDIDATES,
    INPUT_IDS,
    KEY_POSITIONS,
    LOGITS,
    POSITIONS,
    cache_tensors,
    sampler_tensors,
)
from outrider.engines.cuda import Cuda
from outrider.engines.device import Buffer, Engine, Launch
from outrider.engines.session import CACHE_TYPES, Engines
from outrider.errors import EngineError

TYPES = {"INT64": "int64", "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}
REBUILD = "build it again on this machine, or for it: outrider build-engine EXPORT -o BUNDLE --backend {} ..."
NOTHING_SAID = "it gave no reason"
INVALID = {  # TensorRT-RTX's diagnostics of a plan, as sentences
    "VERSION_MISMATCH": "it is of another release of the package",
    "UNSUPPORTED_CC": "it is for GPUs of other compute capabilities",
    "OLD_CUDA_DRIVER": "the driver is too old",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little free memory",
    "MALFORMED_ENGINE": "it is no whole engine",
    "CUDA_ERROR": "CUDA does not work here",
}


class TensorRT(Engines):
    """The plans of a bundle, on the GPU of this machine."""

    device: Cuda

    def __init__(self, folder: Path, manifest: Manifest, build: Build):
        """Load every plan, and lay out the working memory that they share.

        Raises:
            EngineError: the package or a GPU is missing; the bundle was built for other ones; or memory does not suffice.
        """
        trt = package(build.backend)
        check_version(build, trt.__version__)
        device = Cuda()
        check_gpu(build, device.name, device.compute_capability)
        super().__init__(folder, manifest, build, device)
        self._trt = trt
        self._log = _log(trt)
        self._runtime = trt.Runtime(self._log)
        if build.version_compatible:
            self._runtime.engine_host_code_allowed = True
        self._plans = {name: self._load(name) for name in ENGINES}
        sizes = [
            plan.get_device_memory_size_for_profile_v2(index)
            for plan in self._plans.values()
            for index in range(plan.num_optimization_profiles)
        ]
        # Engines take turns on one stream, so one piece of memory serves every context.
        self._scratch = device.zeros((max(sizes),), "uint8", "the engines' working memory")
        self._engines: dict[str, TensorRTEngine] = {}

    def step_model(self, role: str) -> Engine:
        return self._engine(role)

    def sampler(self, name: str) -> Engine:
        return self._engine(name)

    def _engine(self, name: str) -> Engine:
        if name not in self._engines:
            profiles = self.build.profiles[name]
            self._engines[name] = TensorRTEngine(self._trt, self._log, self._plans[name], profiles, self.device, self._scratch)
        return self._engines[name]

    def _load(self, name: str) -> Any:
        """A plan, which must have the tensors that the manifest says."""
        path = self.folder / engine_file(name)
        rebuild = REBUILD.format(self.build.backend)
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")  # no copy of it on the host
        except (OSError, ValueError) as error:  # an empty file is a ValueError
            raise EngineError(f"{path} cannot be read: {error}", rebuild) from error
        if hasattr(self._runtime, "get_engine_validity"):
            validity, found = self._runtime.get_engine_validity(data)
            if validity == self._trt.EngineValidity.INVALID:
                flags = self._trt.EngineInvalidityDiagnostics.__members__
                reasons = [INVALID.get(flag, flag) for flag, value in flags.items() if int(value) & int(found)]
                raise EngineError(f"{path} does not run here: {', '.join(reasons) or 'the package says no more'}", rebuild)
        free, total = self.device.memory()
        plan = self._runtime.deserialize_cuda_engine(data)
        if plan is None:
            raise EngineError(
                f"{path} cannot be loaded: {self._log.last}; it has {data.nbytes:,} bytes, and {free:,} of the GPU's {total:,}"
                " were free",
                f"{rebuild}; with a smaller --capacity, --batch or --max-prompt-chunk where memory is what it lacks",
            )
        self._check_tensors(path, plan, _wanted(self.manifest, name))
        if getattr(plan, "streamable_weights_size", 0) > 0:  # built so, because the weights did not fit
            plan.weight_streaming_budget_v2 = plan.get_weight_streaming_automatic_budget()
        return plan

    def _check_tensors(self, path: Path, plan: Any, wanted: dict[str, str]) -> None:
        """Refuse a plan whose tensors are not those of the manifest, or whose caches are not written in place."""
        names = [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]
        found = {name: TYPES.get(plan.get_tensor_dtype(name).name, plan.get_tensor_dtype(name).name) for name in names}
        again = "make the bundle again: outrider export, then outrider build-engine"
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise EngineError(
                    f"{path} is not the engine that the manifest describes: {name} is {found.get(name)}, not"
                    f" {wanted.get(name)}",
                    again,
                )
        for name in names:
            if name.startswith("present_") and hasattr(plan, "get_aliased_input_tensor"):
                past = name.replace("present_", "past_", 1)
                if plan.get_aliased_input_tensor(name) != past:
                    raise EngineError(f"{path} does not write {name} in the place of {past}", again)


class Context:
    """An execution context of one profile, and the shapes and addresses that it has now."""

    def __init__(self, context: Any):
        self.context = context
        self.shapes: dict[str, tuple[int, ...]] = {}  # of `candidates`, values
        self.addresses: dict[str, int] = {}


class TensorRTEngine(Engine):
    """One plan. Each profile has one context, and all share their working memory.

    A context is told only what has changed: a recorded round sets no shapes while it is recorded, as it has just run.
    """

    def __init__(self, trt: Any, log: Any, plan: Any, profiles: list[Profile], device: Cuda, scratch: Buffer):
        self._trt = trt
        self._log = log
        self._plan = plan
        self._profiles = profiles
        self._device = device
        self._scratch = scratch
        self._contexts: dict[int, Context] = {}
        self._values: dict[tuple[int, ...], Buffer] = {}  # of shape tensors: for each value one address
        self._cache: Any = None
        if any("candidates" in profile for profile in profiles):
            self.max_candidates = CANDIDATES[-1]

    def bind(self, tensors: Mapping[str, Buffer]) -> Launch:
        held = dict(tensors)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, buffer in tensors.items():
            if self._plan.get_tensor_mode(name) != self._trt.TensorIOMode.INPUT:
                continue
            shapes[name] = buffer.shape
            if buffer.place == "cpu":  # what a profile says of `candidates` is its value
                shapes[name] = tuple(buffer.view().tolist())
                held[name] = self._values.setdefault(shapes[name], buffer)
        profile = choose_profile(self._profiles, shapes)
        if profile not in self._contexts:
            self._contexts[profile] = self._context(profile)
        context = self._contexts[profile]

        def launch() -> None:
            self._log.last = NOTHING_SAID
            for name, buffer in held.items():
                if context.addresses.get(name) != buffer.address:
                    if not context.context.set_tensor_address(name, buffer.address):
                        raise self._failed(f"taking the address of {name}")
                    context.addresses[name] = buffer.address
            if context.shapes != shapes:
                self._set_shapes(context, held, shapes)
            if not context.context.execute_async_v3(self._device.stream):
                raise self._failed("a run")

        return launch

    def _set_shapes(self, context: Context, tensors: dict[str, Buffer], shapes: dict[str, tuple[int, ...]]) -> None:
        context.shapes = {}
        for name in shapes:
            if not context.context.set_input_shape(name, tensors[name].shape):
                raise self._failed(f"taking the shape of {name}")
        try:
            missing = context.context.infer_shapes()
        except RuntimeError as error:
            raise self._failed(f"inferring shapes ({error})") from error
        if missing:
            raise self._failed(f"inferring the shapes of {', '.join(missing)}")
        context.shapes = shapes

    def _context(self, profile: int) -> Context:
        """A fresh execution context of a profile."""
        self._log.last = NOTHING_SAID
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        kernels = getattr(self._trt, "DynamicShapesKernelSpecializationStrategy", None)
        if kernels is None:
            context = self._plan.create_execution_context(strategy)
        else:  # TensorRT-RTX compiles kernels for each shape on this GPU
            config = self._plan.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            if self._cache is None:
                self._cache = config.create_runtime_cache()
            config.set_runtime_cache(self._cache)
            # At once for the shapes of rounds, or a recorded one would keep the fallback kernels; in the background for the
            # many lengths that a prompt's last chunk may have.
            rows = [most[1] - least[1] for name, (least, _, most) in self._profiles[profile].items() if name == INPUT_IDS]
            config.dynamic_shapes_kernel_specialization_strategy = kernels.LAZY if any(rows) else kernels.EAGER
            context = self._plan.create_execution_context(config)
        if context is None:
            raise self._failed("making an execution context")
        context.set_device_memory(self._scratch.address, self._scratch.nbytes)
        if not context.set_optimization_profile_async(profile, self._device.stream):
            raise self._failed("choosing a profile")
        return Context(context)

    def _failed(self, where: str) -> EngineError:
        free, total = self._device.memory()
        return EngineError(
            f"TensorRT failed in {where}: {self._log.last} ({free:,} of the GPU's {total:,} bytes are free)",
            "build the bundle again; with a smaller --capacity, --batch or --max-prompt-chunk where memory is what it lacks",
        )


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Sequence[int]]) -> int:
    """The number of the narrowest profile that takes these shapes; of `candidates`, values.

    Raises:
        EngineError: none does.
    """
    fitting = []
    for index, profile in enumerate(profiles):
        ranges = [(shapes[name], least, most) for name, (least, _, most) in profile.items()]
        if all(
            len(shape) == len(least) and all(a <= size <= b for size, a, b in zip(shape, least, most, strict=True))
            for shape, least, most in ranges
        ):
            fitting.append((sum(b - a for _, least, most in ranges for a, b in zip(least, most, strict=True)), index))
    if not fitting:
        asked = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items() if any(name in each for each in profiles))
        raise EngineError(
            f"no profile of the engine takes {asked}",
            "build the bundle with that --k, a larger --capacity, --batch or --max-prompt-chunk",
        )
    return min(fitting)[1]


def package(backend: str) -> Any:
    """The Python package of a backend, `tensorrt_rtx` or `tensorrt`.

    Raises:
        EngineError: it is not installed.
    """
    try:
        return importlib.import_module(TENSORRT[backend])
    except (ImportError, OSError) as error:  # a library of its own that is missing is an OSError
        hint = f"pip install 'outrider[{EXTRAS[backend]}]'"
        raise EngineError(f"{TENSORRT[backend]} cannot be imported: {error}", hint) from error


def check_version(build: Build, version: str) -> None:
    """Refuse a bundle of another release of the package, whose plans this one does not read.

    Raises:
        EngineError: it is one.
    """
    if version != build.backend_version and not build.version_compatible:
        raise EngineError(
            f"the bundle was built by {TENSORRT[build.backend]} {build.backend_version}; installed is {version}",
            f"pip install {TENSORRT[build.backend]}=={build.backend_version}, or {REBUILD.format(build.backend)}",
        )


def check_gpu(build: Build, name: str, compute_capability: str) -> None:
    """Refuse a GPU that a bundle was not built for.

    Raises:
        EngineError: it was not.
    """
    known = build.compute_capabilities
    if known and compute_capability not in known:
        built = ", ".join(known)
        raise EngineError(
            f"the bundle was built for GPUs of compute capability {built}; this one, {name}, has {compute_capability}",
            REBUILD.format(build.backend),
        )
    if build.backend == "tensorrt" and known and name != build.device:  # kernels were chosen for its number of processors
        raise EngineError(f"the bundle was built on a {build.device}; this is a {name}", REBUILD.format(build.backend))


def _wanted(manifest: Manifest, name: str) -> dict[str, str]:
    """The types of an engine's tensors, by name."""
    if name in ROLES:
        model = manifest.models[name]
        wanted = {INPUT_IDS: "int64", POSITIONS: "int64", KEY_POSITIONS: "int64", LOGITS: "float32"}
        for tensor in cache_tensors(model.layers):
            wanted[tensor.past] = wanted[tensor.present] = CACHE_TYPES[model.precision]
        return wanted
    inputs, outputs = sampler_tensors(name, *manifest.widths)
    return {each.name: each.dtype for each in inputs + outputs}


def _log(trt: Any) -> Any:
    """A logger that shows nothing and remembers the last error."""

    class Log(trt.ILogger):  # type: ignore[misc]  # the package is chosen at run time
        last = NOTHING_SAID

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last = " ".join(message.split())[:300]

    return Log()
