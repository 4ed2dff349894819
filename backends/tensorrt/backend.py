"""The backends `tensorrt-rtx` and `tensorrt`, which compile every engine into a plan."""

from __future__ import annotations

import math
from pathlib import Path

from outrider.backends.base import Backend, Engines, required_rows
from outrider.backends.build_spec import BuildSpec
from outrider.backends.option import Option
from outrider.backends.tensorrt.job import VERBOSITIES, BuildJob, BuildOptions, EngineFacts
from outrider.backends.tensorrt.package import RTX, RTX_GPUS, TENSORRT, Package, plan_file
from outrider.backends.tensorrt.process import build_plan, facts
from outrider.backends.tensorrt.profiles import all_profiles, step_rows_profiled
from outrider.bundle.decoding import damaged
from outrider.bundle.manifest import ROLES, WEIGHTS, Build, Manifest, Model, graph_files, round_rows
from outrider.engines.contract import CacheTensor, cache_tensors, recent_rows
from outrider.errors import EngineError, UsageError
from outrider.progress import Progress

MAX_ELEMENTS = 2**40  # of a tensor

SHARED = (
    Option("workspace", "Scratch GPU memory for one kernel.", type=float, metavar="GIB"),
    Option(
        "optimization_level",
        "How long to search for faster kernels, 0 to 5.  [default: the package's, 3]",
        type=int,
        metavar="LEVEL",
    ),
    Option("verbosity", "Show TensorRT's own log on standard error, from this severity on.", choices=VERBOSITIES),
)
RTX_OPTIONS = (
    Option(
        "compute_capability",
        f"The GPUs to build for, such as 8.9,12.0; choose from {RTX_GPUS}.  [default: all of these from 8.0 on]",
        type=tuple,
        metavar="LIST",
    ),
    *SHARED,
)
TENSORRT_OPTIONS = (
    *SHARED,
    Option("timing_cache", "Timings of earlier builds: read, and written back.", type=Path, metavar="FILE"),
    Option("hardware_compatible", "Build engines that also run on other GPUs, from Ampere on.", type=bool),
    Option("version_compatible", "Build engines that newer releases of TensorRT run, too.", type=bool),
)


