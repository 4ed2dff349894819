"""Weights with zero points or negative scales become symmetric ones with positive scales, and products stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from outrider.backends.onnxruntime.engine import session_options
from outrider.backends.rewriting.symmetric import make_symmetric
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.export.pair import export_pair
from outrider.tests.backends.products import TYPES, write_product
from outrider.tests.export import quantized
from outrider.tests.support import PAIR, build

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
