"""Stages of a step model compute what the whole does, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.testing
import onnx
import onnx_ir as ir
import pytest
from onnx.parser import parse_model

from outrider.backends.rewriting.stages import cut, layers, possible_ends
from outrider.bundle.manifest import model_file
from outrider.errors import UsageError
from outrider.tests.backends.staged import check_stages
from outrider.tests.export.architectures import CONFIGS, MIXED_LAYERS, four_layers
from outrider.tests.export.tiny_configs import changed

GraphsOf = Callable[[str, Any], Path]
IN_TEST = ("Llama", "Gemma-3", "Granite-4")  # full attention, windows, Mamba-2 with experts; tied embeddings in the second
SIX_OF_GEMMA_3N = {"num_kv_shared_layers": 2, "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.5, 0.0] * 3}
BOUNDARY = re.compile(r"boundary\.\d+\.\d+")


def boundaries(stages: list[ir.Model]) -> list[list[str]]:
    """The shapes of what each stage passes to the next."""
    passed = [[each for each in stage.graph.outputs if BOUNDARY.fullmatch(each.name or "")] for stage in stages[:-1]]
    return [[str(each.shape) for each in values] for values in passed]


@pytest.mark.parametrize("name", [each if each in IN_TEST else pytest.param(each, marks=pytest.mark.slow) for each in CONFIGS])
def test_stages_of_every_architecture_at_every_layer(name: str, graphs_of: GraphsOf, tmp_path: Path) -> None:
    graph = graphs_of(f"{name}, four layers", four_layers(name)) / "fp32.onnx"
    count = layers(ir.load(graph))
    assert count == (4 if name != "Nemotron-H" else 3)  # of its layers, the one with experts keeps nothing
    made = check_stages(graph, tmp_path)
    assert len(made) == count
    for stages in made:
        assert boundaries(stages) == [["[batch,rows,64]"]] * (len(stages) - 1)
    for index, stage in enumerate(made[-1]):
        names = [each.name for each in (*stage.graph.inputs, *stage.graph.outputs)]
        assert ("logits" in names) == (index == count - 1)
        assert [each for each in names if each is not None and each.startswith("past_")] != []


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_is_in_one_stage_unless_it_is_tied(tied: bool, graphs_of: GraphsOf, tmp_path: Path) -> None:
    """Otherwise stages would need more memory than the whole; and the weights stay in its file."""
    name = "Gemma-3" if tied else "Llama"
    graph = graphs_of(f"{name}, four layers", four_layers(name)) / "fp32.onnx"
    stages = cut(ir.load(graph), [1, 3, 4])
    places, norms = [], []
    for index, stage in enumerate(stages):
        ir.save(stage, tmp_path / f"{index}.onnx")
        tensors = onnx.load(tmp_path / f"{index}.onnx", load_external_data=False).graph.initializer
        outside = [each for each in tensors if each.data_location == onnx.TensorProto.EXTERNAL]
        places.append({tuple((entry.key, entry.value) for entry in each.external_data) for each in outside})
        assert max(len(each.raw_data) for each in tensors) <= 1024
        found = [re.search(r"layers\.(\d+)\.post_attention_layernorm", each.name) for each in tensors]
        norms.append([int(match[1]) for match in found if match])
    assert {path.suffix for path in tmp_path.iterdir()} == {".onnx"}
    whole = onnx.load(graph, load_external_data=False).graph.initializer
    assert set().union(*places) == {
        tuple((entry.key, entry.value) for entry in each.external_data) for each in whole if each.external_data
    }
    assert len(places[0] & places[2]) == tied
    assert not places[1] & (places[0] | places[2])
    assert tied or norms == [[0], [1, 2], [3]]  # all that a layer computes is in one stage; Gemma's have other names


@pytest.mark.parametrize("precision", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_stages_of_rounded_weights(precision: str, trained_exports: Callable[[str], Path], tmp_path: Path) -> None:
    check_stages(trained_exports(precision) / model_file("target"), tmp_path)


@pytest.mark.slow
def test_onnx_runtime_rounds_fp16_at_a_boundary(trained_exports: Callable[[str], Path], tmp_path: Path) -> None:
    """On CPUs, it computes fp16 in fp32, without rounding between operators."""

    def close(got: Any, want: Any) -> None:
        numpy.testing.assert_allclose(got, want, atol=0.05)

    check_stages(trained_exports("fp16") / model_file("target"), tmp_path, compare=close)


def test_features_for_a_draft_head_are_of_the_last_stage(drafter_exports: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The head reads the inputs of the first and the second layer, and the output of the second."""
    (stages, _) = check_stages(drafter_exports("fp32", "random head") / model_file("target"), tmp_path)
    first, last = ([each.name for each in (*stage.graph.inputs, *stage.graph.outputs)] for stage in stages)
    assert not {"past_features", "present_features"} & {*first}
    assert {"past_features", "present_features"} <= {*last}
    assert boundaries(stages) == [["[batch,rows,96]"] * 2]


