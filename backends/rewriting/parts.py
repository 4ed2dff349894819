"""The graphs that a model is built of: the whole step model, or its stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import onnx_ir as ir

from outrider.backends.rewriting.graphs import load
from outrider.bundle.manifest import model_file, step_file
from outrider.engines.contract import BOUNDARY, Stage, Tensor
from outrider.engines.precisions import DTYPES

WIDE = "float32"


def stages_of(parts: Sequence[ir.Model], ends: Sequence[int], devices: Sequence[str]) -> list[Stage]:
    """Return the stages of a target.

    If one is on a CPU, they pass on fp32: kernels compute in it whatever the model's type, and round only where a stage ends.

    Args:
        parts: their graphs, from `cut`.
        ends: for each stage, the number of layers in it and in the stages before it.
        devices: that they are built for, one for each, or one for all.
    """
    stages, first, places = [], 0, devices if len(devices) > 1 else [None] * len(ends)
    for end, place, model in zip(ends, places, parts, strict=True):
        takes, gives = (
            [_tensor(each, "cpu" in devices) for each in values if _is_passed(each)]
            for values in (model.graph.inputs, model.graph.outputs)
        )
        inputs = [str(each.name) for each in model.graph.inputs if not _is_passed(each)]
        stages.append(Stage((first, end - 1), weights_of(model), inputs, takes, gives, place))
        first = end
    return stages


def weights_of(model: ir.Model) -> int:
    """Return the bytes of a graph's weights."""
    return sum(each.const_value.nbytes for each in model.graph.initializers.values() if each.const_value is not None)


def weights_read(model: ir.Model) -> int:
    """Return the bytes of the weights that a pass reads. Of a table it reads one row a token; the others stay in the file."""
    tables = {each.inputs[0] for each in model.graph if each.op_type == "Gather"}
    tables -= {value for each in model.graph if each.op_type != "Gather" for value in each.inputs}
    stored = (None if each is None else each.const_value for each in tables)
    return weights_of(model) - sum(each.nbytes for each in stored if each is not None)


def graphs(export: Path, role: str, stages: Sequence[Stage], parts: Sequence[ir.Model]) -> dict[str, ir.Model]:
    """Return the graphs of one of `ROLES`, ready to be rewritten, by their path in a bundle.

    Args:
        stages: what it is cut into; empty for the whole.
        parts: the graphs of the target's stages, which stay as they are.
    """
    if not stages:
        return {model_file(role): load(export / model_file(role))}
    models = [each.clone() for each in parts]
    for stage, (before, after) in zip(stages, pairwise(models), strict=False):
        for tensor in stage.gives:
            _set_type(before.graph, after.graph, tensor)
    return {step_file(role, stage): each for stage, each in zip(stages, models, strict=True)}


def _set_type(before: ir.Graph, after: ir.Graph, tensor: Tensor) -> None:
    """Let two stages pass a value on in a type, and compute with it in their own."""
    (given,) = (each for each in before.outputs if each.name == tensor.name)
    (taken,) = (each for each in after.inputs if each.name == tensor.name)
    own, passed = given.dtype, ir.DataType(DTYPES[tensor.dtype].onnx)
    assert own is not None
    if own == passed:
        return
    users = [*taken.uses()]
    wide, narrow = ir.node("Cast", [given], {"to": passed}), ir.node("Cast", [taken], {"to": own})
    for node, kind in ((wide, passed), (narrow, own)):
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(kind), given.shape
    after.insert_before(after[0], narrow)
    for use in users:
        use.node.replace_input_with(use.idx, narrow.outputs[0])
    taken.type = ir.TensorType(passed)
    before.append(wide)
    before.outputs[before.outputs.index(given)] = wide.outputs[0]
    given.name, wide.outputs[0].name = f"own.{tensor.name}", tensor.name


def _is_passed(value: ir.Value) -> bool:
    return str(value.name).startswith(BOUNDARY)


def _tensor(value: ir.Value, wide: bool) -> Tensor:
    assert value.dtype is not None
    assert value.shape is not None
    sizes = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return Tensor(str(value.name), WIDE if wide and value.dtype.is_floating_point() else value.dtype.numpy().name, sizes)
