"""Helpers of the rewrites: constants, shapes, the sources of values, and the meaning of masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import MatchResult

from outrider.engines.contract import KEY_POSITIONS, POSITIONS

MICROSOFT = "com.microsoft"
Op = Any  # onnxscript's tape; its nodes are typed as Any


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """Return the value of a constant, or None if it is computed when the graph runs."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def tensor_of(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of a constant."""
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None
    return tensor


def lazy(op: Op, make: Callable[[], ir.TensorProtocol], dtype: ir.DataType, shape: tuple[int, ...], name: str) -> Any:
    """Return a new initializer. `make` makes its tensor when the graph is saved, to save memory."""
    return op.initializer(ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape)), name=name)


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of a constant."""
    assert value.shape is not None
    return tuple(int(size) for size in value.shape if not isinstance(size, ir.SymbolicDim))


def source(value: ir.Value | None, through: tuple[str, ...]) -> ir.Value | None:
    """Follow a value back through nodes of the types `through`, by their first inputs, and return the value it came from."""
    while value is not None and (node := value.producer()) is not None and node.op_type in through:
        value = node.inputs[0]
    return value


def refused(reason: str) -> MatchResult:
    """Return the result for a match that must not be rewritten, with the reason."""
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


def sliding_window(mask: ir.Value) -> int | None:
    """Return the number of keys that a row attends to under a mask, including its own: -1 for all, None for another mask.

    A causal mask is keys <= rows; a sliding window of n adds keys > rows - n.
    """
    node = mask.producer()
    if node is None:
        return None
    if node.op_type == "And":
        parts = [(each, constant(each)) for each in node.inputs if each is not None]
        windows = [sliding_window(each) for each, values in parts if values is None or not values.all()]
        return None if None in windows else max(windows)  # type: ignore[type-var]
    if node.op_type not in ("LessOrEqual", "Greater"):
        return None
    keys, rows = (source(each, ("Unsqueeze",)) for each in node.inputs)
    if keys is None or keys.name != KEY_POSITIONS or rows is None:
        return None
    if node.op_type == "LessOrEqual":
        return -1 if is_rows(rows) else None
    first = rows.producer()
    if first is None or first.op_type != "Sub":
        return None
    start, width = source(first.inputs[0], ("Unsqueeze",)), constant(first.inputs[1])
    return int(width.item()) if start is not None and is_rows(start) and width is not None and width.size == 1 else None
