"""The rewrites that fuse graphs for ONNX Runtime: each computes what it replaced, and what none applies to stays unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM, Cohere2Config, LlamaConfig, Qwen2Config, Qwen3Config

from outrider.backends.onnxruntime.fusion.attention import GroupQueryAttention
from outrider.backends.onnxruntime.fusion.fuse import fuse
from outrider.backends.onnxruntime.fusion.products import BlockProducts, with_block_products
from outrider.backends.onnxruntime.fusion.reshapes import Unsplit
from outrider.backends.onnxruntime.fusion.rotary import Rotary
from outrider.backends.onnxruntime.pool import session_options
from outrider.backends.rewriting.graphs import load
from outrider.backends.rewriting.joined_products import Products
from outrider.backends.rewriting.logits import LastRows
from outrider.backends.rewriting.matching import refused
from outrider.backends.rewriting.spare_row import SpareRow
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.graph.step_model import trace
from outrider.export.parity import CHUNKS, Exported, reference
from outrider.export.weights.quantize import pack, quantize_model
from outrider.export.weights.rounding import Rounding
from outrider.tests.backends.fused_graphs import CAPACITY, operators
from outrider.tests.backends.product_graphs import write_product
from outrider.tests.export.architectures import COMMON, ONE_LAYER, WINDOW
from outrider.tests.support import PAIR, Fused


def rounded(config: Any, folder: Path) -> tuple[Path, CacheLayout]:
    """The graph of a tiny random model at 4 bits, whose biases are not zero, and its layers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config)).eval()  # tracing leaves its mark on it
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.requires_grad_(False)
    quantize_model(model, Streamed(), Rounding("int4"), load_tokenizer(Source.parse(str(PAIR / "draft"))), None)
    layout = reference(model, torch.ones((1, sum(CHUNKS)), dtype=torch.int64)).layout
    program = trace(model, layout, spare_row=True)
    pack(program, model, Streamed())
    program.save(folder / "model.onnx", external_data=True)
    return folder / "model.onnx", layout


