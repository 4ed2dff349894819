"""The backend `openvino`: step models rewritten for a paged cache, and compiled when they are loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from outrider.backends.base import Backend, Engines, import_package
from outrider.backends.build_spec import BuildSpec
from outrider.bundle.manifest import Build, Manifest, graph_files, model_file
from outrider.engines.contract import StageBackend
from outrider.errors import EngineError, UsageError, reason_of
from outrider.progress import Progress

EXTRA = "openvino"
OTHER_BACKEND = "build the export with --backend onnxruntime"
UPGRADE = f"pip install -U 'outrider[{EXTRA}]'"
DEVICES = ("cpu", "gpu", "npu")  # the last two are Intel's, and were not tried


class OpenVinoBackend(Backend):
    """OpenVINO, on the CPU or Intel's other processors."""

    name = "openvino"
    extra = EXTRA
    devices = DEVICES
    cuts = True

    def build(self, spec: BuildSpec, folder: Path, progress: Progress) -> Build:
        """Rewrite the models, copy the rest, and compare OpenVINO's results with the export's; see `Backend.build`."""
        version, manifest, device = package_version(), spec.manifest, spec.device or DEVICES[0]
        build = spec.result(self.name, version, device, stages=spec.stages(device))
        spec.copy_except(manifest.roles, folder, progress)
        rewrites = {role: self._rewrite(spec, folder, build, role, progress) for role in manifest.roles}
        if not build.other_backends:
            from outrider.backends.rewriting.sharing import share_with_target

            share_with_target(folder, manifest.roles, build.files("target"))
        build = msgspec.structs.replace(build, rewrites=rewrites)
        if build.device == "cpu":
            from outrider.backends.comparison import check_same, passes_of_check

            engines = self.open(folder, manifest, build, "cpu")  # before ONNX Runtime creates its threads
            for role in manifest.roles[1:] if build.other_backends else manifest.roles:
                progress.stage(f"comparing the {role} with the export", passes_of_check(build))
                check_same(spec.source, engines, role, progress)
        return build

    def build_stages(self, spec: BuildSpec, folder: Path, build: Build, progress: Progress) -> StageBackend:
        """Rewrite stages; see `Backend.build_stages`."""
        version = package_version()
        return StageBackend(self.name, version, self._rewrite(spec, folder, build, "target", progress))

    def _rewrite(self, spec: BuildSpec, folder: Path, build: Build, role: str, progress: Progress) -> dict[str, int]:
        """Write the graphs of a role that this backend builds, and return how often each rewrite was applied."""
        try:
            from outrider.backends.openvino.rewrite import NotExpressible, rewrite
            from outrider.backends.rewriting.parts import graphs
        except ImportError as error:
            raise EngineError(f"cannot rewrite the graphs: {error}", "pip install 'outrider[openvino,build]'") from error
        progress.stage(f"rewriting the {role}")
        (folder / model_file(role)).parent.mkdir(exist_ok=True)
        counts: Counter[str] = Counter()
        try:
            made = graphs(spec.source, role, build.stages_of(role), spec.parts)
            for name in build.own_files(role):
                counts.update(rewrite(made[name], folder / name))
        except NotExpressible as error:
            raise EngineError(f"the {role} has {error}, which {self.name} does not support", OTHER_BACKEND) from error
        except (MemoryError, OSError):
            raise
        except Exception as error:  # a rewrite may raise anything on a new kind of graph
            raise EngineError(f"the {role} cannot be rewritten for {self.name}: {reason_of(error)}", OTHER_BACKEND) from error
        return dict(counts)

    def open(self, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        """Return the engines, which are compiled when a session is created; see `Backend.open`."""
        processor = device or build.device
        if processor not in DEVICES:
            raise UsageError(f"{self.name} does not run on {processor}", f"use one of {', '.join(DEVICES)}")
        version = package_version()
        try:
            from outrider.backends.openvino.session import OpenVinoEngines
        except ImportError as error:  # it has no paged attention, or another name for it
            raise EngineError(f"OpenVINO {version} does not work with this outrider: {error}", UPGRADE) from error
        return OpenVinoEngines(folder, manifest, build, processor)

    def engine_files(self, name: str) -> tuple[str, ...]:
        """Return the same paths as in the export."""
        return graph_files(name)


def package_version() -> str:
    """Return the installed release of OpenVINO, after checking for ONNX Runtime, which runs the samplers.

    Raises:
        EngineError: one of them is missing.
    """
    import_package("onnxruntime", EXTRA)
    return str(import_package("openvino", EXTRA).__version__.split("-")[0])
