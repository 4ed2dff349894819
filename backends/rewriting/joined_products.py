"""Joins the products of one input with several quantized weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.rewriting.layouts import side_by_side
from outrider.backends.rewriting.matching import Op, constant, refused, shape_of


@dataclass(frozen=True)
class Product:
    """A product with dequantized weights [K, N], and the bias that is added to it."""

    quantized: ir.Value
    scale: ir.Value
    zero: ir.Value | None
    block: int
    bias: npt.NDArray[Any] | None
    output: ir.Value

    @classmethod
    def of(cls, node: ir.Node) -> Product | None:
        """Return the product that a node computes; None if it computes something else."""
        weight = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if weight is None or weight.op_type != "DequantizeLinear":
            return None
        quantized, scale, zero = (*weight.inputs, None)[:3]
        block = weight.attributes.get_int("block_size", 0)
        if quantized is None or scale is None or weight.attributes.get_int("axis", 1) != 0 or not block:
            return None
        if any(each is not None and ir.convenience.get_const_tensor(each) is None for each in (quantized, scale, zero)):
            return None
        (output,), bias = node.outputs, None
        uses = list(output.uses())
        if len(uses) == 1 and (add := uses[0].node).op_type == "Add":
            added = [constant(each) for each in add.inputs if each is not output]
            bias = next((each for each in added if each is not None and each.shape == shape_of(quantized)[1:]), None)
            output = output if bias is None else add.outputs[0]
        return cls(quantized, scale, zero, block, bias, output)


class ProductRule(RewriteRuleClassBase):
    """A rule for products with dequantized weights; `Product.of` describes the node that it finds."""

    def pattern(self, op: Op, x: Any, quantized: Any, scale: Any) -> Any:
        weight = op.DequantizeLinear(quantized, scale, _allow_other_attributes=True, _allow_other_inputs=True)
        return op.MatMul(x, weight, _outputs=["product"])


class Products(ProductRule):
    """Replaces products of one input with different quantized weights (query, key and value; gate and up) with one product.

    Then the input is rounded only once, and threads start only once.
    """

    def __init__(self) -> None:
        super().__init__("joined products")

    def check(self, context: Any, x: Any, product: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        first = Product.of(product.producer())
        if first is None or not first.output.uses():
            return refused("a product with weights in another layout, or merged already")
        products = [Product.of(use.node) for use in x.uses() if use.idx == 0]
        same = [each for each in products if each and each.output.uses() and self._kind(each) == self._kind(first)]
        if len(same) < 2:
            return refused("a product whose input no other product uses")
        self._parts = same
        return MatchResult()

    def _kind(self, part: Product) -> tuple[Any, ...]:
        return part.block, part.quantized.dtype, shape_of(part.quantized)[0], part.scale.dtype, part.zero is None

    def rewrite(self, op: Op, product: Any, x: Any, **_: Any) -> Any:
        parts, name = self._parts, self._parts[0].quantized.name
        each = {"": [part.quantized for part in parts], ".scale": [part.scale for part in parts]}
        if zeros := [part.zero for part in parts if part.zero is not None]:
            each[".zero"] = zeros
        merged_parts = [op.initializer(_concatenated(values), name=f"{name}.merged{end}") for end, values in each.items()]
        weight = op.DequantizeLinear(*merged_parts, axis=0, block_size=parts[0].block)
        merged = op.MatMul(x, weight)
        sizes = [shape_of(part.quantized)[1] for part in parts]
        if any(part.bias is not None for part in parts):
            kind = next(part.bias.dtype for part in parts if part.bias is not None)
            biases = [np.zeros(n, kind) if part.bias is None else part.bias for part, n in zip(parts, sizes, strict=True)]
            merged = op.Add(merged, op.initializer(ir.tensor(np.concatenate(biases)), name=f"{name}.merged.bias"))
        split = op.Split(merged, op.Constant(value_ints=sizes), axis=-1, _outputs=len(parts))
        replacement = split[0]
        for part, value in zip(parts, split, strict=True):
            (value.shape, value.dtype) = (part.output.shape, part.output.dtype)
            if part.output is product:
                replacement = value
            else:
                part.output.replace_all_uses_with(value)
        return replacement


def _concatenated(weights: list[ir.Value]) -> ir.LazyTensor:
    """Return constant matrices side by side. They are concatenated when they are saved, to save memory."""
    tensors = [tensor for each in weights if (tensor := ir.convenience.get_const_tensor(each)) is not None]
    rows, columns = shape_of(weights[0])[0], sum(shape_of(each)[1] for each in weights)

    return ir.LazyTensor(lambda: side_by_side(tensors), dtype=tensors[0].dtype, shape=ir.Shape([rows, columns]))