class TensorRTBackend(Backend):
    """One of the two packages."""

    def __init__(self, package: Package, options: tuple[Option, ...]):
        self.name = package.backend
        self.extra = package.extra
        self.options = options
        self.requires_costs = not package.builds_anywhere
        self._package = package

    def build(self, spec: BuildSpec, folder: Path, progress: Progress) -> Build:
        """Compile each engine in a child process; see `Backend.build`."""
        options = BuildOptions(**spec.options)
        _check_volumes(spec)
        known = facts(self._package, options)
        # Plans contain the weights, and for single rows a second copy in another layout.
        spec.copy_except(spec.manifest.engines, folder, progress, growth=2)
        build = spec.result(
            self.name,
            known.version,
            _device(known, options),
            compute_capabilities=_capabilities(known, options),
            profiles=all_profiles(spec.manifest, spec.k, spec.capacity, spec.batch, spec.max_prompt_chunk),
            version_compatible=options.version_compatible,
        )
        self._compile(spec, folder, build, known, options, progress)
        return build

    def _compile(
        self, spec: BuildSpec, folder: Path, build: Build, known: EngineFacts, options: BuildOptions, progress: Progress
    ) -> None:
        """Write the plan of every engine."""
        manifest = spec.manifest
        weights = sum(manifest.files[graph_files(role)[1]].size for role in manifest.roles)
        sizes = (
            f"a batch of {spec.batch}, a capacity of {spec.capacity}, a prompt chunk of {spec.max_prompt_chunk},"
            f" k = {', '.join(map(str, spec.k))}, {weights:,} bytes of weights"
        )
        for name in manifest.engines:
            plan = folder / plan_file(name)
            plan.parent.mkdir(exist_ok=True)
            graph, kept = spec.source / graph_files(name)[0], plan.with_name("symmetric.onnx")
            rewritten = name in ROLES and _has_stored_weights(manifest.models[name])
            if rewritten:
                progress.stage(f"rewriting the {name}")
                _make_symmetric(graph, kept)
            job = BuildJob(
                package=self._package,
                options=options,
                graph=str(kept if rewritten else graph),
                plan=str(plan),
                cache=_cache(manifest.models[name]) if name in ROLES else [],
                capacity=spec.capacity,
                recent=recent_rows(manifest.models[name].recurrent, spec.k[-1]) if name in ROLES else 0,
                profiles=build.profiles[name],
                stream_weights=known.gpu is not None and name in ROLES and weights > known.gpu.free,
            )
            build_plan(job, name, sizes, progress)
            for file in (kept, kept.with_name(kept.name + WEIGHTS)):
                file.unlink(missing_ok=True)

    def open(self, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        """Load every plan onto the GPU; see `Backend.open`."""
        if device == "cpu":
            raise UsageError(f"{self.name} does not run on a CPU", "build the export with --backend onnxruntime")
        from outrider.backends.tensorrt.engines import TensorRTEngines

        return TensorRTEngines(self._package, folder, manifest, build)

    def engine_files(self, name: str) -> tuple[str, ...]:
        """Return the path of the plan."""
        return (plan_file(name),)

    def check(self, manifest: Manifest, build: Build) -> None:
        """Check files and costs, and that every pass of a round has a profile; see `Backend.check`."""
        super().check(manifest, build)
        for name in manifest.engines:
            if name in ROLES:
                spans = {(1, build.max_prompt_chunk), *step_rows_profiled(name, build.k, build.capacity)}
            else:
                spans = {(rows, rows) for rows in required_rows(name, build)}
            if not spans <= set(build.rows(name)):
                raise damaged(f"profiles of the {name} are missing - at `$.build.profiles`")


def _cache(model: Model) -> list[CacheTensor]:
    return cache_tensors(model.layers, model.features, model.recurrent)


def _has_stored_weights(model: Model) -> bool:
    """Return whether weights may have zero points or negative scales, which TensorRT does not take."""
    return model.quantization is not None and model.quantization.method == "as-is"


def _make_symmetric(path: Path, output: Path) -> None:
    """Rewrite a graph with `make_symmetric`.

    Raises:
        EngineError: the packages that rewrite graphs are missing.
    """
    try:
        from outrider.backends.rewriting.symmetric import make_symmetric
    except ImportError as error:
        raise EngineError(f"cannot rewrite the graphs: {error}", "pip install 'outrider[build]'") from error
    make_symmetric(path, output)


def _check_volumes(spec: BuildSpec) -> None:
    for role, model in spec.manifest.models.items():
        rows = max(spec.max_prompt_chunk, *round_rows(role, spec.k))
        caches = [spec.batch * math.prod(each.sizes(spec.capacity, rows)) for each in _cache(model)]
        if (volume := max([*caches, spec.batch * rows * model.vocab_rows])) >= MAX_ELEMENTS:
            raise UsageError(
                f"a tensor of the {role} would have {volume:,} elements; TensorRT's limit is {MAX_ELEMENTS:,}",
                "use a smaller --batch, --capacity or --max-prompt-chunk",
            )


def _capabilities(known: EngineFacts, options: BuildOptions) -> list[str]:
    """Return the compute capabilities of the plans. Empty if they also run on newer GPUs: hardware-compatible plans, and the
    default of TensorRT-RTX."""
    if known.gpu is not None and not options.hardware_compatible:
        return [known.gpu.compute_capability]
    return list(options.compute_capability)


def _device(known: EngineFacts, options: BuildOptions) -> str:
    if known.gpu is not None:
        return known.gpu.name
    capabilities = ", ".join(options.compute_capability) or "8.0, 8.6, 8.9 and 12.x, by the default of the package"
    return f"GPUs of compute capability {capabilities}"


RTX_BACKEND = TensorRTBackend(RTX, RTX_OPTIONS)
TENSORRT_BACKEND = TensorRTBackend(TENSORRT, TENSORRT_OPTIONS)
