"""The sampler graphs are graphs that TensorRT takes: parsed and built by TensorRT-RTX, which needs no GPU for that."""

from __future__ import annotations

import time
from typing import Any

import onnx_ir as ir
import pytest

from outrider.engines.samplers import SAMPLERS, sampler_tensors
from outrider.export.graph.sampler import sampler

trt: Any = pytest.importorskip("tensorrt_rtx", reason="would show that the samplers build: pip install 'outrider[rtx]'")

VOCAB, K, EDITS = 151_936, 8, 4096
MAX_CANDIDATES = 3840  # TensorRT's TopK takes no more


@pytest.mark.parametrize("name", SAMPLERS)
def test_it_builds_in_ten_seconds(name: str) -> None:
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    model = ir.to_proto(sampler(name, VOCAB)).SerializeToString()
    started = time.perf_counter()
    parsed = parser.parse(model)
    assert parsed, [f"{parser.get_error(at).node_name()}: {parser.get_error(at).desc()}" for at in range(parser.num_errors)]
    profile = builder.create_optimization_profile()
    for tensor in sampler_tensors(name, VOCAB)[0]:
        if tensor.name == "candidates":
            profile.set_shape_input(tensor.name, [1], [256], [MAX_CANDIDATES])
            continue
        shapes = ({"batch": 1, "rows": K + 1, "edits": edits} for edits in (1, 1, EDITS))
        sizes = [tuple(size if isinstance(size, int) else known[size] for size in tensor.shape) for known in shapes]
        profile.set_shape(tensor.name, *sizes)
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None
    assert plan.nbytes > 0
    assert time.perf_counter() - started < 10  # it takes well under one
