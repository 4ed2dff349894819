"""Replaces products with dequantized weights by ONNX Runtime's operator for them.

ONNX Runtime does the same whenever it loads a graph, but then keeps the weights twice: in the layout of the operator, and in
that of the processor's kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchResult

from outrider.backends.rewriting.graphs import apply, load, save
from outrider.backends.rewriting.joined_products import Product, ProductRule
from outrider.backends.rewriting.layouts import SIGNED, bits_of, by_output, bytes_of, paired, unsigned
from outrider.backends.rewriting.matching import MICROSOFT, Op, lazy, refused, shape_of, tensor_of

ACCURACY_LEVEL = 4  # activations are rounded to int8, as ONNX Runtime does by default
SMALLEST_BLOCK = 16  # of the operator, whose blocks are powers of two


class BlockProducts(ProductRule):
    """Replaces `MatMul` of dequantized weights with `MatMulNBits`."""

    def __init__(self) -> None:
        super().__init__("products of integers")

    def check(self, context: Any, product: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        found = Product.of(product.producer())
        if found is None or found.scale.dtype != ir.DataType.FLOAT:
            return refused("a product with weights in another layout or type")
        if found.block < SMALLEST_BLOCK or found.block & (found.block - 1):
            return refused("a block size that the operator does not support")
        self._found = found
        return MatchResult()

    def rewrite(self, op: Op, x: Any, **_: Any) -> Any:
        found, name = self._found, self._found.quantized.name
        (inputs, outputs), groups = shape_of(found.quantized), shape_of(found.scale)[0]
        weight, scale = tensor_of(found.quantized), tensor_of(found.scale)
        bits = bits_of(weight)

        def integers() -> ir.TensorProtocol:
            values = by_output(weight)
            if weight.dtype in SIGNED:  # the operator's have no sign
                values ^= {4: 0x88, 8: 0x80}[bits]
            return ir.tensor(values.reshape(outputs, groups, -1))

        def scales() -> ir.TensorProtocol:
            values = bytes_of(scale).view(np.float32).reshape(groups, outputs)
            return ir.tensor(np.ascontiguousarray(values.T).reshape(-1))

        shape = outputs, groups, found.block * bits // 8
        parts = [
            lazy(op, integers, ir.DataType.UINT8, shape, f"{name}.by_output"),
            lazy(op, scales, ir.DataType.FLOAT, (outputs * groups,), f"{name}.scale_by_output"),
        ]
        if found.zero is not None:
            zeros = np.ascontiguousarray(unsigned(tensor_of(found.zero)).T)
            if bits == 4:
                zeros = paired(np.pad(zeros, ((0, 0), (0, groups % 2))))
            parts.append(op.initializer(ir.tensor(zeros), name=f"{name}.zero_by_output"))
        return op.MatMulNBits(
            x, *parts, K=inputs, N=outputs, bits=bits, block_size=found.block, accuracy_level=ACCURACY_LEVEL, _domain=MICROSOFT
        )


def with_block_products(path: Path, output: Path) -> None:
    """Write the graph at `path` to `output`, with its weights in a file beside it, after this rewrite and no other."""
    model = load(path)
    model.opset_imports[MICROSOFT] = 1
    apply(model, BlockProducts)
    save(model, output)
