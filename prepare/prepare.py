"""Make what is missing to run a model: export it, build the export, and keep both in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from outrider.builder.build import build_engine, check_capacity
from outrider.builder.defaults import K, backends, capacity_and_batch, sequence_bytes
from outrider.bundle.folder import has_manifest, read_manifest
from outrider.bundle.manifest import MANIFEST, Manifest
from outrider.engines.device import Device
from outrider.engines.threads import processor_name, thread_count
from outrider.errors import FolderError, ParityError, SourceError, UsageError, reason_of
from outrider.export.arguments import ExportArguments
from outrider.export.checkpoints.adapters import Adapter
from outrider.export.checkpoints.source import MTP, NONE, Source
from outrider.export.garbage import exporter, without_garbage_collection
from outrider.export.weights.rounding import AS_IS
from outrider.prepare.cache import Cache, checked
from outrider.prepare.precision import NEXT_PRECISION, PRECISION, default_precision, weight_bits, why
from outrider.prepare.wanted import Wanted
from outrider.progress import Progress
from outrider.runtime.policy.choice import AUTO

CHECKPOINT_BITS = 16  # of a weight, roughly: to predict what an export takes
GPU_BACKENDS = ("tensorrt", "tensorrt-rtx")
EXPORTERS = ("onnx-ir", "onnxscript", "torch", "transformers")  # packages that decide what a graph looks like
RUNTIMES = ("onnx-ir", "onnxruntime", "onnxruntime-gpu", "onnxscript", "openvino", "tensorrt", "tensorrt_rtx")


class Prepared(NamedTuple):
    """A bundle, and lines that tell what was chosen to make it; none if the model is a bundle.

    If the bundle is in the user's cache, `checked` is for `LoadedBundle.load`.
    """

    bundle: Path
    lines: list[str]
    checked: Path | None = None


class Pair(NamedTuple):
    """What to export. A draft without its own checkpoint has only a name."""

    target: Source
    drafts: list[Source | str]
    adapters: list[Adapter]  # of the target

    @property
    def sources(self) -> list[Source]:
        """Return the checkpoints."""
        return [self.target, *(draft for draft in self.drafts if isinstance(draft, Source))]


def prepare(wanted: Wanted, progress: Progress) -> Prepared:
    """Return the bundle of a model. What is missing is exported and built first, into the user's cache.

    Args:
        wanted: its model is a bundle, an export, a checkpoint's folder, a GGUF file, or an id on the hub.

    Raises:
        UsageError: options contradict each other, or do not fit what the model is.
        SourceError: the model does not exist, or cannot be read.
        FolderError: the cache cannot be written, or the disk has no room.
        OutriderError: those of the export and the build.
    """
    folder = Path(wanted.model)
    manifest = read_manifest(folder) if has_manifest(folder) else None
    if manifest is not None and manifest.build is not None:
        _refuse(wanted, wanted.options, "a bundle, which is made already")
        return Prepared(folder, [])
    _check(wanted)
    if manifest is not None:
        _refuse(wanted, [each for each in wanted.options if each in ("--draft", "--lora", "--precision")], "an export")
        return _prepared(wanted, None, progress)
    target = _source(wanted.model)
    drafts = [draft if draft in (NONE, MTP) else Source.parse(draft) for draft in wanted.drafts]
    return _prepared(wanted, Pair(target, drafts, [Adapter.parse(each) for each in wanted.lora]), progress)


def _check(wanted: Wanted) -> None:
    """Refuse, before the work of an export, what the bundle will not have.

    Raises:
        UsageError: the capacity does not hold a round, or k was not built.
    """
    if wanted.capacity is not None:
        check_capacity(wanted.capacity, K)
    if wanted.k not in (AUTO, 0, *K):
        raise UsageError(
            f"k = {wanted.k} is not built into a bundle that is made from a model's name; it has k ="
            f" {', '.join(map(str, (0, *K)))}",
            "choose one of these or auto, or build a bundle with outrider build-engine --k",
        )


def _refuse(wanted: Wanted, options: list[str], what: str) -> None:
    if options:
        raise UsageError(
            f"{wanted.model} is {what}, and {options[0]} does not apply to it", "leave it out, or pass the checkpoint"
        )


def _source(text: str) -> Source:
    """Return the source of a model; a name that is no path is one on the hub only if it has the form OWNER/NAME.

    Raises:
        SourceError, FolderError: it is no model.
    """
    path = Path(text)
    try:
        path.stat()
        exists, checkpoint = True, path.is_file() or (path / "config.json").is_file() or any(path.glob("*.gguf"))
    except (FileNotFoundError, NotADirectoryError):
        exists = checkpoint = False
    except (OSError, ValueError) as error:  # the path is too long, contains NUL, or may not be read
        raise SourceError(
            f"{text[:200]!r} is not a model: {reason_of(error)[:100]}", "pass a bundle, a checkpoint or a hub id"
        ) from error
    if not checkpoint and (exists or text.count("/") != 1 or not text[0].isalnum()):
        read_manifest(path)  # raises the error for what is no bundle
    return Source.parse(text)


def _prepared(wanted: Wanted, pair: Pair | None, progress: Progress) -> Prepared:
    """Return the bundle of a target and its drafts, or of an export."""
    cache, lines, path = Cache.of_user(), list[str](), Path(wanted.model)
    if pair is None:
        label, made_from = path.resolve().name, {"export": hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()}
    else:
        label, made_from = pair.target.name.removesuffix(".gguf"), _export_key(wanted, pair)

    def build(bundle: Path) -> None:
        export = path if pair is None else _exported(wanted, pair, made_from, label, cache, progress)
        _built(wanted, export, bundle, progress)

    built_for = {option: getattr(wanted, option) for option in ("backend", "capacity", "batch", "device")}
    bundle, made = cache.get("bundles", label, made_from | built_for | {"machine": _machine(wanted)}, build, progress)
    if made:
        lines = _choices(wanted, pair, read_manifest(bundle))
    given = f", with {shlex.join(wanted.options)}" if wanted.options else ""
    lines.append(f"{'made' if made else 'using'} {bundle}{given}; see outrider cache list")
    return Prepared(bundle, lines, checked(bundle))


def _exported(wanted: Wanted, pair: Pair, made_from: dict[str, Any], label: str, cache: Cache, progress: Progress) -> Path:
    """Return the export of a model; if int4 costs it too much and the user asked for nothing else, it is int8."""

    @without_garbage_collection()
    def make(folder: Path) -> None:
        export = exporter(progress)

        def arguments(precision: str) -> ExportArguments:
            return ExportArguments.check(pair.target, pair.drafts, folder, precision=precision, lora=pair.adapters)

        weights = [_weights(source, progress) for source in pair.sources]  # before anything reads a file of the hub
        precision = wanted.precision or default_precision(wanted, pair.target)
        bits = [weight_bits(precision, source) for source in pair.sources]
        _check_room([*zip(weights, bits, strict=True)], cache.root)
        try:
            export(arguments(precision), progress)
        except ParityError as error:
            if wanted.precision is not None or precision not in (AS_IS, PRECISION):
                raise
            progress.stage(f"exporting to {NEXT_PRECISION}, because {error}")
            export(arguments(NEXT_PRECISION), progress)

    return cache.get("exports", label, made_from, make, progress)[0]


def _built(wanted: Wanted, export: Path, bundle: Path, progress: Progress) -> None:
    gpu = _gpu(wanted)
    capacity, batch = capacity_and_batch(read_manifest(export), gpu.memory() if gpu else None, wanted.capacity)
    build_engine(
        export,
        bundle,
        backend=wanted.backend,
        k=K,
        capacity=capacity,
        batch=wanted.batch or batch,
        device=wanted.device,
        progress=progress,
    )


def _choices(wanted: Wanted, pair: Pair | None, manifest: Manifest) -> list[str]:
    """Return what was chosen and why, and the commands that do the same."""
    build, target, exported = manifest.build, manifest.models["target"], pair is None
    assert build is not None  # it is a bundle
    reasons = {choice.backend: choice.reason for choice in backends(manifest)}
    caches = build.batch * sequence_bytes(manifest, build.capacity) / 1e9
    quantization = target.quantization
    precision = AS_IS if quantization is not None and quantization.method == AS_IS else target.precision
    rounding = f" in groups of {quantization.block}" if quantization is not None and precision != AS_IS else ""
    why_precision = "the export's" if pair is None else "as asked" if wanted.precision else why(precision, wanted, pair.target)
    by_rule = reasons.get(build.backend, "") if wanted.device in (None, "cpu") else f"for the device {wanted.device}"
    why_backend = by_rule if wanted.backend == AUTO else "as asked"
    parts = [part for draft in wanted.drafts for part in ("--draft", draft)]
    parts += [part for adapter in wanted.lora for part in ("--lora", adapter)]
    export = ["outrider", "export", "--target", wanted.model, *parts, "--precision", precision, "-o", "EXPORT"]
    sizes = ["--device", wanted.device] if wanted.device else []
    sizes += ["--capacity", str(build.capacity), "--batch", str(build.batch), "-o", "BUNDLE"]
    source = wanted.model if exported else "EXPORT"
    by_hand = [] if exported else [f"by hand: {shlex.join(export)}"]
    return [
        f"precision {precision}{rounding}: {why_precision}",
        f"backend {build.backend}: {why_backend}",
        f"capacity {build.capacity:,}, batch {build.batch}: {caches:.2f} GB of caches; each round chooses k",
        *by_hand,
        f"by hand: {shlex.join(['outrider', 'build-engine', source, '--backend', build.backend, *sizes])}",
    ]


def _export_key(wanted: Wanted, pair: Pair) -> dict[str, Any]:
    """Return what an export depends on."""
    return {
        "sources": [_identity(source) for source in pair.sources],
        "drafts": [_utf8(draft) for draft in wanted.drafts],
        "adapters": [[_identity(adapter.source), adapter.weight] for adapter in pair.adapters],
        "precision": wanted.precision,
        "gpu": wanted.device == "cuda",
        "packages": {name: _version(name) for name in EXPORTERS},
    }


def _identity(source: Source) -> dict[str, Any]:
    """Return what tells a source's content without reading it: the commit on the hub, or names, sizes and times of files."""
    if source.snapshot is not None:
        return {"hub": source.name, "revision": source.snapshot.revision}
    statuses = _statuses(source)
    files = [[_utf8(name), status.st_size, status.st_mtime_ns] for name, status in statuses.items()]
    return {"path": _utf8(str(Path(source.location).resolve())), "files": files}


