"""Integers in other layouts are the same integers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from outrider.backends.rewriting.layouts import by_output, paired, side_by_side


@pytest.mark.parametrize("widths", [(1,), (6, 4), (5, 8), (1, 3, 4)])
@pytest.mark.parametrize("kind", [ir.DataType.UINT4, ir.DataType.UINT8])
def test_matrices_are_joined_and_turned(kind: ir.DataType, widths: tuple[int, ...]) -> None:
    """Also those of one output, such as the gate of a shared expert."""
    packed, inputs = kind == ir.DataType.UINT4, 34
    matrices = [np.random.default_rng(0).integers(0, 16, (inputs, width), np.uint8) for width in widths]
    shapes = [ir.Shape(each.shape) for each in matrices]
    tensors: list[ir.TensorProtocol] = [
        ir.PackedTensor(paired(each.reshape(-1)), kind, shape=shape) if packed else ir.tensor(each)
        for each, shape in zip(matrices, shapes, strict=True)
    ]
    joined, want = side_by_side(tensors), np.concatenate(matrices, axis=1)
    np.testing.assert_array_equal(joined.numpy(), want)
    turned = np.ascontiguousarray(want.T).reshape(-1)
    np.testing.assert_array_equal(by_output(joined), paired(turned) if packed else turned)
