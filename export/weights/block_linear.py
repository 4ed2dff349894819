"""A linear layer with int4 or int8 weights, as a PyTorch module that is traced to standard ONNX operators."""

from __future__ import annotations

import torch
from torch import nn
from torch.onnx.ops import symbolic

from outrider.export.graph.tracing import OPSET
from outrider.export.weights.stored import Form


class BlockLinear(nn.Module):
    """A linear layer y = x W + bias whose weights have one scale per output for each block of inputs.

    Buffers: the tensors of a `Form`, and `bias`, float32 [N] or None.
    """

    quantized: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    offset: torch.Tensor | None
    order: torch.Tensor | None
    factors: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, form: Form, bias: torch.Tensor | None, exact: bool):
        """Make one; `exact` tells whether its weights are the checkpoint's."""
        super().__init__()
        self.bits, self.exact = form.bits, exact
        for name, tensor in form.tensors().items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 [..., N] of float32 [..., K]."""
        if self.order is not None:
            rows = rows[..., self.order]
        if self.factors is not None:
            rows = rows * self.factors
        if torch.compiler.is_exporting():
            # ONNX Runtime fuses only the layout [K, N] with axis 0 with the product, into MatMulNBits.
            weight = symbolic(
                "DequantizeLinear",
                (self.quantized, self.scale) if self.zero is None else (self.quantized, self.scale, self.zero),
                {"axis": 0, "block_size": len(self.quantized) // len(self.scale)},
                dtype=torch.float32,
                shape=self.quantized.shape,
                version=OPSET,
            )
        else:
            weight = dequantize(self.quantized, self.scale, self.zero)
        product = rows @ weight
        if self.offset is not None:  # a block's weights have it in common
            product = product + _in_groups(rows, len(self.offset)).sum(-1) @ self.offset
        return product if self.bias is None else product + self.bias


def _in_groups(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [..., groups, K / groups] of [..., K].

    In a graph, a 0 copies a size of the input. TensorRT cannot tell that sizes computed elsewhere are equal to it.
    """
    shape = (*rows.shape[:-1], groups, rows.shape[-1] // groups)
    if not torch.compiler.is_exporting():
        return rows.reshape(shape)
    copied = torch.tensor([0] * (rows.dim() - 1) + list(shape[-2:]))
    return symbolic("Reshape", (rows, copied), {}, dtype=torch.float32, shape=shape, version=OPSET)


def dequantize(quantized: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `DequantizeLinear`: (u)int8 [K, N], float32 [K / block, N] and (u)int8 [K / block, N] -> float32 [K, N]."""
    blocks, outputs = scale.shape
    integers = quantized.reshape(blocks, -1, outputs)
    if zero is not None:
        integers = integers.to(torch.int16) - zero[:, None]
    return integers.to(scale.dtype, copy=True).mul_(scale[:, None]).reshape(-1, outputs)  # in place: new memory takes longest
