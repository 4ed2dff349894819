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
    return manifest, manifest.build


def open_engines(folder: Path, manifest: Manifest, build: Build, device: str | None = None) -> Engines:
    """Return a bundle's engines.

    Args:
        device: one of the backend's `devices`, for all engines; None is what the bundle was built for, which may be another
            device, and another number of threads, for each stage.

    Raises:
        UsageError: the backend does not run on that device.
        EngineError: the backend is unknown, not installed, or does not run here.
    """
    backend = registry.get(build.backend)
    if device is not None or not build.stages:
        return backend.open(folder, manifest, build.in_one_place, device)
    *places, last = build.places
    engines = backend.open(folder, manifest, build, last)
    engines.others = {place: backend.open(folder, manifest, build, place) for place in {*places} - {last}}
    return engines


def open_stage(folder: Path, manifest: Manifest, build: Build, index: int, device: str | None = None) -> Engines:
    """Return the engines that one stage of the target needs in a process of its own, whose GPU is the first that it sees.

    Args:
        index: of the stage.
        device: see `open_engines`, as are the errors.
    """
    build = build if device is None else build.in_one_place
    return registry.get(build.backend).open(folder, manifest, build, (device or build.places[index]).partition(":")[0])
