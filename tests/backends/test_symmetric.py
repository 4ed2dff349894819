"""Weights with zero points or negative scales become symmetric ones with positive scales, and products stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from outrider.backends.rewriting.symmetric import make_symmetric
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.export.pair import export_pair
from outrider.tests.export import quantized
from outrider.tests.support import PAIR, build

INPUTS, OUTPUTS, BLOCK = 64, 24, 16
TYPES = {(4, True): TensorProto.INT4, (4, False): TensorProto.UINT4, (8, True): TensorProto.INT8, (8, False): TensorProto.UINT8}


def tensor(name: str, kind: int, values: npt.NDArray[Any]) -> TensorProto:
    data: npt.NDArray[Any] = values.astype(np.uint8)
    if kind in (TensorProto.INT4, TensorProto.UINT4):
        pairs = (data & 15).reshape(-1, 2)
        data = pairs[:, 0] | pairs[:, 1] << 4
    return helper.make_tensor(name, kind, values.shape, data.tobytes(), raw=True)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("signed", "negative"), [(True, True), (False, False), (False, True)])
def test_the_product_is_the_same(bits: int, signed: bool, negative: bool, tmp_path: Path) -> None:
    random, half = np.random.default_rng(0), 2 ** (bits - 1)
    low = -half if signed else 0
    shape = (INPUTS // BLOCK, OUTPUTS)
    scale = random.uniform(0.01, 0.02, shape).astype(np.float32)
    scale[1, 3] = 0
    scale[2] *= -1 if negative else 1
    parts = [tensor("weight", TYPES[bits, signed], random.integers(low, low + 2 * half, (INPUTS, OUTPUTS)))]
    parts.append(numpy_helper.from_array(scale, "scale"))
    if not signed:
        parts.append(tensor("zero", TYPES[bits, False], random.integers(0, 2 * half, shape)))
    names = [each.name for each in parts]
    nodes = [
        helper.make_node("DequantizeLinear", names, ["dense"], axis=0, block_size=BLOCK),
        helper.make_node("MatMul", ["x", "dense"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "s", n]) for name, n in (("x", INPUTS), ("y", OUTPUTS))
    ]
    graph = helper.make_graph(nodes, "product", values[:1], values[1:], parts)
    path, made = tmp_path / "model.onnx", tmp_path / "made.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)
    make_symmetric(path, made)
    onnx.checker.check_model(str(made), full_check=True)
    written = onnx.load(made).graph
    (node,) = (each for each in written.node if each.op_type == "DequantizeLinear")
    tensors = {each.name: each for each in written.initializer}
    assert len(node.input) == 2
    assert tensors[node.input[0]].data_type == TYPES[bits, True]
    assert (numpy_helper.to_array(tensors[node.input[1]]) > 0).all()
    x = random.standard_normal((2, 3, INPUTS)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    want, got = (onnxruntime.InferenceSession(str(each), options).run(None, {"x": x})[0] for each in (path, made))
    np.testing.assert_allclose(got, want, atol=1e-4 * abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_tensorrt_rtx_builds_weights_with_zero_points(form: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="would show that weights with zero points build: pip install 'outrider[rtx]'")
    export_pair(str(quantized.write(PAIR / "target", tmp_path / "model", form)), None, tmp_path / "export", precision="as-is")
    level = {"optimization_level": 0}
    bundle = build(
        tmp_path / "export", tmp_path / "bundle", backend="tensorrt-rtx", capacity=100, k=[2], batch=1, options=level
    )
    check_files(bundle, read_manifest(bundle))
