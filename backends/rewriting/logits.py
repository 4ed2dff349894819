"""Limits the logits to the last rows."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.rewriting.matching import Op, refused
from outrider.engines.contract import LOGITS, LOGITS_ROWS


class LastRows(RewriteRuleClassBase):
    """Limits the product that computes the logits to the last rows. The new input `logits_rows` is their number.

    It is 0 while a prompt is read.
    """

    SIZE: int | str = 1  # of the new input

    # Operators that may follow the product: they treat each row separately.
    ROW_BY_ROW = ("Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mul", "Tanh")

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__("logits of some rows")
        self._graph = graph

    def pattern(self, op: Op, x: Any, weight: Any) -> Any:
        return op.MatMul(x, weight, _outputs=["product"])

    def check(self, context: Any, x: Any, product: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        if any(each.name == LOGITS_ROWS for each in self._graph.inputs):
            return refused("it is already rewritten")
        value, rank = product, len(x.shape or ())
        while not value.is_graph_output():
            users = {use.node for use in value.uses()}
            # A short head uses its product a second time, for a column of one value.
            kinds = {node.op_type for node in users} - {"Slice", "Shape", "Expand", "ConstantOfShape"}
            if len(kinds) != 1 or not kinds <= set(self.ROW_BY_ROW):
                return refused("it is not the last product")
            value = next(node for node in users if node.op_type in kinds).outputs[0]
        return MatchResult() if value.name == LOGITS and rank == 3 else refused("its input is not [B, S, K]")

    def rewrite(self, op: Op, x: Any, weight: Any, product: Any, **_: Any) -> Any:
        wanted = ir.Value(name=LOGITS_ROWS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([self.SIZE]))
        self._graph.inputs.append(wanted)
        _forget_shapes(product)
        return op.MatMul(self.rows(op, x, wanted), weight)

    def rows(self, op: Op, x: Any, wanted: Any) -> Any:
        """Return the rows [B, R, K] of `x` [B, S, K] that the input `wanted` asks for."""
        end = op.Shape(x, start=1, end=2)
        return op.Slice(x, op.Sub(end, wanted), end, op.Constant(value_ints=[1]))


def _forget_shapes(value: ir.Value) -> None:
    """Remove the shapes of a value and of everything computed from it: they were traced for another number of rows."""
    if not value.is_graph_output():
        value.shape = None
    for use in value.uses():
        for output in use.node.outputs:
            _forget_shapes(output)
