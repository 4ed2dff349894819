"""Logits of the last rows only."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.onnxruntime.fusion.matching import Op, refused
from outrider.engines.contract import LOGITS, LOGITS_ROWS


class LastRows(RewriteRuleClassBase):
    """Limits the product that yields the logits to the last rows, whose number is the new input `logits_rows`.

    While a prompt is read, it is 0.
    """

    # Operators between that product and the logits that treat each row separately.
    ROW_BY_ROW = ("Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mul", "Tanh")

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__("logits of some rows")
        self._graph = graph

    def pattern(self, op: Op, x: Any, weight: Any) -> Any:
        return op.MatMul(x, weight, _outputs=["product"])

    def check(self, context: Any, x: Any, product: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        if any(each.name == LOGITS_ROWS for each in self._graph.inputs):
            return refused("it is rewritten already")
        value, rank = product, len(x.shape or ())
        while not value.is_graph_output():
            users = {use.node for use in value.uses()}
            # A short head uses its product twice, the second time for a column of one value.
            kinds = {node.op_type for node in users} - {"Slice", "Shape", "Expand", "ConstantOfShape"}
            if len(kinds) != 1 or not kinds <= set(self.ROW_BY_ROW):
                return refused("it is not the last product")
            value = next(node for node in users if node.op_type in kinds).outputs[0]
        return MatchResult() if value.name == LOGITS and rank == 3 else refused("its input is not [B, S, K]")

    def rewrite(self, op: Op, x: Any, weight: Any, **_: Any) -> Any:
        count = ir.Value(name=LOGITS_ROWS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
        self._graph.inputs.append(count)
        end = op.Shape(x, start=1, end=2)
        return op.MatMul(op.Slice(x, op.Sub(end, count), end, op.Constant(value_ints=[1])), weight)