QWEN2 = Qwen2Config(**ONE_LAYER)
COHERE2 = Cohere2Config(**COMMON, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize(
    ("config", "joined_products", "products"),
    [
        pytest.param(LlamaConfig(**ONE_LAYER), 2, 5, marks=pytest.mark.slow),
        (QWEN2, 2, 5),  # the same with biases
        # With norms between the products and attention, as in tests/export/architectures.py.
        pytest.param(Qwen3Config(**ONE_LAYER, head_dim=24), 2, 5, marks=pytest.mark.slow),
        # One norm for attention and all else, and no rotary embedding in its second layer.
        pytest.param(COHERE2, 2, 7, marks=pytest.mark.slow),
    ],
    ids=lambda each: type(each).__name__ if hasattr(each, "vocab_size") else None,
)
def test_joined_products_give_the_bits_of_those_they_join(
    request: pytest.FixtureRequest,
    config: Any,
    joined_products: int,
    products: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, layout = request.getfixturevalue("qwen2") if config is QWEN2 else rounded(config, tmp_path)
    tokens = torch.randint(0, 320, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(0))
    layers = config.num_hidden_layers
    done, _ = fuse(load(graph), tmp_path / "joined.onnx", CAPACITY - 1, steady=True, batch=1)
    assert done["joined products"] == joined_products
    assert done["attention"] == layers
    monkeypatch.setattr(Products, "check", lambda self, context, **_: refused("not now"))
    done, _ = fuse(load(graph), tmp_path / "apart.onnx", CAPACITY - 1, steady=True, batch=1)
    assert "joined products" not in done
    assert [operators(tmp_path / f"{each}.onnx")["MatMulNBits"] for each in ("apart", "joined")] == [7 * layers + 1, products]
    joined, apart = (Fused(tmp_path / f"{each}.onnx", layout, "int4").logits(tokens) for each in ("joined", "apart"))
    np.testing.assert_array_equal(joined, apart)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CacheLayout]:
    """The graph of a tiny random Qwen2 at 4 bits, and its layers."""
    return rounded(QWEN2, tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def plain(qwen2: tuple[Path, CacheLayout], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That graph with fused norms only, which every other rewrite comes with."""
    path = tmp_path_factory.mktemp("plain") / "norms.onnx"
    with pytest.MonkeyPatch.context() as patch:
        for other in REWRITES:
            patch.setattr(other, "check", lambda self, context, **_: refused("not now"))
        fuse(load(qwen2[0]), path, CAPACITY - 1, steady=False, batch=1)
    return path


REWRITES = [Rotary, Products, SpareRow, GroupQueryAttention, Unsplit, LastRows, BlockProducts]


@pytest.mark.parametrize(
    ("rewrites", "made", "changed"),
    [
        ([Rotary], {"rotary embeddings": 2}, "Neg"),
        ([Products], {"joined products": 2}, "MatMul"),
        ([SpareRow], {}, "Concat"),  # which is not counted
        ([SpareRow, GroupQueryAttention], {"attention": 1}, "Attention"),
        ([SpareRow, GroupQueryAttention, Unsplit], {"attention": 1, "heads joined": 1}, "Attention"),
        ([LastRows], {"logits of some rows": 1}, "Slice"),
    ],
    ids=lambda each: each[-1].__name__ if isinstance(each, list) else "",
)
def test_each_rewrite_by_itself_computes_what_it_replaced(
    qwen2: tuple[Path, CacheLayout],
    plain: Path,
    rewrites: list[type],
    made: dict[str, int],
    changed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rewrite that needs the result of another runs together with it."""
    graph, layout = qwen2
    for other in set(REWRITES) - set(rewrites):
        monkeypatch.setattr(other, "check", lambda self, context, **_: refused("not now"))
    done, _ = fuse(load(graph), tmp_path / "fused.onnx", CAPACITY - 1, steady=False, batch=1)
    assert {name: count for name, count in done.items() if "norms" not in name} == made
    before, after = (operators(path).get(changed, 0) for path in (plain, tmp_path / "fused.onnx"))
    assert after > before if LastRows in rewrites else after < before
    tokens = torch.randint(0, 320, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    want = Exported(graph, layout, "int4").logits(tokens)
    got = (Fused if LastRows in rewrites else Exported)(tmp_path / "fused.onnx", layout, "int4").logits(tokens)
    np.testing.assert_allclose(got, want, atol=1e-4)


def capped(node: onnx.NodeProto) -> None:
    if node.op_type == "Attention":
        node.attribute.append(onnx.helper.make_attribute("softcap", 0.01))


def twisted(node: onnx.NodeProto) -> None:
    if node.op_type == "Cos":
        node.op_type = "Tan"


@pytest.mark.parametrize(
    ("edit", "lacks", "reasons"),
    [
        (capped, "attention", ["attention of 1 of 1 layers", "it has attributes besides a scale"]),
        (twisted, "rotary embeddings", []),
    ],
)
def test_nodes_that_a_rewrite_does_not_apply_to_stay_unchanged(
    qwen2: tuple[Path, CacheLayout],
    edit: Callable[[onnx.NodeProto], None],
    lacks: str,
    reasons: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, layout = qwen2
    monkeypatch.setattr(BlockProducts, "check", lambda self, context, **_: refused("it rounds activations"))
    model = onnx.load(graph)
    for node in model.graph.node:
        edit(node)
    onnx.save(model, tmp_path / "edited.onnx")
    done, left = fuse(load(tmp_path / "edited.onnx"), tmp_path / "fused.onnx", CAPACITY - 1, steady=False, batch=1)
    assert lacks not in done
    assert done["joined products"] == 2
    assert left == reasons
    tokens = torch.randint(0, 320, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    want, plain = (Exported(path, layout, "int4").logits(tokens) for path in (tmp_path / "edited.onnx", graph))
    np.testing.assert_allclose(Fused(tmp_path / "fused.onnx", layout, "int4").logits(tokens), want, atol=1e-4)
    assert np.abs(want - plain).max() > 1e-3  # the edit shows


def test_products_of_integers_give_the_bits_of_onnx_runtime_s_own(tmp_path: Path) -> None:
    """Which it puts in their place itself, whenever it loads the graph, for each kind of weights."""
    random, inputs, outputs = np.random.default_rng(0), 96, 24
    x = random.standard_normal((1, 3, inputs)).astype(np.float32)
    options = session_options()
    for bits, signed, block in itertools.product((4, 8), (True, False), (16, 32)):
        path, made = tmp_path / f"{bits}-{signed}-{block}.onnx", tmp_path / f"{bits}-{signed}-{block}-made.onnx"
        scale = random.uniform(0.01, 0.02, (inputs // block, outputs)).astype(np.float32)
        write_product(path, bits, signed, scale, block)  # with an odd number of blocks of 32
        with_block_products(path, made)
        assert operators(made) == {"MatMulNBits": 1}
        want, got = (onnxruntime.InferenceSession(str(each), options).run(None, {"x": x})[0] for each in (path, made))
        np.testing.assert_array_equal(got, want)
