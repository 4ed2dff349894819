"""Weights with zero points or negative scales become symmetric ones with positive scales, and products stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from outrider.backends.onnxruntime.pool import session_options
from outrider.backends.rewriting.graphs import load, save
from outrider.backends.rewriting.symmetric import make_symmetric
from outrider.tests.backends.product_graphs import TYPES, write_product

INPUTS, OUTPUTS, BLOCK = 64, 24, 16


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("signed", "negative"), [(True, True), (False, False), (False, True)])
def test_the_product_is_the_same(bits: int, signed: bool, negative: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    scale = random.uniform(0.01, 0.02, (INPUTS // BLOCK, OUTPUTS)).astype(np.float32)
    scale[1, 3] = 0
    scale[2] *= -1 if negative else 1
    path, made = tmp_path / "model.onnx", tmp_path / "made.onnx"
    write_product(path, bits, signed, scale, BLOCK)
    make_symmetric(path, made)
    onnx.checker.check_model(str(made), full_check=True)
    written = onnx.load(made).graph
    (node,) = (each for each in written.node if each.op_type == "DequantizeLinear")
    tensors = {each.name: each for each in written.initializer}
    assert len(node.input) == 2
    assert tensors[node.input[0]].data_type == TYPES[bits, True]
    assert (numpy_helper.to_array(tensors[node.input[1]]) > 0).all()
    x = random.standard_normal((2, 3, INPUTS)).astype(np.float32)
    options = session_options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    want, got = (onnxruntime.InferenceSession(str(each), options).run(None, {"x": x})[0] for each in (path, made))
    np.testing.assert_allclose(got, want, atol=1e-4 * abs(want).max())


def test_the_smallest_tensor_in_a_file_is_saved_while_it_is_read(tmp_path: Path) -> None:
    size = 65  # in 260 bytes, the least that exports have in the file
    bias = numpy_helper.from_array(np.arange(size, dtype=np.float32), "bias")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, size]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "bias"], ["y"])], "sum", values[:1], values[1:], [bias])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=4 * size)
    loaded = load(tmp_path / "model.onnx")
    tensor = loaded.graph.initializers["bias"].const_value
    assert tensor is not None
    seen = memoryview(tensor.numpy())  # type: ignore[arg-type]
    save(loaded, tmp_path / "saved.onnx")
    assert len(seen) == size
    np.testing.assert_array_equal(numpy_helper.to_array(onnx.load(tmp_path / "saved.onnx").graph.initializer[0]), seen)
