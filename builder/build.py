"""`outrider build-engine`: an ONNX pair becomes a bundle of engines with fixed k profiles.

ONNX Runtime's are measured at once; TensorRT's may be built where no GPU is.
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import msgspec

from outrider.backends.onnxruntime.build import fuse_pair, package_version
from outrider.backends.open import open_bundle
from outrider.backends.tensorrt.build import Facts, Job, Options, build_plan, check_options, facts
from outrider.backends.tensorrt.profiles import sampler_profiles, step_profiles
from outrider.bundle.folder import check_files, digest_all, read_manifest, staged, write_whole
from outrider.bundle.manifest import (
    MANIFEST,
    ROLES,
    TENSORRT,
    Build,
    Manifest,
    Profile,
    engine_file,
    model_file,
    sampler_file,
)
from outrider.calibration.acceptance import measure_acceptance
from outrider.calibration.passes import measure
from outrider.engines.contract import cache_tensors, window_buckets
from outrider.errors import EngineError, FolderError, OutriderError, UsageError
from outrider.progress import SILENT, Progress

DEFAULT_CAPACITY = 1024
DEFAULT_CHUNK = 64
MAX_ELEMENTS = 2**40  # of a tensor, in TensorRT


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
    _check_device(backend, device)
    if backend in TENSORRT:
        _check_volumes(manifest, capacity, batch, max(max_prompt_chunk, k[-1] + 1))
    package = facts(backend, options) if backend in TENSORRT else None
    with staged(output) as folder:
        check_files(source, manifest, progress)
        _copy(source, folder, output, manifest, package is None, progress)
        build = Build(
            backend=backend,
            backend_version=package_version() if package is None else package.version,
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
            build = msgspec.structs.replace(build, rewrites=fuse_pair(source, folder, manifest, build, progress))
        manifest = msgspec.structs.replace(manifest, files=digest_all(folder, progress))
        try:
            build = _measured(folder, manifest, build, progress)
        except EngineError as error:
            if backend != "tensorrt-rtx":
                raise
            progress.stage(f"not measured, as it does not run here ({error})")  # it is built for other machines, too
        sealed = msgspec.structs.replace(manifest, build=build)
        (folder / MANIFEST).write_bytes(sealed.encode())
    return sealed


def calibrate(bundle: Path, progress: Progress = SILENT, device: str | None = None) -> Manifest:
    """Measure a bundle's costs on this machine, and its draft's acceptance, and put them into its manifest in place of those
    it had.

    Args:
        device: for onnxruntime, where it is measured, and runs from then on unless told otherwise: "cpu" or "cuda"; None is
            as before.

    Raises:
        FolderError: the folder is no bundle, is damaged, or cannot be written.
        EngineError: an engine does not run here.
        UsageError: the backend has no choice of devices.
    """
    manifest, build = open_bundle(bundle, progress)
    if device is not None:
        _check_device(build.backend, device)
        build = msgspec.structs.replace(build, device=device)
    write_whole(bundle / MANIFEST, manifest.encode())  # what cannot be written is said before minutes of measuring
    sealed = msgspec.structs.replace(manifest, build=_measured(bundle, manifest, build, progress))
    write_whole(bundle / MANIFEST, sealed.encode())
    return sealed


def _check_device(backend: str, device: str | None) -> None:
    if backend in TENSORRT and device is not None:
        raise UsageError(f"--device does not apply to the backend {backend}", "leave it out; it is for onnxruntime")


def _measured(folder: Path, manifest: Manifest, build: Build, progress: Progress) -> Build:
    build = msgspec.structs.replace(build, costs=measure(folder, manifest, build, progress))
    accepted = build.acceptance
    gc.collect()  # launches hold buffers, and some hold each other; both models are in memory now
    try:
        accepted = measure_acceptance(folder, manifest, build, progress)
    except (OutriderError, MemoryError) as error:  # a bundle is of use without: what rounds accept is seen soon enough
        progress.stage(f"acceptance is not measured ({error})")
    return msgspec.structs.replace(build, acceptance=accepted)


def _check_volumes(manifest: Manifest, capacity: int, batch: int, rows: int) -> None:
    for role, model in manifest.models.items():
        caches = [batch * capacity * tensor.heads * tensor.width for tensor in cache_tensors(model.layers)]
        if (volume := max([*caches, batch * rows * model.vocab_rows])) >= MAX_ELEMENTS:
            raise UsageError(
                f"a tensor of the {role} would have {volume:,} elements; TensorRT takes less than {MAX_ELEMENTS:,}",
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
    steps = step_profiles(k, capacity, batch, chunk)
    samplers = {name: sampler_profiles(name, k, batch, *manifest.widths) for name in manifest.samplers}
    return {**dict.fromkeys(manifest.roles, steps), **samplers}


def _compile(
    source: Path, folder: Path, manifest: Manifest, build: Build, package: Facts, options: Options, progress: Progress
) -> None:
    """Write the plan of every engine."""
    weights = sum(manifest.files[model_file(role) + ".data"].size for role in manifest.roles)
    asked = (
        f"a batch of {build.batch}, a capacity of {build.capacity}, a prompt chunk of {build.max_prompt_chunk},"
        f" k = {', '.join(map(str, build.k))}, {weights:,} bytes of weights"
    )
    for name in manifest.engines:
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
