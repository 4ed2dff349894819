"""Rotary embeddings as one `RotaryEmbedding` each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.onnxruntime.fusion.matching import MICROSOFT, Op, constant, is_rows, refused, source


class Rotary(RewriteRuleClassBase):
    """x cos + rotate_half(x) sin, of angles position * inverse frequency (Su et al. 2021, eq. 34, halves instead of pairs)."""

    def __init__(self, capacity: int):
        super().__init__("rotary embeddings")
        self._capacity = capacity
        self._caches: dict[int, tuple[ir.Value, ir.Value]] = {}  # by the inverse frequencies' id

    def pattern(self, op: Op, x: Any, cos: Any, sin: Any, start: Any, half: Any, middle: Any, end: Any) -> Any:
        rotated = op.Concat(op.Neg(op.Slice(x, middle, end, [3], [1])), op.Slice(x, start, half, [3], [1]), axis=-1)
        return op.Add(op.Mul(x, cos), op.Mul(rotated, sin))

    def check(  # type: ignore[override]  # the names are the pattern's
        self, context: Any, x: Any, cos: Any, sin: Any, start: Any, half: Any, middle: Any, end: Any, **_: Any
    ) -> MatchResult:
        width = x.shape[3] if x.shape is not None and len(x.shape) == 4 else None
        cuts = [constant(value) for value in (start, half, middle, end)]
        if not isinstance(width, int) or any(cut is None for cut in cuts):
            return refused("rotary embeddings of a width that is not fixed")
        first, second, third, last = (int(cut.item()) for cut in cuts if cut is not None)
        if (first, second, third) != (0, width // 2, width // 2) or last < width:
            return refused("rotary embeddings that are not in halves")
        self._angles = angles(cos, "Cos"), angles(sin, "Sin")
        if self._angles[0] is None or self._angles[0] != self._angles[1] or self._angles[0].frequencies.size != width // 2:
            return refused("rotary angles that are not position * frequency")
        return MatchResult()

    def rewrite(self, op: Op, x: Any, **_: Any) -> Any:
        found = self._angles[0]
        assert found is not None
        if id(found.owner) not in self._caches:
            # In fp32, as the checkpoint's own code: at far positions the rounding of the angle is more than that of its cosine.
            table = np.arange(self._capacity, dtype=np.float32)[:, None] * found.frequencies.astype(np.float32)
            made = []
            for name, values in (("cos", np.cos(table)), ("sin", np.sin(table))):
                array = (found.factor * values).astype(ir.DataType.numpy(x.dtype))
                made.append(op.initializer(ir.tensor(array), name=f"{name}_cache_{len(self._caches)}"))
            self._caches[id(found.owner)] = made[0], made[1]
        return op.RotaryEmbedding(x, found.rows, *self._caches[id(found.owner)], _domain=MICROSOFT)


@dataclass(frozen=True)
class Angles:
    """Angles rows * frequencies, whose cosine or sine is multiplied by `factor`."""

    rows: ir.Value  # int64 [B, S]
    owner: ir.Value
    factor: float

    @property
    def frequencies(self) -> npt.NDArray[Any]:
        values = constant(self.owner)
        assert values is not None
        return values.reshape(-1)


def angles(value: ir.Value, function: str) -> Angles | None:
    """What a value is the cosine or sine of, where that is what a rotary embedding has."""
    factor = 1.0
    node = value.producer()
    while node is not None and node.op_type in ("Unsqueeze", "Cast", "Mul"):
        if node.op_type == "Mul":
            by = constant(node.inputs[1])
            if by is None or by.size != 1:
                return None
            factor *= float(by.item())
        inner = node.inputs[0]
        node = None if inner is None else inner.producer()
    if node is None or node.op_type != function:
        return None
    doubled = node.inputs[0].producer() if node.inputs[0] is not None else None
    if doubled is None or doubled.op_type != "Concat" or len(doubled.inputs) != 2 or doubled.inputs[0] is not doubled.inputs[1]:
        return None
    product = source(doubled.inputs[0], ("Transpose",))
    node = product.producer() if product is not None else None
    if node is None or node.op_type not in ("Mul", "MatMul"):
        return None
    for owner, other in (node.inputs, reversed(node.inputs)):
        rows = source(other, ("Cast", "Unsqueeze"))
        if owner is not None and constant(owner) is not None and rows is not None and is_rows(rows):
            return Angles(rows, owner, factor)
    return None
