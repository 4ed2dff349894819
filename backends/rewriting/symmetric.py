"""Removes zero points and negative scales from weights, for kernels that know neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import MatchResult

from outrider.backends.rewriting.graphs import apply, load, save
from outrider.backends.rewriting.joined_products import Product, ProductRule
from outrider.backends.rewriting.layouts import Bytes, bits_of, paired, unsigned
from outrider.backends.rewriting.matching import Op, lazy, refused, shape_of, tensor_of


class Symmetric(ProductRule):
    """Splits a product with weights s (q - z) into the product with s q, and the blocks' sums of inputs times -s z.

    A negative scale becomes positive: -s (q - z) = s (~q - ~z) for integers, where ~q = -1 - q.
    """

    def __init__(self) -> None:
        super().__init__("symmetric weights")

    def check(self, context: Any, x: Any, product: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        found = Product.of(product.producer())
        if found is None or x.shape is None:
            return refused("a product with weights in another layout")
        if found.zero is None and (tensor_of(found.scale).numpy() > 0).all():
            return refused("it is symmetric")
        self._found = found
        return MatchResult()

    def rewrite(self, op: Op, x: Any, **_: Any) -> Any:
        found, name = self._found, self._found.quantized.name
        sizes, blocks, bits = shape_of(found.quantized), shape_of(found.scale), bits_of(tensor_of(found.quantized))
        wanted = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8

        def integers() -> ir.TensorProtocol:
            whole = _integers(found)
            if wanted == ir.DataType.INT8:
                return ir.tensor((whole ^ 128).view(np.int8))
            return ir.PackedTensor(paired(np.bitwise_xor(whole, 8, dtype=np.uint8).reshape(-1)), wanted, shape=ir.Shape(sizes))

        quantized = lazy(op, integers, wanted, sizes, f"{name}.symmetric")
        scale = lazy(op, lambda: ir.tensor(_scale(found)), ir.DataType.FLOAT, blocks, f"{name}.scale")
        offset = lazy(op, lambda: ir.tensor(_offset(found)), ir.DataType.FLOAT, blocks, f"{name}.offset")
        product = op.MatMul(x, op.DequantizeLinear(quantized, scale, axis=0, block_size=found.block))
        apart = op.Reshape(x, op.Constant(value_ints=[0] * (len(x.shape) - 1) + [blocks[0], found.block]))
        sums = op.ReduceSum(apart, op.Constant(value_ints=[-1]), keepdims=0)
        return op.Add(product, op.MatMul(sums, offset))


def make_symmetric(path: Path, output: Path) -> None:
    """Write the graph at `path` to `output`, with its weights in a file beside it, all symmetric and with positive scales."""
    model = load(path)
    apply(model, Symmetric)
    save(model, output)


def _integers(found: Product) -> Bytes:
    """Return q [K, N], plus half of the integers' range."""
    half, scale = _half(found), tensor_of(found.scale).numpy()
    integers = unsigned(tensor_of(found.quantized))
    integers = np.where(np.repeat(scale < 0, found.block, 0), 2 * half - 1 - integers, integers)
    integers[np.repeat(scale == 0, found.block, 0)] = half
    return integers


def _scale(found: Product) -> npt.NDArray[np.float32]:
    """Return s [K / block, N]. Kernels want positive scales: a scale of 0 becomes 1, with integers that stand for 0."""
    scale = tensor_of(found.scale).numpy()
    return np.where(scale == 0, np.float32(1), np.abs(scale))


def _offset(found: Product) -> npt.NDArray[np.float32]:
    """Return -s z [K / block, N]."""
    half, scale = _half(found), tensor_of(found.scale).numpy()
    zero = np.full(scale.shape, half, np.uint8) if found.zero is None else unsigned(tensor_of(found.zero))
    zero = np.where(scale < 0, 2 * half - 1 - zero, zero)
    zero[scale == 0] = half
    return (half - zero.astype(np.float32)) * _scale(found)


def _half(found: Product) -> int:
    return int(2 ** (bits_of(tensor_of(found.quantized)) - 1))
