"""A bundle opened: its manifest checked, its files checked, its engines ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.engines.errors import EngineError, FolderError
from outrider.engines.folder import check_files, read_manifest
from outrider.engines.manifest import Build, Manifest, model_file, sampler_file
from outrider.engines.progress import SILENT, Progress
from outrider.engines.session import Sampler, Session


def open_bundle(folder: Path, progress: Progress = SILENT) -> tuple[Manifest, Build]:
    """The manifest of a bundle and how it was built, every file's digest checked.

    Raises:
        FolderError: see `engines.folder`; or the folder is an export that no engine was built from.
    """
    manifest = read_manifest(folder)
    if manifest.build is None:
        raise FolderError(f"{folder} is an export, not a bundle", f"build it first: outrider build-engine {folder} -o BUNDLE")
    check_files(folder, manifest, progress)
    return manifest, manifest.build


def open_session(folder: Path, manifest: Manifest, build: Build, role: str, batch: int) -> Session:
    """The engine of one role with a fresh cache for `batch` sequences.

    Raises:
        EngineError: the backend is not installed, not known, or refuses the engine.
    """
    session: Session = _backend(build).OnnxRuntimeSession(
        folder / model_file(role),
        manifest.models[role],
        batch=batch,
        capacity=build.capacity,
        max_rows=build.max_rows,
        windows=build.windows,
    )
    return session


def open_sampler(folder: Path, manifest: Manifest, build: Build, name: str) -> Sampler:
    """One of `contract.SAMPLERS`.

    Raises:
        EngineError: as for `open_session`.
    """
    rows = {role: model.vocab_rows for role, model in manifest.models.items()}
    sampler: Sampler = _backend(build).OnnxRuntimeSampler(folder / sampler_file(name), name, rows["target"], rows["draft"])
    return sampler


def _backend(build: Build) -> Any:
    if build.backend != "onnxruntime":
        raise EngineError(f"this outrider has no backend {build.backend!r}", "upgrade outrider, or build the bundle again")
    try:
        from outrider.engines import onnxruntime
    except ImportError as error:
        raise EngineError(f"onnxruntime cannot be imported: {error}", "pip install 'outrider[cpu]'") from error
    return onnxruntime