# Three layers in miniature: each adds the sum of its keys to the stream.
TOY = """
<ir_version: 10, opset_import: ["": 24]>
step (int64[batch, rows] input_ids, int64[batch] positions, {past}) => (float[batch, rows, 64] logits, {present})
<{streams}, int64[1] one = {{1}}, int64[1] two = {{2}}> {{
  x_0 = Gather (table, input_ids)
  {layers}
  {last}
}}
"""
LAYER = """
  k_{0} = Unsqueeze (x_{0}, one)
  present_key_{0} = TensorScatter <axis: int = -2> (past_key_{0}, k_{0}, positions)
  sum_{0} = ReduceSum <keepdims: int = 0> ({2}_key_{0}, two)
  bounded_{0} = Tanh (sum_{0})
  {1} = Add (x_{0}, bounded_{0})
"""


def toy(folder: Path, last: str, after_first: str = "", reads: str = "present") -> Path:
    """The graph of three such layers, with the nodes `after_first` behind the first one and `last` at the end.

    Layers may read their caches as they are before the step: the `past` ones.
    """
    caches = {
        kind: ", ".join(f"float[batch, 1, capacity, 64] {kind}_key_{at}" for at in range(3)) for kind in ("past", "present")
    }
    streams = ", ".join(f"float[batch, rows, 64] {name}" for name in ("x_0", "x_1", "x_2", "x_3", "z"))
    first = LAYER.format(0, "x_1" if not after_first else "y", reads)
    nodes = first + after_first + "".join(LAYER.format(at, f"x_{at + 1}", reads) for at in (1, 2))
    model = parse_model(TOY.format(**caches, streams=streams, layers=nodes, last=last))
    for name in ("table", "other"):
        table = np.random.default_rng(len(name)).standard_normal((64, 64)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(table, name))
    onnx.save(model, folder / "toy.onnx")
    return folder / "toy.onnx"


EMBEDDING_AGAIN = """
  yes = Constant <value = bool {1}> ()
  logits = If (yes) <then_branch = then () => (float[batch, rows, 64] a) { a = Add (x_3, x_0) },
    else_branch = otherwise () => (float[batch, rows, 64] b) { b = Identity (x_3) }>
"""
SIZE_OF_A_CACHE = """
  batch = Shape <start: int = 0, end: int = 1> (past_key_0)
  capacity = Shape <start: int = 2, end: int = 3> (past_key_1)
  both = Mul (batch, capacity)
  factor = Cast <to: int = 1> (both)
  logits = Mul (x_3, factor)
"""
BESIDE_THE_KEYS = """
  z = Gather (other, input_ids)
  x_1 = Add (y, z)
"""
KEYS_AGAIN = """
  sum = ReduceSum <keepdims: int = 0> (present_key_1, two)
  logits = Add (x_3, sum)
"""


@pytest.mark.parametrize(("last", "passed"), [(EMBEDDING_AGAIN, 2), (SIZE_OF_A_CACHE, 1)], ids=["embedding", "size"])
def test_what_a_later_stage_needs_is_passed_on(last: str, passed: int, tmp_path: Path) -> None:
    """Also in a sub-graph, and through stages that do not need it; but not for a size."""
    (tmp_path / "whole").mkdir()
    for stages in check_stages(toy(tmp_path / "whole", last), tmp_path):
        assert boundaries(stages) == [["[batch,rows,64]"] * passed] * (len(stages) - 1)


def test_what_no_key_needs_is_computed_once(tmp_path: Path) -> None:
    """Gemma-3n's inputs of each layer are like that: from a table that is larger than the others."""
    (tmp_path / "whole").mkdir()
    for stages in check_stages(toy(tmp_path / "whole", "logits = Add (x_3, z)", BESIDE_THE_KEYS), tmp_path):
        assert ["other" in stage.graph.initializers for stage in stages] == [True, *[False] * (len(stages) - 1)]


@pytest.mark.parametrize("reads", ["past", "present"])
def test_a_cut_between_a_cache_and_a_later_layer_that_reads_it_is_refused(reads: str, tmp_path: Path) -> None:
    model = ir.load(toy(tmp_path, KEYS_AGAIN, reads=reads))
    assert possible_ends(model) == [1, 3]
    with pytest.raises(UsageError, match="end after 2 layers: a later layer reads the cache of layer 1") as refused:
        cut(model, [1, 2, 3])
    assert refused.value.hint == "let it end after another number of layers: 1"
    (tmp_path / "stages").mkdir()
    check_stages(tmp_path / "toy.onnx", tmp_path / "stages")


@pytest.mark.slow
def test_layers_that_share_keys_stay_with_them(graphs_of: GraphsOf, tmp_path: Path) -> None:
    """Of Gemma-3n's six layers, the last two read the keys of the two before them, and belong to these."""
    config = changed("gemma3n_text", {"num_hidden_layers": 6, "layer_types": MIXED_LAYERS * 3, **SIX_OF_GEMMA_3N})
    graph = graphs_of("Gemma-3n, six layers", config) / "fp32.onnx"
    assert possible_ends(ir.load(graph)) == [1, 2, 4]
    check_stages(graph, tmp_path)


@pytest.mark.parametrize("ends", [[], [0, 3], [1, 1, 3], [2, 1, 3], [1, 2], [1, 4]])
def test_stages_that_are_none_are_refused(ends: list[int], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stages of a target with 3 layers cannot end after"):
        cut(ir.load(toy(tmp_path, KEYS_AGAIN)), ends)
