"""Helpers of the rewrites: constants, shapes, and the sources of values."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import MatchResult

from outrider.engines.contract import POSITIONS

MICROSOFT = "com.microsoft"
Op = Any  # onnxscript's tape; its nodes are typed as Any


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """Return a value that is known before the graph runs, or None."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of a constant."""
    assert value.shape is not None
    return tuple(int(size) for size in value.shape if not isinstance(size, ir.SymbolicDim))


def source(value: ir.Value | None, through: tuple[str, ...]) -> ir.Value | None:
    """Follow a value back through nodes of the types `through`, by their first inputs, and return where it comes from."""
    while value is not None and (node := value.producer()) is not None and node.op_type in through:
        value = node.inputs[0]
    return value


def refused(reason: str) -> MatchResult:
    """Return the result of a match that must not be rewritten, with the reason."""
    return MatchResult().fail(reason)


def is_rows(value: ir.Value) -> bool:
    """Return whether a value is `positions` + 0..S-1, [B, S]."""
    node = value.producer()
    if node is None or node.op_type != "Add":
        return False
    first, second = node.inputs
    start = source(first, ("Unsqueeze",))
    counting = second.producer() if second is not None else None
    return start is not None and start.name == POSITIONS and counting is not None and counting.op_type == "Range"
