"""Other layouts of the integers in quantized weights, computed without keeping what was read."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

PACKED = (ir.DataType.INT4, ir.DataType.UINT4)  # two integers in a byte, the first in its low bits
SIGNED = (ir.DataType.INT4, ir.DataType.INT8)
ROWS_AT_ONCE = 2**8  # of the result, which should stay in the caches
Bytes = npt.NDArray[np.uint8]


def bits_of(tensor: ir.TensorProtocol) -> int:
    """Return the bits of a tensor's integers, 4 or 8."""
    return 4 if tensor.dtype in PACKED else 8


def bytes_of(tensor: Any) -> Bytes:
    """Return the bytes of an `ir.TensorProtocol`. Its `numpy` and `tobytes` would map its file, and keep unpacked integers."""
    buffer = io.BytesIO()
    tensor.tofile(buffer)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def unsigned(tensor: ir.TensorProtocol) -> Bytes:
    """Return a tensor's integers as bytes in its shape, signed ones increased by half of their range."""
    values = _unpacked(tensor)
    return np.bitwise_xor(values, 2 ** (bits_of(tensor) - 1), dtype=np.uint8) if tensor.dtype in SIGNED else values


def _unpacked(tensor: ir.TensorProtocol) -> Bytes:
    values = bytes_of(tensor)
    values = np.stack([values & 15, values >> 4], 1) if tensor.dtype in PACKED else values
    return values.reshape(tensor.shape.numpy())


def paired(values: Bytes) -> Bytes:
    """Return integers of four bits, uint8 [..., 2 n], two to a byte, [..., n]."""
    pairs: Bytes = np.bitwise_or(values[..., ::2], values[..., 1::2] << 4, dtype=np.uint8)
    return pairs


def by_output(tensor: ir.TensorProtocol) -> Bytes:
    """Return the bytes of a matrix of integers [K, N], with an even K N, as those of [N, K]; uint8 [N * K * bits / 8]."""
    inputs, outputs = tensor.shape.numpy()
    if tensor.dtype not in PACKED:
        return np.ascontiguousarray(bytes_of(tensor).reshape(inputs, outputs).T).reshape(-1)
    if inputs % 2 or outputs % 2:  # a byte has integers of two outputs there or of two inputs here
        return paired(np.ascontiguousarray(_unpacked(tensor).T).reshape(-1))
    source = bytes_of(tensor).reshape(inputs, -1)
    turned = np.empty((outputs, inputs // 2), np.uint8)
    for at in range(0, inputs // 2, ROWS_AT_ONCE):
        rows = source[2 * at : 2 * (at + ROWS_AT_ONCE)]
        even, odd = rows[::2], rows[1::2]
        turned[::2, at : at + ROWS_AT_ONCE] = (even & 15 | odd << 4).T
        turned[1::2, at : at + ROWS_AT_ONCE] = (even >> 4 | odd & 240).T
    return turned.reshape(-1)


def side_by_side(tensors: list[ir.TensorProtocol]) -> ir.TensorProtocol:
    """Return matrices [K, N] of one type beside each other. With two integers to a byte, K or all N are even."""
    first, rows = tensors[0], tensors[0].shape.numpy()[0]
    if first.dtype in PACKED and any(each.shape.numpy()[1] % 2 for each in tensors):
        data = paired(np.concatenate([_unpacked(each) for each in tensors], axis=1).reshape(-1))
    else:
        data = np.concatenate([bytes_of(each).reshape(rows, -1) for each in tensors], axis=1)
    shape = ir.Shape([rows, sum(each.shape.numpy()[1] for each in tensors)])
    if first.dtype in PACKED:
        return ir.PackedTensor(data.reshape(-1), first.dtype, shape=shape)
    return ir.tensor(data.view(first.dtype.numpy()).reshape(shape.numpy()), dtype=first.dtype)
