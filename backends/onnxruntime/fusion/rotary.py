"""Replaces each rotary embedding with one `RotaryEmbedding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.rewriting.matching import MICROSOFT, Op, constant, is_rows, refused, source


class Rotary(RewriteRuleClassBase):
    """x cos + rotate_half(x) sin, for angles position * inverse frequency (Su et al. 2021, eq. 34, halves instead of pairs)."""

    def __init__(self, capacity: int):
        super().__init__("rotary embeddings")
        self._capacity = capacity
        self._caches: dict[int, tuple[ir.Value, ir.Value]] = {}  # by the id of the inverse frequencies

    def pattern(self, op: Op, x: Any, cos: Any, sin: Any, start: Any, half: Any, middle: Any, end: Any) -> Any:
        rotated = op.Concat(op.Neg(op.Slice(x, middle, end, [3], [1])), op.Slice(x, start, half, [3], [1]), axis=-1)
        return op.Add(op.Mul(x, cos), op.Mul(rotated, sin))

    def check(  # type: ignore[override]  # the names are the pattern's
        self, context: Any, x: Any, cos: Any, sin: Any, start: Any, half: Any, middle: Any, end: Any, **_: Any
    ) -> MatchResult:
        width = x.shape[3] if x.shape is not None and len(x.shape) == 4 else None
        bounds = [constant(value) for value in (start, half, middle, end)]
        if not isinstance(width, int) or any(bound is None for bound in bounds):
            return refused("rotary embeddings of variable width")
        first, second, third, last = (int(bound.item()) for bound in bounds if bound is not None)
        if (first, second, third) != (0, width // 2, width // 2) or last < width:
            return refused("rotary embeddings that do not rotate halves")
        self._angles = Angles.of(cos, "Cos"), Angles.of(sin, "Sin")
        if self._angles[0] is None or self._angles[0] != self._angles[1] or self._angles[0].frequencies.size != width // 2:
            return refused("rotary angles other than position * frequency")
        return MatchResult()

    def rewrite(self, op: Op, x: Any, **_: Any) -> Any:
        angles = self._angles[0]
        assert angles is not None
        if id(angles.owner) not in self._caches:
            # In fp32 like the checkpoint: at large positions, rounding the angle matters more than rounding its cosine.
            table = np.arange(self._capacity, dtype=np.float32)[:, None] * angles.frequencies.astype(np.float32)
            cache = []
            for name, values in (("cos", np.cos(table)), ("sin", np.sin(table))):
                array = (angles.factor * values).astype(ir.DataType.numpy(x.dtype))
                cache.append(op.initializer(ir.tensor(array), name=f"{name}_cache_{len(self._caches)}"))
            self._caches[id(angles.owner)] = cache[0], cache[1]
        return op.RotaryEmbedding(x, angles.rows, *self._caches[id(angles.owner)], _domain=MICROSOFT)


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

    @classmethod
    def of(cls, value: ir.Value, function: str) -> Angles | None:
        """Return the angles that `function`, sine or cosine, maps to a value; None if it is not of a rotary embedding."""
        factor = 1.0
        node = value.producer()
        while node is not None and node.op_type in ("Unsqueeze", "Cast", "Mul"):
            if node.op_type == "Mul":
                scalar = constant(node.inputs[1])
                if scalar is None or scalar.size != 1:
                    return None
                factor *= float(scalar.item())
            inner = node.inputs[0]
            node = None if inner is None else inner.producer()
        if node is None or node.op_type != function:
            return None
        doubled = node.inputs[0].producer() if node.inputs[0] is not None else None
        if doubled is None or doubled.op_type != "Concat" or len(halves := doubled.inputs) != 2 or halves[0] is not halves[1]:
            return None
        product = source(halves[0], ("Transpose",))
        node = product.producer() if product is not None else None
        if node is None or node.op_type not in ("Mul", "MatMul"):
            return None
        for owner, other in (node.inputs, reversed(node.inputs)):
            rows = source(other, ("Cast", "Unsqueeze"))
            if owner is not None and constant(owner) is not None and rows is not None and is_rows(rows):
                return cls(rows, owner, factor)
        return None
