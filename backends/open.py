"""A bundle opened: its manifest checked, its files checked, its engines ready to run."""

from __future__ import annotations

from pathlib import Path

from outrider.bundle.folder import check_files, read_manifest
from outrider.bundle.manifest import Build, Manifest
from outrider.engines.device import Cpu, Device
from outrider.engines.session import Engines
from outrider.errors import EngineError, FolderError, UsageError
from outrider.progress import SILENT, Progress


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


def open_engines(folder: Path, manifest: Manifest, build: Build, device: str | None = None) -> Engines:
    """A bundle's engines.

    Args:
        device: "cpu" or "cuda"; None is what the bundle was built on.

    Raises:
        EngineError: the backend is not installed, not known, or does not run here.
        UsageError: it does not run on that device.
    """
    if (device or build.device) == "cuda" and any(build.rewrites.values()):
        raise UsageError("this bundle's graphs are fused for the CPU", "build the export again with --device cuda")
    if build.backend == "onnxruntime":
        try:
            from outrider.backends.onnxruntime.engine import OnnxRuntime
        except ImportError as error:
            raise EngineError(f"onnxruntime cannot be imported: {error}", "pip install 'outrider[cpu]'") from error
        return OnnxRuntime(folder, manifest, build, _device(device or build.device))
    if build.backend in ("tensorrt", "tensorrt-rtx"):
        if device == "cpu":
            raise UsageError(f"{build.backend} does not run on a CPU", "build the export with --backend onnxruntime")
        from outrider.backends.tensorrt.engine import TensorRT

        return TensorRT(folder, manifest, build)
    raise EngineError(f"this outrider has no backend {build.backend!r}", "upgrade outrider, or build the bundle again")


def _device(name: str) -> Device:
    if name == "cpu":
        return Cpu()
    if name == "cuda":
        from outrider.engines.cuda import Cuda

        return Cuda()
    raise UsageError(f"there is no device {name!r}", "give cpu or cuda")
