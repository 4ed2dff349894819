"""A bundle opened: its manifest checked, its files checked, its engines ready to run."""

from __future__ import annotations

from pathlib import Path

from outrider.engines.errors import EngineError, FolderError
from outrider.engines.folder import check_files, read_manifest
from outrider.engines.manifest import Build, Manifest, model_file
from outrider.engines.progress import SILENT, Progress
from outrider.engines.session import Session


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
    if build.backend != "onnxruntime":
        raise EngineError(f"this outrider has no backend {build.backend!r}", "upgrade outrider, or build the bundle again")
    try:
        from outrider.engines.onnxruntime import OnnxRuntimeSession
    except ImportError as error:
        raise EngineError(f"onnxruntime cannot be imported: {error}", "pip install 'outrider[cpu]'") from error
    return OnnxRuntimeSession(
        folder / model_file(role),
        manifest.models[role],
        batch=batch,
        capacity=build.capacity,
        max_rows=max(build.max_prompt_chunk, *(k + 1 for k in build.k), 2),
        windows=build.windows,
    )
