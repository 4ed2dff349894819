"""Loads the plans of a bundle onto this machine's GPU, or says why they do not run here.

TensorRT does not check cache writes beyond the capacity (sessions do), and does not report NaN (the samplers' status does).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.backends.base import GraphEngines
from outrider.backends.tensorrt.engine import NO_REASON, TensorRTEngine, cache_file, silent_logger
from outrider.backends.tensorrt.package import OTHER_BACKENDS, Package, plan_file
from outrider.backends.tensors import check_tensors, engine_tensors
from outrider.bundle.manifest import Build, Manifest, round_rows
from outrider.engines.contract import Stage, Tensor, cache_tensors, recent_rows
from outrider.engines.cuda import Cuda
from outrider.engines.device import Engine
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.engines.session import SNAPSHOTS, Session
from outrider.errors import DeviceError, EngineError
from outrider.progress import Progress

REBUILD = "build it again on this machine, or for it: outrider build-engine EXPORT -o BUNDLE --backend {} ..."
INVALID = {  # TensorRT-RTX's diagnostics of a plan, in words
    "VERSION_MISMATCH": "it is from another release of the package",
    "UNSUPPORTED_CC": "it is for GPUs of other compute capabilities",
    "OLD_CUDA_DRIVER": "the driver is too old",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little free memory",
    "MALFORMED_ENGINE": "the plan is truncated or corrupt",
    "CUDA_ERROR": "CUDA does not work here",
}
MARGIN = 0.03  # of the GPU's memory, for kernels and small buffers, if weights are streamed
OF_THE_PLAN = {"VERSION_MISMATCH", "MALFORMED_ENGINE"}  # diagnostics that are the same on every machine


class TensorRTEngines(GraphEngines):
    """The plans of a bundle, on the GPU of this machine."""

    device: Cuda

    def __init__(self, package: Package, folder: Path, manifest: Manifest, build: Build):
        """Load every plan, and allocate the working memory that they share.

        Raises:
            DeviceError: there is no GPU, the bundle was built for another GPU, or there is not enough memory.
            EngineError: the package is missing or another release, or a plan does not match the manifest.
        """
        trt = package.load()
        check_version(package, build, trt.__version__)
        device = Cuda()
        check_gpu(package, build, device.name, device.compute_capability)
        super().__init__(folder, manifest, build, device)
        self._trt = trt
        self._log = silent_logger(trt)
        self._runtime = trt.Runtime(self._log)
        if build.version_compatible:
            self._runtime.engine_host_code_allowed = True
        self._plans = {name: self._load(name, folder / plan_file(name)) for name in manifest.engines}
        self._keep_weights()
        # Engines take turns on one stream, so all contexts share one piece of memory.
        self._scratch = device.zeros((self._scratch_size(),), "uint8", "the engines' working memory")
        self._engines: dict[str, TensorRTEngine] = {}

    def step_model(self, role: str, stage: Stage | None = None) -> Engine:
        return self.sampler(role)

    def sampler(self, name: str) -> Engine:
        if name not in self._engines:
            plan, profiles = self._plans[name], self.build.profiles[name]
            kernels = cache_file(self.folder, self.manifest, plan_file(name))
            self._engines[name] = TensorRTEngine(self._trt, self._log, plan, profiles, self.device, self._scratch, kernels)
        return self._engines[name]

    def prepare(self, sessions: Mapping[str, Session], progress: Progress) -> None:
        """Let TensorRT-RTX compile the kernels of all rounds, and save them for the next start; see `Engines.prepare`."""
        if hasattr(self._trt, "DynamicShapesKernelSpecializationStrategy"):
            for role, session in sessions.items():
                warm(role, session, round_rows(role, self.build.k), progress)
            for engine in self._engines.values():
                if engine.runtime_cache is not None:
                    engine.runtime_cache.save()

    def _load(self, name: str, path: Path) -> Any:
        """Return a plan, which must have the tensors that the manifest describes."""
        rebuild = REBUILD.format(self.build.backend)
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")  # no copy on the host
        except (OSError, ValueError) as error:  # an empty file is a ValueError
            raise EngineError(f"{path} cannot be read: {error}", rebuild) from error
        check_validity(self._trt, self._runtime, path, data, rebuild)
        free, total = self.device.memory()
        self._log.last = NO_REASON
        plan = self._runtime.deserialize_cuda_engine(data)
        if plan is None:
            raise EngineError(
                f"{path} cannot be loaded: {self._log.last}; it has {data.nbytes:,} bytes, and {free:,} of the GPU's {total:,}"
                " were free",
                f"{rebuild}; with a smaller --capacity, --batch or --max-prompt-chunk if the GPU ran out of memory",
            )
        inputs, outputs = engine_tensors(self.manifest, name)
        check_plan(path, plan, [*inputs, *outputs])
        return plan

    def _scratch_size(self) -> int:
        return max(
            int(plan.get_device_memory_size_for_profile_v2(index))
            for plan in self._plans.values()
            for index in range(plan.num_optimization_profiles)
        )

    def _keep_weights(self) -> None:
        """Keep as many of the streamed weights on the GPU as fit. They are streamed if they did not fit during the build."""
        sizes = {name: int(getattr(plan, "streamable_weights_size", 0)) for name, plan in self._plans.items()}
        streamed = {name: size for name, size in sizes.items() if size > 0}
        free, total = self.device.memory()
        available = free - reserved(self.manifest, self.build) - self._scratch_size() - int(MARGIN * total)
        for name, budget in zip(streamed, weight_budgets([*streamed.values()], available), strict=True):
            plan = self._plans[name]
            plan.weight_streaming_budget_v2 = budget


def reserved(manifest: Manifest, build: Build) -> int:
    """Return the bytes of GPU memory for a full batch's caches, and for the logits of a round and a prompt's chunk."""
    rows = 2 * (build.k[-1] + 1) + build.max_prompt_chunk  # of target and draft
    size = rows * manifest.vocab_rows * DTYPES["float32"].numpy.itemsize
    for model in manifest.models.values():
        dtype, recent = PRECISIONS[model.precision].dtype, recent_rows(model.recurrent, build.k[-1])
        for tensor in cache_tensors(model.layers, model.features, model.recurrent):
            copies = 1 if tensor.positional else 2 + SNAPSHOTS
            size += copies * math.prod(tensor.sizes(build.capacity, recent)) * DTYPES[tensor.dtype or dtype].numpy.itemsize
    return build.batch * size


def weight_budgets(streamable: Sequence[int], available: int) -> list[int]:
    """Return how many bytes of each plan's weights to keep on the GPU, in the order of the plans.

    TensorRT's own choice is not usable: its Python binding returns 32 of the 64 bits (10.15 to 11.1).
    """
    budgets = []
    for size in streamable:
        budgets.append(max(min(size, available), 0))
        available -= budgets[-1]
    return budgets


def warm(role: str, session: Session, rows: Sequence[int], progress: Progress) -> None:
    """Run every pass of rounds, in every window and for every number of sequences, and then clear the cache."""
    passes = [
        (batch, count, window)
        for batch in range(1, session.batch + 1)
        for window in session.windows
        for count in rows
        if count <= window
    ]
    progress.stage(f"compiling the kernels of the {role}", len(passes))
    for batch, count, window in passes:
        positions = np.full(batch, window - count)
        session.assume(positions)
        session.write(np.zeros((batch, count), np.int64), positions, logits=True)
        session.device.synchronize()
        progress.advance(1)
    for slot in range(session.batch):
        session.clear(slot)


def check_validity(trt: Any, runtime: Any, path: Path, data: Any, hint: str) -> None:
    """Ask TensorRT-RTX whether a plan runs on this machine. TensorRT has no such call.

    Raises:
        DeviceError: it does not run here.
        EngineError: it does not run anywhere.
    """
    if not hasattr(runtime, "get_engine_validity"):
        return
    validity, diagnostics = runtime.get_engine_validity(data)
    if validity != trt.EngineValidity.INVALID:
        return
    flags = trt.EngineInvalidityDiagnostics.__members__
    reasons = [flag for flag, value in flags.items() if int(value) & int(diagnostics)]
    message = ", ".join(INVALID.get(flag, flag) for flag in reasons) or "the package gives no reason"
    if OF_THE_PLAN & set(reasons):
        raise EngineError(f"{path} is not valid: {message}", hint)
    raise DeviceError(f"{path} does not run here: {message}", OTHER_BACKENDS if "UNSUPPORTED_CC" in reasons else hint)


def check_plan(path: Path, plan: Any, tensors: Iterable[Tensor]) -> None:
    """Check that a plan has exactly these inputs and outputs, and updates its caches in place.

    Raises:
        EngineError: it does not.
    """
    names = [plan.get_tensor_name(index) for index in range(plan.num_io_tensors)]
    actual = {name: plan.get_tensor_dtype(name).name for name in names}
    check_tensors(path, actual, {each.name: DTYPES[each.dtype].tensorrt for each in tensors})
    for name in names:
        if name.startswith("present_") and hasattr(plan, "get_aliased_input_tensor"):
            past = name.replace("present_", "past_", 1)
            if plan.get_aliased_input_tensor(name) != past:
                raise EngineError(
                    f"{path} does not update {past} in place as {name}",
                    "make the bundle again: outrider export, then outrider build-engine",
                )


def check_version(package: Package, build: Build, version: str) -> None:
    """Refuse a bundle of another release of the package, whose plans this one cannot read.

    Raises:
        EngineError: the releases differ.
    """
    if version != build.backend_version and not build.version_compatible:
        raise EngineError(
            f"the bundle was built by {package.module} {build.backend_version}; installed is {version}",
            f"pip install {package.module}=={build.backend_version}, or {REBUILD.format(build.backend)}",
        )


def check_gpu(package: Package, build: Build, name: str, compute_capability: str) -> None:
    """Check that the package runs on a GPU, and that the bundle was built for it.

    Raises:
        DeviceError: one of these is not so.
    """
    if (reason := package.unsupported(compute_capability)) is not None:
        raise DeviceError(reason, OTHER_BACKENDS)
    capabilities = build.compute_capabilities
    if capabilities and compute_capability not in capabilities:
        raise DeviceError(
            f"the bundle was built for GPUs of compute capability {', '.join(capabilities)}; this one, {name}, has"
            f" {compute_capability}",
            REBUILD.format(build.backend),
        )
    # A bundle built on a GPU has kernels chosen for the number of that GPU's processors.
    if not package.builds_anywhere and capabilities and name != build.device:
        raise DeviceError(f"the bundle was built on a {build.device}; this is a {name}", REBUILD.format(build.backend))
