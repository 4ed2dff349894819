"""Make what is missing to run a model: export it, build the export, and keep both in the user's cache."""

from __future__ import annotations

import hashlib
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from outrider.backends import registry
from outrider.builder.build import build_engine, check_capacity
from outrider.builder.defaults import K, backends, capacity_and_batch, sequence_bytes
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import MANIFEST, Manifest
from outrider.engines.precisions import PRECISIONS
from outrider.engines.threads import processor_name, thread_count
from outrider.errors import FolderError, ParityError, SourceError, UsageError, reason_of
from outrider.export.checkpoints.source import MTP, NONE, Source
from outrider.prepare.cache import Cache
from outrider.prepare.wanted import Wanted
from outrider.progress import Progress
from outrider.runtime.policy.choice import AUTO

PRECISION, NEXT_PRECISION, GPU_PRECISION = "int4", "int8", "fp16"  # the second if the first costs a model too much
REASONS = {PRECISION: "the fastest", NEXT_PRECISION: f"{PRECISION} costs this model too much", GPU_PRECISION: "for a GPU"}
GGUF_BITS, CHECKPOINT_BITS = 4, 16  # of a weight, roughly: to predict what an export takes


class Prepared(NamedTuple):
    """A bundle, and lines that tell what was chosen to make it; none if the model is a bundle."""

    bundle: Path
    lines: list[str]


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
    if wanted.capacity is not None:
        check_capacity(wanted.capacity, K)  # before the work of an export
    if _has_manifest(folder):
        manifest = read_manifest(folder)
        if manifest.build is not None:
            _refuse(wanted, wanted.options, "a bundle, which is made already")
            return Prepared(folder, [])
        _refuse(wanted, [each for each in wanted.options if each in ("--draft", "--precision")], "an export")
        sources: dict[str, Any] = {"export": hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()}
        return _prepared(wanted, None, sources, 0.0, progress)
    parsed = [_source(wanted.model), *(Source.parse(draft) for draft in wanted.drafts if draft not in (NONE, MTP))]
    contents = [_contents(source) for source in parsed]
    made_from = {"sources": [identity for identity, _ in contents]}
    return _prepared(wanted, parsed[0].name, made_from, sum(weights for _, weights in contents), progress)


def _has_manifest(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).exists()
    except (OSError, ValueError):  # the path is too long, contains NUL, or may not be read
        return False


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


def _prepared(wanted: Wanted, name: str | None, made_from: dict[str, Any], weights: float, progress: Progress) -> Prepared:
    """Return the bundle of a source with this name and so many weights, or of an export, whose name is None."""
    cache, lines = Cache.of_user(), list[str]()
    label = (name or Path(wanted.model).resolve().name).removesuffix(".gguf")
    exported_from = made_from | {
        "drafts": [_utf8(draft) for draft in wanted.drafts],
        "precision": wanted.precision,
        "gpu": wanted.device == "cuda",
    }

    def build(bundle: Path) -> None:
        export = Path(wanted.model) if name is None else _exported(wanted, weights, exported_from, label, cache, progress)
        _built(wanted, export, bundle, progress)

    built_for = {option: getattr(wanted, option) for option in ("backend", "capacity", "batch", "device")}
    bundle, made = cache.get("bundles", label, exported_from | built_for | {"machine": _machine()}, build, progress)
    if made:
        lines = _choices(wanted, name is None, read_manifest(bundle))
    given = f", with {shlex.join(wanted.options)}" if wanted.options else ""
    return Prepared(bundle, [*lines, f"{'made' if made else 'using'} {bundle}{given}; see outrider cache list"])


def _exported(wanted: Wanted, weights: float, made_from: dict[str, Any], label: str, cache: Cache, progress: Progress) -> Path:
    """Return the export of a model; if int4 costs it too much and the user asked for nothing else, it is int8."""

    def export(folder: Path) -> None:
        precision = wanted.precision or (GPU_PRECISION if wanted.device == "cuda" else PRECISION)
        _check_room(weights, precision, cache.root)
        progress.stage("importing torch and transformers")
        from outrider.export.pair import export_pair

        draft = list(wanted.drafts) or None
        try:
            export_pair(wanted.model, draft, folder, progress=progress, precision=precision)
        except ParityError as error:
            if wanted.precision is not None or precision != PRECISION:
                raise
            progress.stage(f"exporting to {NEXT_PRECISION}, because {error}")
            export_pair(wanted.model, draft, folder, progress=progress, precision=NEXT_PRECISION)

    return cache.get("exports", label, made_from, export, progress)[0]


