"""Graphs of one product with dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

TYPES = {(4, True): TensorProto.INT4, (4, False): TensorProto.UINT4, (8, True): TensorProto.INT8, (8, False): TensorProto.UINT8}


def write_product(path: Path, bits: int, signed: bool, scale: npt.NDArray[np.float32], block: int) -> None:
    """Write a graph that computes `y` from `x`, with random weights; those without a sign have zero points."""
    random, half = np.random.default_rng(0), 2 ** (bits - 1)
    groups, outputs = scale.shape
    inputs, low = groups * block, -half if signed else 0
    parts = [_tensor("weight", TYPES[bits, signed], random.integers(low, low + 2 * half, (inputs, outputs)))]
    parts.append(numpy_helper.from_array(scale, "scale"))
    if not signed:
        parts.append(_tensor("zero", TYPES[bits, False], random.integers(0, 2 * half, scale.shape)))
    names = [each.name for each in parts]
    nodes = [
        helper.make_node("DequantizeLinear", names, ["dense"], axis=0, block_size=block),
        helper.make_node("MatMul", ["x", "dense"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "s", n]) for name, n in (("x", inputs), ("y", outputs))
    ]
    graph = helper.make_graph(nodes, "product", values[:1], values[1:], parts)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)


def _tensor(name: str, kind: int, values: npt.NDArray[Any]) -> TensorProto:
    data: npt.NDArray[Any] = values.astype(np.uint8)
    if kind in (TensorProto.INT4, TensorProto.UINT4):
        pairs = (data & 15).reshape(-1, 2)
        data = pairs[:, 0] | pairs[:, 1] << 4
    return helper.make_tensor(name, kind, values.shape, data.tobytes(), raw=True)
