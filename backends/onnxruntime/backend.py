"""The backend `onnxruntime`: graphs and weights of the export, fused if the results stay the same."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec

from outrider.backends.base import Backend, Engines, import_package
from outrider.backends.build_spec import BuildSpec
from outrider.backends.onnxruntime.package import EXTRA, MASK_FREE
from outrider.bundle.manifest import Build, Manifest, Model, graph_files
from outrider.engines.contract import StageBackend
from outrider.engines.device import Cpu, Device
from outrider.engines.precisions import BATCH_INVARIANT_BLOCK, PRECISIONS
from outrider.engines.threads import thread_count
from outrider.errors import OutriderWarning, UsageError
from outrider.progress import Progress


class OnnxRuntimeBackend(Backend):
    """ONNX Runtime, on the CPU or on CUDA."""

    name = "onnxruntime"
    extra = EXTRA
    devices = ("cpu", "cuda")
    numbered = ("cuda",)
    cuts = True

    def build(self, spec: BuildSpec, folder: Path, progress: Progress) -> Build:
        """Copy the export, with fused graphs that compute the same in place of its own; see `Backend.build`."""
        version = import_package("onnxruntime", EXTRA).__version__
        device = spec.device or self.devices[0]
        build = spec.result(self.name, version, device, stages=spec.stages(device))
        if build.device == "cpu":
            _check_block(spec.manifest.models["target"])
        from outrider.backends.onnxruntime.pool import create_pool

        create_pool(thread_count(), shared=not build.separates_pools)  # before graphs are optimized
        spec.copy_except(spec.manifest.roles, folder, progress)
        from outrider.backends.onnxruntime.fuse_bundle import fuse_bundle

        rewrites = fuse_bundle(spec.source, folder, spec.manifest, build, progress, spec.parts)
        return msgspec.structs.replace(build, rewrites=rewrites)

    def build_stages(self, spec: BuildSpec, folder: Path, build: Build, progress: Progress) -> StageBackend:
        """Write stages as fused graphs; see `Backend.build_stages`."""
        version = import_package("onnxruntime", EXTRA).__version__
        from outrider.backends.onnxruntime.fuse_bundle import fuse_bundle
        from outrider.backends.onnxruntime.pool import create_pool

        create_pool(thread_count(), shared=not build.separates_pools)  # before graphs are optimized
        target = msgspec.structs.replace(spec.manifest, models={"target": spec.manifest.models["target"]})
        rewrites = fuse_bundle(spec.source, folder, target, build, progress, spec.parts)
        return StageBackend(self.name, version, rewrites.get("target", {}))

    def open(self, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        """Return the graphs, loaded by ONNX Runtime; see `Backend.open`."""
        device = device or build.device
        if device != "cpu" and any(counts.keys() - {MASK_FREE} for counts in build.rewrites.values()):
            raise UsageError("this bundle's graphs are fused for the CPU", "build the export again with --device cuda")
        import_package("onnxruntime", EXTRA)
        from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines
        from outrider.backends.onnxruntime.pool import create_pool

        if build.limits_threads and create_pool(thread_count(), shared=False):
            warnings.warn(
                f"all stages have {thread_count()} threads, because this process has opened a bundle without --stage-device"
                " threads before; open it in a process of its own",
                OutriderWarning,
                stacklevel=2,
            )
        return OnnxRuntimeEngines(folder, manifest, build, _device(device))

    def engine_files(self, name: str) -> tuple[str, ...]:
        """Return the same paths as in the export."""
        return graph_files(name)


def _check_block(target: Model) -> None:
    """Warn if a row's bits depend on the number of rows, so that near-ties may be decided differently."""
    limit = BATCH_INVARIANT_BLOCK.get(PRECISIONS[target.precision].weight_bits)
    if limit is not None and target.quantization is not None and target.quantization.block > limit:
        warnings.warn(
            f"with groups of {target.quantization.block}, ONNX Runtime's last bits depend on the number of rows: plain and"
            f" speculative texts may differ; export with --group-size {limit}, or build with --backend openvino",
            OutriderWarning,
            stacklevel=3,
        )


def _device(name: str) -> Device:
    if name == "cpu":
        return Cpu()
    if not OnnxRuntimeBackend().has(name):
        raise UsageError(f"there is no device {name!r}", "use cpu, cuda, or cuda:1 for the second GPU")
    from outrider.engines.cuda import Cuda

    return Cuda(int(name.partition(":")[2] or 0))