def _built(wanted: Wanted, export: Path, bundle: Path, progress: Progress) -> None:
    capacity, batch = capacity_and_batch(read_manifest(export), capacity=wanted.capacity)
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


def _choices(wanted: Wanted, exported: bool, manifest: Manifest) -> list[str]:
    """Return what was chosen and why, and the commands that do the same."""
    build, target = manifest.build, manifest.models["target"]
    assert build is not None  # it is a bundle
    reasons = {choice.backend: choice.reason for choice in backends(manifest)}
    caches = build.batch * sequence_bytes(manifest, build.capacity) / 1e9
    rounding = f" in groups of {target.quantization.block}" if target.quantization else ""
    why_precision = "as asked" if wanted.precision else "the export's" if exported else REASONS[target.precision]
    why_backend = reasons.get(build.backend, "as asked") if wanted.backend == AUTO else "as asked"
    drafts = [part for draft in wanted.drafts for part in ("--draft", draft)]
    export = ["outrider", "export", "--target", wanted.model, *drafts, "--precision", target.precision, "-o", "EXPORT"]
    sizes = ["--device", wanted.device] if wanted.device else []
    sizes += ["--capacity", str(build.capacity), "--batch", str(build.batch), "-o", "BUNDLE"]
    source = wanted.model if exported else "EXPORT"
    by_hand = [] if exported else [f"by hand: {shlex.join(export)}"]
    return [
        f"precision {target.precision}{rounding}: {why_precision}",
        f"backend {build.backend}: {why_backend}",
        f"capacity {build.capacity:,}, batch {build.batch}: {caches:.2f} GB of caches; each round chooses k",
        *by_hand,
        f"by hand: {shlex.join(['outrider', 'build-engine', source, '--backend', build.backend, *sizes])}",
    ]


def _contents(source: Source) -> tuple[dict[str, Any], float]:
    """Return what tells a source's content without reading it, the commit on the hub, or names, sizes and times of files; and
    roughly how many weights it has."""
    location = Path(source.location)
    if not location.exists():
        from outrider.export.checkpoints.hub import Snapshot

        snapshot = Snapshot.read(source.location)
        return {"hub": source.location, "revision": snapshot.revision}, 8 * sum(snapshot.files.values()) / CHECKPOINT_BITS
    statuses = {name: (location / name).stat() for name in _files(source)}
    files = [[_utf8(name), status.st_size, status.st_mtime_ns] for name, status in statuses.items()]
    size, bits = sum(status.st_size for status in statuses.values()), GGUF_BITS if source.options else CHECKPOINT_BITS
    return {"path": _utf8(str(location.resolve())), "files": files}, 8 * size / bits


def _utf8(name: str) -> str:
    """Return a file's name as text that JSON can have: a name may be any bytes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _files(source: Source) -> list[str]:
    """Return the names of a local source's files."""
    if source.options:
        return list(source.options.values())
    folder = Path(source.location)
    paths = [*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja")]
    return sorted(str(path.relative_to(folder)) for path in paths if path.is_file() and not path.name.startswith("."))


def _check_room(weights: float, precision: str, root: Path) -> None:
    """Check that the disk has room for an export and its bundle, roughly.

    Raises:
        FolderError: it has not.
    """
    needed = 2 * weights * PRECISIONS[precision].weight_bits / 8
    free = shutil.disk_usage(root).free
    if needed > free:
        raise FolderError(
            f"no room in the cache {root}: the model takes about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            "free some disk space, run outrider cache prune, or set $OUTRIDER_CACHE to a folder on a larger disk",
        )


def _machine() -> dict[str, Any]:
    """Return what measured costs depend on: the processor, its usable cores, and the packages that run the engines."""
    packages = {name: _version(name) for name in registry.names()}
    return {"processor": processor_name(), "threads": thread_count(), "packages": packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
