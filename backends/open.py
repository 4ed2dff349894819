"""Opens bundles: checks the manifest and every file, then lets the bundle's backend open the engines."""

from __future__ import annotations

from pathlib import Path

from outrider.backends import registry
from outrider.backends.base import Engines
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.bundle.manifest import Build, Manifest
from outrider.errors import FolderError
from outrider.progress import SILENT, Progress


def open_bundle(folder: Path, progress: Progress = SILENT) -> tuple[Manifest, Build]:
    """Return a bundle's manifest and its `Build`, after checking the digest of every file.

    Raises:
        FolderError: the folder is missing, damaged or of another version, or is an export.
        EngineError: this release does not have the bundle's backend.
    """
    manifest, build = read_bundle(folder)
    check_files(folder, manifest, progress)
    return manifest, build


def read_bundle(folder: Path) -> tuple[Manifest, Build]:
    """Do the same, but check only the manifest."""
    manifest = read_manifest(folder)
    if manifest.build is None:
        raise FolderError(f"{folder} is an export, not a bundle", f"build it first: outrider build-engine {folder} -o BUNDLE")
    registry.get(manifest.build.backend).check(manifest, manifest.build)
    for name in manifest.build.other_backends:
        registry.get(name).check_stages(manifest.build.seen_by(name))
    return manifest, manifest.build


def open_engines(folder: Path, manifest: Manifest, build: Build, device: str | None = None) -> Engines:
    """Return a bundle's engines.

    Args:
        device: one of the backend's `devices`, for all engines; None is what the bundle was built for, which may be another
            device, and another number of threads, for each stage, and another device for draft models.

    Raises:
        UsageError: the backend does not run on that device.
        EngineError: the backend is unknown, not installed, or does not run here.
    """
    if device is not None:
        build = build.in_one_place(device)
    *homes, last = range(len(build.homes))
    engines = _open(folder, manifest, build, last, device)
    of_homes = {build.homes[index]: index for index in homes if build.homes[index] != build.homes[last]}
    engines.others = {home: _open(folder, manifest, build, index, device) for home, index in of_homes.items()}
    return _with_drafts(engines)


def open_stage(folder: Path, manifest: Manifest, build: Build, index: int, device: str | None = None) -> Engines:
    """Return the engines that one stage of the target needs in a process of its own, whose GPU is the first that it sees.

    Args:
        index: of the stage.
        device: see `open_engines`, as are the errors.
    """
    build = build if device is None else build.in_one_place(device)
    return _open(folder, manifest, build, index, (device or build.places[index]).partition(":")[0])


def open_last(folder: Path, manifest: Manifest, build: Build, device: str | None = None) -> Engines:
    """Return the engines of the last stage and of what runs beside it, for a target whose other stages are in other processes.

    Their backends are opened, too, but no models; see `open_engines`.
    """
    build = build if device is None else build.in_one_place(device)
    engines = _open(folder, manifest, build, -1, device)
    others = {home: index for index, home in enumerate(build.homes[:-1]) if build.stages[index].backend}
    engines.others = {home: _open(folder, manifest, build, index, "cpu") for home, index in others.items()}
    return _with_drafts(engines)


def _with_drafts(engines: Engines) -> Engines:
    """Open the device of draft models, too, if it is another one."""
    build = engines.build
    if build.draft_device is not None and build.draft_device not in (build.homes[-1], *engines.others):
        away = registry.get(build.backend).open(engines.folder, engines.manifest, build, build.draft_device)
        engines.others = {**engines.others, build.draft_device: away}
    return engines


def _open(folder: Path, manifest: Manifest, build: Build, index: int, device: str | None) -> Engines:
    found = build.stages[index].backend if build.stages else None
    name = found.name if found else build.backend
    return registry.get(name).open(
        folder, manifest, build.seen_by(name), device or (build.places[index] if build.stages else None)
    )