def _weights(source: Source, progress: Progress) -> float:
    """Return roughly how many weights a source has. A GGUF file tells their number; it is downloaded first."""
    if source.gguf is not None:
        source.download(progress)
        from outrider.export.checkpoints.gguf_reader import open_gguf

        try:
            tensors = open_gguf(source.gguf).tensors
        except Exception:  # the export names what is wrong with the file
            return 0.0
        return float(sum(int(tensor.n_elements) for tensor in tensors))
    files = source.snapshot.files if source.snapshot else {name: each.st_size for name, each in _statuses(source).items()}
    return 8 * sum(files.values()) / (source.stored_bits() or CHECKPOINT_BITS)


def _utf8(name: str) -> str:
    """Return a file's name as text that JSON can have: a name may be any bytes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _statuses(source: Source) -> dict[str, os.stat_result]:
    """Return the status of each of a local source's files, by name."""
    folder = Path(source.location)
    paths = [*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja")]
    paths = [folder / name for name in source.options.values()] or [path for path in paths if not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.stat() for path in sorted(paths) if path.is_file()}


def _check_room(models: list[tuple[float, float]], root: Path) -> None:
    """Check that the disk has room for an export and its bundle, roughly, given the models' weights and bits of each weight.

    Raises:
        FolderError: it does not have enough room.
    """
    # An export rounds into temporary files of bytes.
    needed = sum(weights * max(2 * bits, bits + (8 if bits < 16 else 0)) / 8 for weights, bits in models)
    free = shutil.disk_usage(root).free
    if needed > free:
        raise FolderError(
            f"no room in the cache {root}: the model takes about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            "free some disk space, run outrider cache prune, or set $OUTRIDER_CACHE to a folder on a larger disk",
        )


def _machine(wanted: Wanted) -> dict[str, Any]:
    """Return what measured costs depend on: the processor, its usable cores, the GPU, and the packages that run the engines.

    Raises:
        DeviceError: there is no GPU that was asked for.
    """
    gpu = _gpu(wanted)
    packages = {name: _version(name) for name in RUNTIMES}
    return {"processor": processor_name(), "threads": thread_count(), "gpu": gpu.name if gpu else None, "packages": packages}


def _gpu(wanted: Wanted) -> Device | None:
    """Return the GPU that the bundle is for.

    Raises:
        DeviceError: there is none.
    """
    if wanted.device != "cuda" and wanted.backend not in GPU_BACKENDS:
        return None
    from outrider.engines.cuda import Cuda

    return Cuda()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
