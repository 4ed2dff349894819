"""`outrider build-engine`: an ONNX pair becomes a bundle of engines with fixed k profiles.

ONNX Runtime's are measured at once; TensorRT's may be built where no GPU is.
"""

from __future__ import annotations

import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from outrider.builder.profiles import sampler_profiles, step_profiles
from outrider.builder.tensorrt import Facts, Job, Options, build_plan, check_options, facts
from outrider.engines.bundle import open_engines
from outrider.engines.contract import CANDIDATES, SAMPLERS, cache_tensors, sampler_tensors, window_buckets
from outrider.engines.device import Device, Engine, host_buffer
from outrider.engines.errors import EngineError, FolderError, OutriderWarning, UsageError
from outrider.engines.folder import check_files, digest_all, read_manifest, staged
from outrider.engines.manifest import (
    ENGINES,
    MANIFEST,
    ROLES,
    TENSORRT,
    Build,
    Cost,
    Manifest,
    Profile,
    engine_file,
    model_file,
    sampler_file,
)
from outrider.engines.progress import SILENT, Progress
from outrider.engines.session import Engines, Session

DEFAULT_CAPACITY = 1024
DEFAULT_CHUNK = 64
TIMED_RUNS = 7
# Of the largest logit: another order of the same sums, which rounded activations make more of.
FUSED_TOLERANCE = {"fp32": 1e-3, "fp16": 2e-2, "int8": 5e-2, "int4": 5e-2}
MOST_ELEMENTS = 2**40  # of a tensor, in TensorRT


def build_engine(
    source: Path,
    output: Path,
    *,
    backend: str,
    k: list[int],
    capacity: int | None = None,
    batch: int,
    max_prompt_chunk: int | None = None,
    device: str | None = None,
    options: Options = Options(),  # noqa: B008  # frozen
    progress: Progress = SILENT,
) -> Manifest:
    """Build the bundle `output` from the export `source`, and return its manifest.

    Args:
        backend: onnxruntime, tensorrt-rtx or tensorrt.
        k: numbers of draft tokens a round may have; 0, plain decoding, is always there.
        capacity: positions of the cache, for prompt and answer together; None is 1024, or what the models were made for
            where that is less.
        batch: sequences that may run at once.
        max_prompt_chunk: longest run while reading a prompt, in tokens; None is 64, or the capacity where that is less.
        device: for onnxruntime, where it is measured, "cpu" or "cuda"; None is "cpu".
        options: TensorRT's own.

    Raises:
        UsageError: the numbers do not fit each other or the models, or an option not the backend.
        FolderError: the export is damaged, or the output cannot be written.
        EngineError: the backend refuses a model, or does not run it.
    """
    manifest = read_manifest(source)
    if manifest.build is not None:
        raise FolderError(f"{source} is a bundle already", "name the folder that outrider export wrote")
    k = sorted(set(k))
    if capacity is None:
        capacity = min([DEFAULT_CAPACITY, *(m.max_positions for m in manifest.models.values() if m.max_positions)])
    if max_prompt_chunk is None:
        max_prompt_chunk = min(DEFAULT_CHUNK, capacity)
    _check(manifest, k, capacity, batch, max_prompt_chunk)
    check_options(backend, options)
    if backend in TENSORRT:
        if device is not None:
            raise UsageError(f"--device does not apply to the backend {backend}", "leave it out; it is for onnxruntime")
        _check_volumes(manifest, capacity, batch, max(max_prompt_chunk, k[-1] + 1))
    package = facts(backend, options) if backend in TENSORRT else None
    with staged(output) as folder:
        check_files(source, manifest, progress)
        _copy(source, folder, output, manifest, package is None, progress)
        build = Build(
            backend=backend,
            backend_version=_backend_version() if package is None else package.version,
            device=device or "cpu" if package is None else _device(package, options),
            k=k,
            capacity=capacity,
            batch=batch,
            max_prompt_chunk=max_prompt_chunk,
            windows=window_buckets(capacity),
            costs={},
            rewrites={},
            compute_capabilities=[] if package is None else _capabilities(package, options),
            profiles={} if package is None else _profiles(manifest, k, capacity, batch, max_prompt_chunk),
            version_compatible=options.version_compatible,
        )
        if package is not None:
            _compile(source, folder, manifest, build, package, options, progress)
        else:
            build = msgspec.structs.replace(build, rewrites=_fuse(source, folder, manifest, build, progress))
        manifest = msgspec.structs.replace(manifest, files=digest_all(folder, progress))
        try:
            build = msgspec.structs.replace(build, costs=_measure(folder, manifest, build, progress))
        except EngineError as error:
            if backend != "tensorrt-rtx":
                raise
            progress.stage(f"not measured, as it does not run here ({error})")  # it is built for other machines, too
        sealed = msgspec.structs.replace(manifest, build=build)
        (folder / MANIFEST).write_bytes(sealed.encode())
    return sealed


