"""The stages of `scripts/gpu-check`, in order: a stage is a module with `check(report, folders)`, and a line here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.stages.base import Folders


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the check that stands alone."""

    name: str
    title: str
    needs_gpu: bool = True

    def check(self, report: Report, folders: Folders) -> None:
        """Run the stage. What it needs is imported now, because one stage may lack what another has."""
        module = importlib.import_module(f"{__name__}.{self.name.replace('-', '_')}")
        module.check(report, folders)


STAGES = {
    stage.name: stage
    for stage in (
        Stage("exports", "exports the shipped pair, unless there are exports already", needs_gpu=False),
        Stage("device", "the device layer alone, without engines"),
        Stage("onnxruntime-cuda", "ONNX Runtime with CUDA"),
        Stage("tensorrt-rtx", "TensorRT-RTX"),
        Stage("tensorrt-full", "TensorRT"),
        Stage("with-transformers", "transformers, plain and assisted"),
        Stage("large-pair", "random weights in the shape of a 7B target and a 0.5B draft"),
    )
}
