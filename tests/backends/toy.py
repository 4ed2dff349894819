"""A whole backend in one file: the reference evaluator of onnx runs the exported graphs, slowly, over the same buffers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from outrider.backends.base import Backend, Engines, GraphEngines
from outrider.backends.build_spec import BuildSpec
from outrider.backends.option import Option
from outrider.bundle.manifest import Build, Manifest, graph_files
from outrider.engines.contract import Stage
from outrider.engines.device import Buffer, Cpu, Engine, Launch
from outrider.progress import Progress

Array = npt.NDArray[Any]


class GatherElements(OpRun):
    """onnx's own takes at most 64 rows."""

    op_domain = ""

    def _run(self, data: Array, indices: Array, axis: int | None = None) -> tuple[Array]:
        return (np.take_along_axis(data, indices, axis=axis or 0),)


class ToyEngine(Engine):
    """One graph."""

    def __init__(self, path: Path):
        self._graph = ReferenceEvaluator(str(path), new_ops=[GatherElements])

    def bind(self, tensors: Mapping[str, Buffer]) -> Launch:
        def launch() -> None:
            with np.errstate(divide="ignore"):  # logarithms of 0, of tokens that a grammar forbids
                outputs = self._graph.run(None, {name: tensors[name].view() for name in self._graph.input_names})
            for name, values in zip(self._graph.output_names, outputs, strict=True):
                np.copyto(tensors[name].view(), values)

        return launch


class ToyEngines(GraphEngines):
    """The graphs of a bundle."""

    def step_model(self, role: str, stage: Stage | None = None) -> Engine:
        return ToyEngine(self.folder / graph_files(role)[0])

    def sampler(self, name: str) -> Engine:
        return ToyEngine(self.folder / graph_files(name)[0])


class Toy(Backend):
    """The backend `toy`, whose costs are optional, and which has an option of its own."""

    name = "toy"
    options = (Option("greeting", "What to call the device."),)
    requires_costs = False

    def build(self, spec: BuildSpec, folder: Path, progress: Progress) -> Build:
        spec.copy_except((), folder, progress)
        return spec.result(self.name, onnx.__version__, spec.options.get("greeting", "cpu"))

    def open(self, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        return ToyEngines(folder, manifest, build, Cpu())

    def engine_files(self, name: str) -> tuple[str, ...]:
        return graph_files(name)