def _check_volumes(manifest: Manifest, capacity: int, batch: int, rows: int) -> None:
    for role, model in manifest.models.items():
        caches = [batch * capacity * tensor.heads * tensor.width for tensor in cache_tensors(model.layers)]
        if (volume := max([*caches, batch * rows * model.vocab_rows])) >= MOST_ELEMENTS:
            raise UsageError(
                f"a tensor of the {role} would have {volume:,} elements; TensorRT takes less than {MOST_ELEMENTS:,}",
                "give a smaller --batch, --capacity or --max-prompt-chunk",
            )


def _capabilities(package: Facts, options: Options) -> list[str]:
    """What the plans are for, where it can be named: hardware-compatible ones, and RTX's by default, run on newer GPUs, too."""
    if package.gpu is not None and not options.hardware_compatible:
        return [package.gpu.compute_capability]
    return list(options.compute_capability)


def _device(package: Facts, options: Options) -> str:
    if package.gpu is not None:
        return package.gpu.name
    return (
        f"GPUs of compute capability {', '.join(options.compute_capability) or '8.0 and newer, by the default of the package'}"
    )


def _profiles(manifest: Manifest, k: list[int], capacity: int, batch: int, chunk: int) -> dict[str, list[Profile]]:
    rows = {role: model.vocab_rows for role, model in manifest.models.items()}
    steps = step_profiles(k, capacity, batch, chunk)
    samplers = {name: sampler_profiles(name, k, batch, rows["target"], rows["draft"]) for name in SAMPLERS}
    return {**dict.fromkeys(ROLES, steps), **samplers}


def _compile(
    source: Path, folder: Path, manifest: Manifest, build: Build, package: Facts, options: Options, progress: Progress
) -> None:
    """Write the plan of every engine."""
    weights = sum(manifest.files[model_file(role) + ".data"].size for role in ROLES)
    asked = (
        f"a batch of {build.batch}, a capacity of {build.capacity}, a prompt chunk of {build.max_prompt_chunk},"
        f" k = {', '.join(map(str, build.k))}, {weights:,} bytes of weights"
    )
    for name in ENGINES:
        plan = folder / engine_file(name)
        plan.parent.mkdir(exist_ok=True)
        job = Job(
            backend=build.backend,
            options=options,
            graph=str(source / (model_file(name) if name in ROLES else sampler_file(name))),
            plan=str(plan),
            cache=cache_tensors(manifest.models[name].layers) if name in ROLES else [],
            capacity=build.capacity,
            profiles=build.profiles[name],
            stream_weights=package.gpu is not None and name in ROLES and weights > package.gpu.free,
        )
        build_plan(job, name, asked, progress)


def _fuse(source: Path, folder: Path, manifest: Manifest, build: Build, progress: Progress) -> dict[str, dict[str, int]]:
    """Put graphs with ONNX Runtime's own operators in the place of the exported ones, where they compute the same.

    Returns:
        for each model that was rewritten, how often each rewrite was made.
    """
    if build.device != "cpu" or build.batch > 1:
        return {}  # on CUDA the exported attention has fused kernels; GroupQueryAttention does not verify a batch
    try:
        from outrider.builder.fusion import fuse
    except ImportError as error:
        warnings.warn(
            f"the graphs stay as exported, which is slower: {error}; pip install 'outrider[build]' fuses them",
            OutriderWarning,
            stacklevel=2,
        )
        return {}
    from outrider.engines.onnxruntime import optimize

    made = {}
    for role in ROLES:
        progress.stage(f"fusing the {role}")
        fused, final = folder / "fused" / "model.onnx", folder / "final" / model_file(role)
        for path in (fused, final):
            path.parent.mkdir(parents=True)
        done = fuse(source / model_file(role), fused, build.capacity)
        try:
            optimize(fused, final)
            shutil.rmtree(fused.parent)
            progress.stage(f"comparing the fused {role} with the exported one")
            reason = _differs(open_engines(source, manifest, build), open_engines(folder / "final", manifest, build), role)
        except EngineError as error:
            reason = str(error)
        if reason is None:
            made[role] = done
            for name in (final.name, final.name + ".data"):
                (final.parent / name).replace(folder / role / name)
        else:
            warnings.warn(f"the {role} stays as exported, which is slower: {reason}", OutriderWarning, stacklevel=2)
        shutil.rmtree(fused.parent, ignore_errors=True)
        shutil.rmtree(folder / "final")
    return made


def _differs(plain: Engines, fused: Engines, role: str) -> str | None:
    """Why a fused graph may not stand for the exported one, if it may not."""
    build, model = plain.build, plain.manifest.models[role]
    sizes = [min(build.max_prompt_chunk, 16), 2, 1, build.k[-1] + 1]
    random = np.random.default_rng(0)
    passes, at = [], 0
    for rows in sizes:
        at = min(at, build.capacity - rows)
        passes.append((random.integers(0, model.vocab_rows, (1, rows)), np.array([at])))
        at += rows
    found = []
    for engines in (plain, fused):  # one model in memory at a time
        session = engines.session(role, 1)
        found.append([session.run(*each).copy() for each in passes])
        del session
    for want, got in zip(*found, strict=True):
        finite = np.isfinite(want)
        allowed = FUSED_TOLERANCE[model.precision] * max(1.0, float(np.abs(want[finite]).max(initial=0)))
        if (finite != np.isfinite(got)).any() or (np.abs(want[finite] - got[finite]) > allowed).any():
            return f"fused, its logits would differ by more than {allowed:.2g}"
    return None


