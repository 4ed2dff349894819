"""Removes zero points and negative scales from weights, for kernels that know neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.rewriting.graphs import apply, load, save
from outrider.backends.rewriting.layouts import Bytes, bits_of, paired, unsigned
from outrider.backends.rewriting.matching import Op, refused, shape_of, tensor_of
from outrider.backends.rewriting.products import Product


class _Parts(NamedTuple):
    """Weights s (q - z) with positive scales; z may have any sign."""

    integers: Bytes  # [K, N], q plus half of their range
    scale: npt.NDArray[np.float32]  # [K / block, N]
    offset: npt.NDArray[np.float32]  # [K / block, N], -s z


class Symmetric(RewriteRuleClassBase):
    """Splits a product with weights s (q - z) into the product with s q, and the blocks' sums of inputs times -s z.

    A negative scale becomes positive: -s (q - z) = s (~q - ~z) for integers, where ~q = -1 - q.
    """

    def __init__(self) -> None:
        super().__init__("symmetric weights")

    def pattern(self, op: Op, x: Any, quantized: Any, scale: Any) -> Any:
        weight = op.DequantizeLinear(quantized, scale, _allow_other_attributes=True, _allow_other_inputs=True)
        return op.MatMul(x, weight, _outputs=["product"])

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
            whole = _parts(found).integers
            if wanted == ir.DataType.INT8:
                return ir.tensor((whole ^ 128).view(np.int8))
            return ir.PackedTensor(paired(np.bitwise_xor(whole, 8, dtype=np.uint8).reshape(-1)), wanted, shape=ir.Shape(sizes))

        def lazy(make: Any, dtype: ir.DataType, shape: tuple[int, ...], end: str) -> Any:
            return op.initializer(ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape)), name=f"{name}.{end}")

        quantized = lazy(integers, wanted, sizes, "symmetric")
        scale = lazy(lambda: ir.tensor(_parts(found).scale), ir.DataType.FLOAT, blocks, "scale")
        offset = lazy(lambda: ir.tensor(_parts(found).offset), ir.DataType.FLOAT, blocks, "offset")
        product = op.MatMul(x, op.DequantizeLinear(quantized, scale, axis=0, block_size=found.block))
        apart = op.Reshape(x, op.Constant(value_ints=[0] * (len(x.shape) - 1) + [blocks[0], found.block]))
        sums = op.ReduceSum(apart, op.Constant(value_ints=[-1]), keepdims=0)
        return op.Add(product, op.MatMul(sums, offset))


def make_symmetric(path: Path, output: Path) -> None:
    """Write the graph at `path` to `output`, with its weights in a file beside it, all symmetric and with positive scales."""
    model = load(path)
    apply(model, Symmetric)
    save(model, output)


def _parts(found: Product) -> _Parts:
    half = 2 ** (bits_of(tensor_of(found.quantized)) - 1)
    scale = tensor_of(found.scale).numpy()
    integers = unsigned(tensor_of(found.quantized))
    zero = np.full(scale.shape, half, np.uint8) if found.zero is None else unsigned(tensor_of(found.zero))
    integers = np.where(np.repeat(scale < 0, found.block, 0), 2 * half - 1 - integers, integers)
    zero = np.where(scale < 0, 2 * half - 1 - zero, zero)
    unused = scale == 0  # kernels want positive scales, so such weights are 0 in another way
    integers[np.repeat(unused, found.block, 0)], zero[unused] = half, half
    positive = np.where(unused, np.float32(1), np.abs(scale))
    return _Parts(integers, positive, (half - zero.astype(np.float32)) * positive)
