"""A TensorRT plan as an engine: its profiles, an execution context for each, and the kernels that TensorRT-RTX compiles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.bundle.manifest import Manifest, Profile
from outrider.engines.contract import INPUT_IDS
from outrider.engines.cuda import Cuda
from outrider.engines.device import Buffer, Engine, Launch
from outrider.engines.samplers import CANDIDATES
from outrider.errors import EngineError

NO_REASON = "it gave no reason"


class ExecutionContext:
    """An execution context of one profile, and the shapes and addresses that are set in it."""

    def __init__(self, context: Any):
        self.context = context
        self.shapes: dict[str, tuple[int, ...]] = {}  # for `candidates`, the value
        self.addresses: dict[str, int] = {}


class TensorRTEngine(Engine):
    """One plan. Each profile has one execution context, and all contexts share their working memory.

    A launch sets only the shapes and addresses that have changed since the last launch. So none are set while a round is
    recorded, because the same round has just run.
    """

    overwrites = False  # TensorRT documents outputs over inputs only for caches that it scatters into

    def __init__(self, trt: Any, log: Any, plan: Any, profiles: list[Profile], device: Cuda, scratch: Buffer, kernels: Path):
        """Prepare a plan.

        Args:
            profiles: the profiles that the plan was built with.
            scratch: the working memory of all contexts.
            kernels: the file for the kernels that TensorRT-RTX compiles.
        """
        self._trt = trt
        self._log = log
        self._plan = plan
        self._profiles = profiles
        self._device = device
        self._scratch = scratch
        self._contexts: dict[int, ExecutionContext] = {}
        self._values: dict[tuple[int, ...], Buffer] = {}  # of shape tensors, with one address per value
        self._kernels = kernels
        self.runtime_cache: RuntimeCache | None = None  # only with TensorRT-RTX, once there is a context
        if any("candidates" in profile for profile in profiles):
            self.max_candidates = CANDIDATES[-1]

    def bind(self, tensors: Mapping[str, Buffer]) -> Launch:
        references = dict(tensors)  # keeps the buffers alive for as long as the launch
        shapes: dict[str, tuple[int, ...]] = {}
        for name, buffer in tensors.items():
            if self._plan.get_tensor_mode(name) != self._trt.TensorIOMode.INPUT:
                continue
            shapes[name] = buffer.shape
            if buffer.place == "cpu":  # for `candidates`, the profiles contain the value instead of the shape
                shapes[name] = tuple(buffer.view().tolist())
                references[name] = self._values.setdefault(shapes[name], buffer)
        profile = choose_profile(self._profiles, shapes)
        if profile not in self._contexts:
            self._contexts[profile] = self._context(profile)
        context = self._contexts[profile]

        def launch() -> None:
            self._log.last = NO_REASON
            for name, buffer in references.items():
                if context.addresses.get(name) != buffer.address:
                    if not context.context.set_tensor_address(name, buffer.address):
                        raise self._failed(f"taking the address of {name}")
                    context.addresses[name] = buffer.address
            if context.shapes != shapes:
                self._set_shapes(context, references, shapes)
            if not context.context.execute_async_v3(self._device.stream):
                raise self._failed("a run")

        return launch

    def _set_shapes(self, context: ExecutionContext, tensors: dict[str, Buffer], shapes: dict[str, tuple[int, ...]]) -> None:
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

    def _context(self, profile: int) -> ExecutionContext:
        """Create an execution context of a profile."""
        self._log.last = NO_REASON
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        kernels = getattr(self._trt, "DynamicShapesKernelSpecializationStrategy", None)
        if kernels is None:
            context = self._plan.create_execution_context(strategy)
        else:  # TensorRT-RTX compiles kernels for each shape on this GPU
            config = self._plan.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            self.runtime_cache = self.runtime_cache or RuntimeCache(config.create_runtime_cache(), self._kernels)
            config.set_runtime_cache(self.runtime_cache.cache)
            # Immediately for the shapes of rounds, or a recorded round would keep the fallback kernels. In the background for
            # prompts, whose last chunk may have many lengths.
            low, _, high = self._profiles[profile].get(INPUT_IDS, ([0, 0], [0, 0], [0, 0]))
            config.dynamic_shapes_kernel_specialization_strategy = kernels.LAZY if low[1] < high[1] else kernels.EAGER
            context = self._plan.create_execution_context(config)
        if context is None:
            raise self._failed("creating an execution context")
        context.set_device_memory(self._scratch.address, self._scratch.nbytes)
        if not context.set_optimization_profile_async(profile, self._device.stream):
            raise self._failed("choosing a profile")
        return ExecutionContext(context)

    def _failed(self, where: str) -> EngineError:
        free, total = self._device.memory()
        return EngineError(
            f"TensorRT failed in {where}: {self._log.last} ({free:,} of the GPU's {total:,} bytes are free)",
            "build the bundle again, with a smaller --capacity, --batch or --max-prompt-chunk if it ran out of memory",
        )


class RuntimeCache:
    """The kernels that TensorRT-RTX has compiled for one engine's shapes, kept beside the bundle for the next process.

    They are not in the bundle, because it is sealed and the same for every GPU. TensorRT-RTX itself refuses kernels of another
    GPU, driver or release.
    """

    def __init__(self, cache: Any, file: Path):
        """Fill `cache`, an `IRuntimeCache`, from `file` if it has kernels for this machine."""
        self.cache = cache
        self._file = file
        with suppress(OSError):  # the file does not exist yet, or may not be read
            cache.deserialize(file.read_bytes())

    def save(self) -> None:
        """Write the kernels if possible: a bundle may be on a read-only file system."""
        partial = self._file.with_name(f"{self._file.name}.{os.getpid()}.partial")
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            partial.write_bytes(self.cache.serialize())
            partial.replace(self._file)


def cache_file(bundle: Path, manifest: Manifest, plan: str) -> Path:
    """Return the file for the kernels of a plan. A rebuilt plan has another file."""
    return bundle.with_name(f".{bundle.name}.kernels") / f"{manifest.files[plan].sha256[:32]}.bin"


def choose_profile(profiles: Sequence[Profile], shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the index of the narrowest profile that accepts these shapes (for `candidates`, the value).

    Raises:
        EngineError: no profile accepts them.
    """
    fitting = []
    for index, profile in enumerate(profiles):
        ranges = [(shapes[name], low, high) for name, (low, _, high) in profile.items()]
        if all(
            len(shape) == len(low) and all(a <= size <= b for size, a, b in zip(shape, low, high, strict=True))
            for shape, low, high in ranges
        ):
            fitting.append((sum(b - a for _, low, high in ranges for a, b in zip(low, high, strict=True)), index))
    if not fitting:
        known = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items() if any(name in each for each in profiles))
        raise EngineError(
            f"no profile of the engine accepts {known}",
            "build the bundle with that --k, a larger --capacity, --batch or --max-prompt-chunk",
        )
    return min(fitting)[1]


def silent_logger(trt: Any) -> Any:
    """Return a logger for the package `trt` that prints nothing, and keeps the last error in `last`."""

    class SilentLogger(trt.ILogger):  # type: ignore[misc]  # the package is chosen at run time
        last = NO_REASON

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last = " ".join(message.split())[:300]

    return SilentLogger()