def _check(manifest: Manifest, k: list[int], capacity: int, batch: int, chunk: int) -> None:
    if not k or k[0] < 1:
        raise UsageError(f"k is {k or 'empty'}; each must be at least 1", "give for example --k 1,2,4,8; 0 is always there")
    if batch < 1:
        raise UsageError(f"the batch is {batch}; it must be at least 1", "give for example --batch 1")
    if capacity < k[-1] + 2:
        raise UsageError(f"a capacity of {capacity} does not hold k = {k[-1]}", f"give --capacity {k[-1] + 2} or more")
    if not 1 <= chunk <= capacity:
        raise UsageError(
            f"a prompt chunk of {chunk} does not fit a capacity of {capacity}", "give a smaller --max-prompt-chunk"
        )
    for role, model in manifest.models.items():
        if model.max_positions is not None and capacity > model.max_positions:
            raise UsageError(
                f"the {role} ({model.source}) was made for {model.max_positions} positions; asked for are {capacity}",
                f"give --capacity {model.max_positions} or less",
            )


def _copy(source: Path, folder: Path, output: Path, manifest: Manifest, graphs: bool, progress: Progress) -> None:
    """Copy the export into `folder`, with or without the graphs and weights.

    Whether there is room is asked before, not after minutes of work. Plans hold the weights, those for a single row a second
    time in another layout.
    """
    needed = sum(entry.size for entry in manifest.files.values()) * (1 if graphs else 2)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FolderError(f"no room to write {output}: it takes {needed:,} bytes and {free:,} are free", "free some disk space")
    files = {name: entry for name, entry in manifest.files.items() if graphs or not name.endswith((".onnx", ".onnx.data"))}
    progress.stage("copying the graphs and weights" if graphs else "copying the tokenizer", sum(e.size for e in files.values()))
    for name, entry in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
        progress.advance(entry.size)


def _backend_version() -> str:
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError(f"onnxruntime cannot be imported: {error}", "pip install 'outrider[cpu]'") from error
    version: str = onnxruntime.__version__
    return version


def _measure(folder: Path, manifest: Manifest, build: Build, progress: Progress) -> dict[str, dict[str, Cost]]:
    """The cost of every pass that a round may make; that the engines run at all is checked with it."""
    engines = open_engines(folder, manifest, build)
    passes = [k + 1 for k in build.k]
    costs = {}
    for role in ROLES:
        progress.stage(f"measuring the {role}")
        session = engines.session(role, build.batch)
        costs[role] = {str(rows): _cost(_step(session, rows)) for rows in sorted({1, 2, build.max_prompt_chunk, *passes})}
        del session  # one model in memory at a time
    progress.stage("measuring the samplers")
    sizes = {"drafter": [1], "verifier": [1, *passes], "logprobs": [1, *passes]}
    for name in SAMPLERS:
        engine = engines.sampler(name)
        costs[name] = {str(rows): _cost(_sampling(engine, engines.device, name, manifest, build, rows)) for rows in sizes[name]}
    return costs


def _step(session: Session, rows: int) -> Callable[[], None]:
    """A pass of so many rows."""
    ids = np.zeros((session.batch, rows), dtype=np.int64)
    positions = np.zeros(session.batch, dtype=np.int64)

    def run() -> None:
        session.write(ids, positions)
        session.device.synchronize()

    return run


def _sampling(engine: Engine, device: Device, name: str, manifest: Manifest, build: Build, rows: int) -> Callable[[], None]:
    """A run of a sampler at temperature 1 and top_p 0.9, for one sequence."""
    sizes = {"batch": 1, "rows": build.k[-1] + 1 if name == "drafter" else rows, "edits": 1, "top": 1}
    widths = {role: model.vocab_rows for role, model in manifest.models.items()}
    inputs, outputs = sampler_tensors(name, widths["target"], widths["draft"])
    tensors = {
        each.name: device.zeros(
            tuple(size if isinstance(size, int) else sizes[size] for size in each.shape), each.dtype, "the samplers"
        )
        for each in (*inputs, *outputs)
    }
    candidates = 1
    if "settings" in tensors:
        device.write(tensors["settings"], np.array([[1, 0, 0.9, 0, 1, 0, 0, 0]]))
        candidates = min(CANDIDATES[0], widths["target"])
    launch = engine.bind(tensors | {"candidates": host_buffer(np.array([candidates], dtype=np.int64))})

    def run() -> None:
        launch()
        device.synchronize()

    return run


def _cost(run: Callable[[], None]) -> Cost:
    run()
    times = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        run()
        times.append(round(1000 * (time.perf_counter() - started), 4))
    return Cost(median=statistics.median(times), fastest=min(times), slowest=max(times), runs=TIMED_RUNS)
