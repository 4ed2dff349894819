"""Other layouts of integers in quantized weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

PACKED = (ir.DataType.INT4, ir.DataType.UINT4)  # two integers in a byte, the first in its low bits
SIGNED = (ir.DataType.INT4, ir.DataType.INT8)
Bytes = npt.NDArray[np.uint8]


def bits_of(tensor: ir.TensorProtocol) -> int:
    """Return the bits of a tensor's integers, 4 or 8."""
    return 4 if tensor.dtype in PACKED else 8


def unpacked(tensor: ir.TensorProtocol) -> Bytes:
    """Return a tensor's integers as bytes in its shape. Negative ones are in two's complement of their bits."""
    values = np.frombuffer(tensor.tobytes(), np.uint8)  # numpy() returns an array of a slow extension type
    values = np.stack([values & 15, values >> 4], 1) if tensor.dtype in PACKED else values
    return values.reshape(tensor.shape.numpy())


def unsigned(tensor: ir.TensorProtocol) -> Bytes:
    """Return a tensor's integers as bytes in its shape, signed ones increased by half of their range."""
    values = unpacked(tensor)
    return np.bitwise_xor(values, 2 ** (bits_of(tensor) - 1), dtype=np.uint8) if tensor.dtype in SIGNED else values


def paired(values: Bytes) -> Bytes:
    """Return integers of four bits, uint8 [..., 2 n], two to a byte, [..., n]."""
    pairs: Bytes = np.bitwise_or(values[..., ::2], values[..., 1::2] << 4, dtype=np.uint8)
    return pairs
