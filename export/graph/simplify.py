"""Simplifies traced graphs.

`torch.onnx.export` would run onnxscript's optimizer, which tries 46 rules on every node. `simplify` runs the same passes with
the 15 rules that apply to decoders, on one layer of each kind, and then copies it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules
from torch import nn

from outrider.export.graph.layer_copies import hide_weights, write_layers
from outrider.export.graph.untouched import Untouched, lift_transposes, mark_untouched

SMALL = 2**13  # numbers; onnxscript folds nodes without larger inputs


class ConstantReshape(RewriteRuleClassBase):
    """Replaces a computed shape of a Reshape by a constant: sizes, 0 for a dim of the input at the same place, -1 for one dim.

    If the shape is computed, TensorRT cannot tell how many heads a query has.
    """

    def pattern(self, op: Any, x: Any, shape: Any) -> Any:
        return op.Reshape(x, shape)

    def check(self, context: Any, x: ir.Value, shape: ir.Value) -> MatchResult:
        wanted, given = context.output_values[0].shape, x.shape
        if shape.const_value is not None or wanted is None or given is None:
            return MatchResult().fail("the shape is constant, or nothing is known of the dims")
        self._dims = [
            dim if isinstance(dim, int) else 0 if dim in given[at : at + 1] and dim.value is not None else -1
            for at, dim in enumerate(wanted)
        ]
        result, zero = MatchResult(), 0 in wanted or context.root.attributes.get_int("allowzero", 0)
        return result.fail("a dim is zero, or several are unknown") if zero or self._dims.count(-1) > 1 else result

    def rewrite(self, op: Any, x: ir.Value, shape: ir.Value) -> Any:
        return op.Reshape(x, op.Constant(value_ints=self._dims))


_RULES = RewriteRuleSet(
    [
        *rules.add_0_rule.commute(),
        *rules.mul_by_1_rule.commute(),
        rules.sub_0_rule,
        rules.div_by_1_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.materialize_reshape_shape_rule,
        ConstantReshape.rule(),  # type: ignore[no-untyped-call]
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


def simplify(model: ir.Model, module: nn.Module) -> None:
    """Write layers that were left out of the trace of a module, fold constants, and remove what has no effect."""
    graph = model.graph
    mark_untouched(graph, module)
    lift_transposes(graph)
    common.InlinePass()(model)
    hidden = hide_weights(graph, module)
    _fold(model)
    write_layers(graph, module, hidden)
    if hidden and any(_can_fold(node) for node in graph):  # arithmetic on the weights of a layer
        _fold(model)
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)
    common.NameFixPass()(model)


def _fold(model: ir.Model) -> None:
    unused: list[Any] = [common.RemoveUnusedNodesPass, common.RemoveUnusedFunctionsPass, common.RemoveUnusedOpsetsPass]
    for _ in range(2):
        folded = optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=_may_fold).modified
        rewritten = _RULES.apply_to_model(model)
        removed = [each()(model).modified for each in unused]
        if not (folded or rewritten or any(removed)):
            break


def _may_fold(node: ir.Node) -> bool | None:
    return False if any(value is not None and isinstance(value.const_value, Untouched) for value in node.inputs) else None


def _can_fold(node: ir.Node) -> bool:
    constants = [None if value is None else value.const_value for value in node.inputs]
    return (
        node.op_type != "DequantizeLinear"
        and bool(constants)
        and all(each is not None and not isinstance(each, Untouched) for each in constants)
        and (node.op_type == "Transpose" or all(each is not None and each.size <= SMALL for each in constants))
    )
