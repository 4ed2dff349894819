"""Turns a torch module into an ONNX program.

`torch.onnx.export` captures a module, and then traces the captured program again to decompose operators that ONNX lacks or
that write to tensors. The second trace takes more than half of the time. So common operators of both kinds are replaced here,
and the second trace only runs if others are left.

torch would remember the results of operators on tensors without numbers, which takes longer than computing them if sizes are
symbols. It would also compile its library of translations again for each export.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import suppress
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.source import reason_of
from outrider.export.checkpoints.swapped import swapped
from outrider.export.graph.functional import WriteError, functionalize, is_operator
from outrider.export.graph.simplify import simplify
from outrider.export.interrupts import kept_interrupts

OPSET = 24
_aten = torch.ops.aten
_IDENTITIES = {_aten.alias, _aten.clone, _aten.contiguous, _aten.detach, _aten.detach_, _aten.lift_fresh_copy}
_CASTS = {_aten.to, _aten.type_as}
_translations = functools.cache(ONNXRegistry.from_torchlib)
_SYNONYMS = {
    _aten.__and__.Tensor: _aten.bitwise_and.Tensor,
    _aten.__and__.Scalar: _aten.bitwise_and.Scalar,
    _aten.__or__.Tensor: _aten.bitwise_or.Tensor,
    _aten.__or__.Scalar: _aten.bitwise_or.Scalar,
    _aten.max.other: _aten.maximum.default,
    _aten.min.other: _aten.minimum.default,
    _aten.view.default: _aten.reshape.default,  # which needs no copy before it
}


class _Decomposed(torch.export.ExportedProgram):
    """A program that needs no decompositions."""

    def run_decompositions(self, *_: Any, **__: Any) -> torch.export.ExportedProgram:
        return self


@kept_interrupts()
def to_onnx(
    module: nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...], names: list[str], outputs: list[str], called: str
) -> torch.onnx.ONNXProgram:
    """Trace a module.

    Args:
        module: the module.
        inputs: example inputs.
        shapes: for each input, a dictionary from its dynamic dimensions to their names; nested like `inputs`.
        names: the names of the inputs.
        outputs: the names of the outputs.
        called: the module's name in messages.

    Raises:
        UnsupportedModelError: the module does something that a graph cannot express.
    """
    module.eval()
    options: dict[str, Any] = {"opset_version": OPSET, "verbose": False, "optimize": False}
    registry = swapped(ONNXRegistry, "from_torchlib", staticmethod(_translations))
    try:
        with torch._dynamo.config.patch(fake_tensor_cache_enabled=False), registry:
            program = _without_a_second_trace(module, inputs, shapes, options)
            if program is None:
                program = torch.onnx.export(module, inputs, dynamo=True, dynamic_shapes=_dims(shapes), **options)
        assert program is not None  # never None with dynamo=True
        simplify(program.model, module)  # before its tensors are named, as it may add one for an output that is an input
        graph = program.model.graph
        for value, name in zip([*graph.inputs, *graph.outputs], [*names, *outputs], strict=True):
            value.name = name
    except MemoryError:
        raise
    except Exception as error:  # torch.export and the ONNX translation raise errors of any type
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UnsupportedModelError(f"{called} cannot be expressed as one ONNX graph: {reason_of(cause)}") from error
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, which contain paths of this machine
    return program


def _dims(shapes: Any) -> Any:
    """Return the same structure with torch's dimensions instead of names; equal names become the same dimension."""
    known: dict[str, Any] = {}

    def convert(part: Any) -> Any:
        if isinstance(part, str):
            return known.setdefault(part, torch.export.Dim(part, min=1))
        if isinstance(part, dict):
            return {at: convert(each) for at, each in part.items()}
        return type(part)(convert(each) for each in part)

    return convert(shapes)


@kept_interrupts()
def _without_a_second_trace(
    module: nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...], options: dict[str, Any]
) -> torch.onnx.ONNXProgram | None:
    """Return the program, or None if it cannot be captured or translated.

    It is traced again only if it has operators without a translation.
    """
    try:
        # Without no_grad, the program would switch gradients on and off. The rest is as torch.onnx.export does it.
        with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            captured = torch.export.export(
                module, inputs, dynamic_shapes=_dims(shapes), strict=False, prefer_deferred_runtime_asserts_over_guards=True
            )
    except (MemoryError, UnsupportedModelError):
        raise
    except Exception:  # torch.onnx.export tries several strategies and reports why each failed
        return None
    if not _simplified(captured):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several dimensions have the same name
        for kind in (_Decomposed, torch.export.ExportedProgram):
            captured.__class__ = kind
            with suppress(torch.onnx.errors.OnnxExporterError):
                return torch.onnx.export(captured, dynamo=True, dynamic_shapes=shapes, **options)
    return None


def _simplified(program: torch.export.ExportedProgram) -> bool:
    """Replace operators that ONNX lacks by equivalent ones, and return whether no operator that writes to a tensor is left."""
    graph = program.graph_module.graph
    try:
        functionalize(program, _IDENTITIES)
    except WriteError:
        return False
    operators: list[Any] = [*filter(is_operator, graph.nodes)]
    for node in operators:  # nothing writes to a tensor now, so copies can go
        kind = node.target.overloadpacket
        if kind in _CASTS and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            node.target, node.args = _aten._to_copy.default, node.args[:1]
            node.kwargs = {"dtype": node.meta["val"].dtype}
        elif kind in _CASTS | _IDENTITIES:
            program.graph_signature.replace_all_uses(node.name, node.args[0].name)
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _SYNONYMS:
            node.target = _SYNONYMS[node.target]
        elif kind is _aten.square:
            node.target, node.args = _aten.mul.Tensor, node.args * 2
    return True
