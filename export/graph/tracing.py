"""Turns a torch module into an ONNX program.

`torch.onnx.export` captures a module, and then traces the captured program again to decompose the operators that ONNX lacks.
The second trace takes more than half of the time, and few of our modules have such operators. So the usual ones are replaced
here, and the second trace only runs if others are left.

After that, `torch.onnx.export` would run onnxscript's optimizer, which tries 46 rules on every node. `simplify` runs the same
passes with the 15 rules that apply to decoders, in a seventh of the time for 30 layers.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnx_ir.tensor_adapters import TorchTensor
from onnxscript import optimizer
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.rules import common as rules
from torch import nn

from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.source import reason_of

OPSET = 24
UNTOUCHED = "untouched"  # an attribute of parameters without numbers: the weight that they stand for is read after the trace
TRANSPOSED = ".transposed_"
_aten = torch.ops.aten
_IDENTITIES = {_aten.alias, _aten.clone, _aten.contiguous, _aten.detach, _aten.detach_, _aten.lift_fresh_copy}
_CASTS = {_aten.to, _aten.type_as}
_SYNONYMS = {_aten.__and__: _aten.bitwise_and, _aten.__or__: _aten.bitwise_or}
_RULES = RewriteRuleSet(
    [
        *rules.add_0_rule.commute(),
        *rules.mul_by_1_rule.commute(),
        rules.sub_0_rule,
        rules.div_by_1_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.materialize_reshape_shape_rule,
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.no_op_transpose_rule,
        rules.remove_optional_bias_from_gemm_rule,
        rules.reshape_reshape_rule,
        rules.squeeze_reshape_1d_rule,
        rules.transpose_transpose_rule,
        rules.unsqueeze_unsqueeze_rule,
    ]
)


class _Decomposed(torch.export.ExportedProgram):
    """A program that needs no decompositions."""

    def run_decompositions(self, *_: Any, **__: Any) -> torch.export.ExportedProgram:
        return self


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
    try:
        program = _without_a_second_trace(module, inputs, shapes, options)
        if program is None:
            program = torch.onnx.export(module, inputs, dynamo=True, dynamic_shapes=_dims(shapes), **options)
        assert program is not None  # never None with dynamo=True
        _mark_untouched(program.model.graph, module)
        _lift_transposes(program.model.graph)
        simplify(program.model)  # before its tensors are named, as it may add one for an output that is an input
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


class Untouched(TorchTensor):
    """A tensor that stands for a weight that is read after the trace, so that nothing may compute with its numbers."""


def _mark_untouched(graph: ir.Graph, module: nn.Module) -> None:
    """Give the parameters with the attribute `UNTOUCHED` another type in the graph: torch makes new ones at the same place."""
    addresses = {each.data_ptr() for each in module.parameters() if hasattr(each, UNTOUCHED)}
    for value in graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor) and raw.data_ptr() in addresses:
            value.const_value = Untouched(raw, name=value.name)


def _lift_transposes(graph: ir.Graph) -> None:
    """Replace transposed weights that are read later by other such weights, whose names end with `TRANSPOSED` and the axes.

    Other transposed weights are constants, which `simplify` folds.
    """
    for node in list(graph):
        value = node.inputs[0] if node.op_type == "Transpose" else None
        if value is None or not isinstance(value.const_value, Untouched) or len(value.uses()) > 1:
            continue
        axes = node.attributes.get_ints("perm")
        name = f"{value.name}{TRANSPOSED}{''.join(map(str, axes))}"
        tensor = Untouched(value.const_value.raw.permute(*axes), name=name)
        lifted = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(lifted)
        node.outputs[0].replace_all_uses_with(lifted)
        graph.remove(node, safe=True)
        del graph.initializers[str(value.name)]


def _may_fold(node: ir.Node) -> bool | None:
    return False if any(value is not None and isinstance(value.const_value, Untouched) for value in node.inputs) else None


def simplify(model: ir.Model) -> None:
    """Fold constants, and remove what has no effect, like onnxscript's `optimize_ir` with fewer rules."""
    unused: list[Any] = [common.RemoveUnusedNodesPass, common.RemoveUnusedFunctionsPass, common.RemoveUnusedOpsetsPass]
    common.InlinePass()(model)
    for _ in range(2):
        folded = optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=_may_fold).modified
        rewritten = _RULES.apply_to_model(model)
        removed = [each()(model).modified for each in unused]
        if not (folded or rewritten or any(removed)):
            break
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


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


def _without_a_second_trace(
    module: nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...], options: dict[str, Any]
) -> torch.onnx.ONNXProgram | None:
    """Return the program, or None if some operators have to be decomposed."""
    try:
        with torch.no_grad():  # otherwise the program would switch gradients on and off
            captured = torch.export.export(module, inputs, dynamic_shapes=_dims(shapes), strict=False)
    except (MemoryError, UnsupportedModelError):
        raise
    except Exception:  # torch.onnx.export tries several strategies and reports why each failed
        return None
    if not _simplified(captured):
        return None
    captured.__class__ = _Decomposed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # several dimensions have the same name
            return torch.onnx.export(captured, dynamo=True, dynamic_shapes=shapes, **options)
    except torch.onnx.errors.OnnxExporterError:
        return None


def _simplified(program: torch.export.ExportedProgram) -> bool:
    """Replace operators that ONNX lacks by equivalent ones, and return whether no operator that writes to a tensor is left."""
    graph = program.graph_module.graph
    operators: list[Any] = [*filter(_is_operator, graph.nodes)]
    for node in operators:
        if not node.target._schema.is_mutable or node.target.overloadpacket in _IDENTITIES:
            continue
        name, written = node.target.overloadpacket.__name__, node.args[0]
        if not name.endswith("_") or not hasattr(_aten, name[:-1]) or _shares_memory(written, node):
            return False
        node.target = getattr(getattr(_aten, name[:-1]), node.target._overloadname)
        written.replace_all_uses_with(node, lambda user, since=node: user > since)
    for node in operators:  # nothing writes to a tensor now, so copies can go
        kind = node.target.overloadpacket
        if kind in _CASTS and node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            node.target, node.args = _aten._to_copy.default, node.args[:1]
            node.kwargs = {"dtype": node.meta["val"].dtype}
        elif kind in _CASTS | _IDENTITIES:
            program.graph_signature.replace_all_uses(node.name, node.args[0].name)
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif kind in _SYNONYMS:
            node.target = getattr(_SYNONYMS[kind], node.target._overloadname)
    return True


def _shares_memory(tensor: Any, at: Any) -> bool:
    """Return whether a tensor may be a view, may have a view before the node `at`, or belongs to the module."""
    maker = tensor.args[0] if tensor.target is operator.getitem else tensor
    near = [maker, *(user for user in tensor.users if user < at and user.target is not operator.getitem)]
    return not all(_is_operator(each) and not any(value.alias_info for value in each.target._schema.returns) for each in near)


def _is_operator(node: Any) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)
