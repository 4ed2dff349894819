"""Weights of int4 and int8: the arithmetic, and the graph in ONNX Runtime and TensorRT-RTX."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
import transformers as hf
from onnx import TensorProto, numpy_helper
from transformers import LlamaForCausalLM, PreTrainedModel

from outrider.audit.audit import DRAWS, EVERYTHING, MASKED, SAMPLED, Scope, audit
from outrider.audit.prompts import PROMPTS
from outrider.backends.onnxruntime.pool import session_options
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.graph.step_model import trace
from outrider.export.pair import export_pair
from outrider.export.parity import Exported, reference, sample_tokens
from outrider.export.weights.block_linear import dequantize
from outrider.export.weights.quantize import MIN_IMPORTANCE, SCALE_FACTORS, pack, quantize, quantize_model
from outrider.export.weights.rounding import Rounding
from outrider.runtime.generation import Outrider
from outrider.tests.export.architectures import COMMON, ONE_LAYER
from outrider.tests.support import PAIR, build, llama, write_checkpoint

BITS = {"int4": 4, "int8": 8}
TYPES = {"int4": TensorProto.INT4, "int8": TensorProto.INT8}
Array = npt.NDArray[Any]


def reference_quantize(weight: Array, bits: int, block: int) -> Array:
    """Return the quantized weights [K, N], computed block by block in float64."""
    most, rounded = 2 ** (bits - 1), np.zeros(weight.T.shape)
    for output, row in enumerate(weight.astype(np.float64)):
        for first in range(0, len(row), block):
            w = row[first : first + block]
            size = abs(w) / max(abs(w).max(), 1e-30) + MIN_IMPORTANCE
            candidates = []
            for factor in SCALE_FACTORS[bits]:
                q = np.clip(np.round(w / max(abs(w).max(), 1e-30) * ((most - 1) * factor)), -most, most - 1)
                scale = (size * w @ q) / (size * q @ q) if q.any() else 1.0
                candidates.append(((size * (w - q * scale) ** 2).sum(), tuple(q * scale)))
            rounded[first : first + block, output] = min(candidates)[1]
    return rounded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [32, 128])
def test_rounding_follows_the_formula(bits: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.export.weights.quantize.WEIGHTS_AT_ONCE", 6 * block)  # two rows a piece, and one in the last
    weight = torch.from_numpy(np.random.default_rng(0).standard_t(3, (7, 3 * block)).astype(np.float32))
    weight[0, :block] = 0  # a block of zeros, one of tiny weights, and one of huge weights
    weight[1, :block] *= 1e-30
    weight[2, :block] *= 1e30
    quantized, scale = quantize(weight, bits, block)
    assert quantized.dtype == torch.int8
    assert scale.shape == (3, 7)
    assert (scale > 0).all()  # TensorRT takes only positive scales
    assert quantized.min() >= -(2 ** (bits - 1))
    assert quantized.max() <= 2 ** (bits - 1) - 1
    want = reference_quantize(weight.numpy(), bits, block)
    np.testing.assert_allclose(dequantize(quantized, scale).numpy(), want, rtol=1e-4)
    by_hand = quantized.numpy().astype(np.float64) * np.repeat(scale.numpy(), block, axis=0)
    np.testing.assert_allclose(dequantize(quantized, scale).numpy(), by_hand, rtol=1e-6)


@pytest.fixture(scope="module")
def exports(trained_exports: Callable[[str], Path]) -> dict[str, Path]:
    """The shipped pair in either precision, with the heads that it has by default."""
    return {precision: trained_exports(precision) for precision in BITS}


HEADS = {"int4": {"target": "int8", "draft": "int4"}, "int8": {"target": "int8", "draft": "int8"}}
BLOCKS = {"target": {"int4": 32, "int8": 64}, "draft": {"int4": 128, "int8": 128}}


def block_of(role: str, precision: str, inputs: int) -> int:
    return next(size for size in (128, 64, 32) if size <= BLOCKS[role][precision] and inputs % size == 0)


@pytest.mark.parametrize("role", BLOCKS)
@pytest.mark.parametrize("precision", BITS)
def test_the_graph_has_the_rounded_weights_and_the_embedding(exports: dict[str, Path], precision: str, role: str) -> None:
    path = exports[precision] / role / "model.onnx"
    onnx.checker.check_model(str(path))
    graph = onnx.load(path).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
    checkpoint = LlamaForCausalLM.from_pretrained(PAIR / role, dtype=torch.float32)
    modules = dict(checkpoint.named_modules())
    for node in nodes:
        options = {each.name: each.i for each in node.attribute}
        assert (options["axis"], len(node.input)) == (0, 2)
        name = node.input[0].removeprefix("model.").removesuffix(".quantized")
        kind = HEADS[precision][role] if name == "lm_head" else precision
        tensor, scale = tensors[node.input[0]], tensors[node.input[1]]
        assert (tensor.data_type, scale.data_type) == (TYPES[kind], TensorProto.FLOAT)
        weight = modules.pop(name).weight.detach()
        block = block_of(role, kind, weight.shape[1])
        assert options["block_size"] == block
        quantized, want = quantize(weight, BITS[kind], block)
        assert (numpy_helper.to_array(tensor).astype(np.int8) == quantized.numpy()).all()
        assert (numpy_helper.to_array(scale) == want.numpy()).all()
    assert not any(isinstance(module, torch.nn.Linear) for module in modules.values())  # every linear layer was quantized
    table = numpy_helper.to_array(tensors["model.model.embed_tokens.weight"])
    assert table.dtype == np.float16
    np.testing.assert_allclose(table, checkpoint.model.embed_tokens.weight.detach(), rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize("precision", BITS)
def test_sizes_and_manifest_match_what_was_done(exports: dict[str, Path], precision: str) -> None:
    manifest = read_manifest(exports[precision])
    check_files(exports[precision], manifest)
    for role, model in manifest.models.items():
        parity, rounded = model.parity, model.quantization
        assert rounded is not None
        assert (model.precision, rounded.head_precision, rounded.method) == (precision, HEADS[precision][role], "rtn")
        assert rounded.block == BLOCKS[role][precision]
        assert rounded.kept == {}
        config = json.loads((PAIR / role / "config.json").read_text())
        table = config["vocab_size"] * config["hidden_size"]
        blocks = rounded.weights - table
        assert 0 < blocks < model.parameters
        wide = config["num_hidden_layers"] * config["hidden_size"] * config["intermediate_size"]
        want = (blocks * BITS[precision] + table * BITS[HEADS[precision][role]] + table * 16) / 8
        for weights, kind, inputs in (
            (blocks - wide, precision, config["hidden_size"]),
            (wide, precision, config["intermediate_size"]),
            (table, HEADS[precision][role], config["hidden_size"]),
        ):
            want += weights / block_of(role, kind, inputs) * 4  # scales
        size = (exports[precision] / role / "model.onnx.data").stat().st_size
        assert want <= size <= 1.03 * want + 50_000  # norms, alignment
        assert parity.max_abs_diff <= parity.tolerance < 0.01
        assert parity.perplexity is not None
        assert parity.reference_perplexity is not None
        assert 20 < parity.reference_perplexity < 200  # of 4,096 tokens, on text unlike the training data
        assert 0.9 < parity.perplexity / parity.reference_perplexity < 1.1


@pytest.mark.parametrize("precision", BITS)
def test_onnx_runtime_fuses_every_product(exports: dict[str, Path], tmp_path: Path, precision: str) -> None:
    options = session_options()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(exports[precision] / "draft" / "model.onnx"), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
    bits = [attribute.i for node in nodes for attribute in node.attribute if attribute.name == "bits"]
    assert sorted(bits) == sorted([BITS[precision]] * 14 + [BITS[HEADS[precision]["draft"]]])
    assert not any(node.op_type == "DequantizeLinear" for node in nodes)


@pytest.mark.slow  # the whole audits of `make test` are of int4
@pytest.mark.parametrize(
    ("precision", "draws", "scope", "batch"),
    [
        ("int4", 10, Scope(PROMPTS[:4], MASKED[:1], SAMPLED[-1:], controls=False), 2),
        *((each, DRAWS, EVERYTHING, 8) for each in BITS),
    ],
)
def test_the_audit_passes(
    exports: dict[str, Path], tmp_path: Path, precision: str, draws: int, scope: Scope, batch: int
) -> None:
    """In short, without the controls: the samplers are those of fp32, whose audit tests them."""
    bundle = build(exports[precision], tmp_path / "bundle", capacity=255, k=[1, 4], batch=batch)
    found = audit(Outrider.load(bundle, slots=None), draws=draws, scope=scope)
    assert found.passed, found.as_dict()
    for texts in (found.greedy, found.batched):
        assert texts is not None
        assert texts.near_ties == []  # bit-identical


def random_model(folder: Path, config: Any) -> tuple[PreTrainedModel, Source]:
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(config)
    source = Source.parse(str(write_checkpoint(folder / "model", made)))
    return load_model(source, "int4"), source


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (
            hf.GPT2Config(vocab_size=320, n_embd=64, n_layer=1, n_head=4),
            set[str](),
        ),  # Conv1D, biases, learned positions, a tied head
        (hf.GemmaConfig(**ONE_LAYER, head_dim=16), set[str]()),  # a scaled embedding
        (
            hf.Qwen3MoeConfig(**ONE_LAYER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
            {"gate.weight", "experts.gate_up_proj", "experts.down_proj"},
        ),
    ],
)
def test_other_layers_are_rounded_or_named(tmp_path: Path, config: Any, kept: set[str]) -> None:
    model, source = random_model(tmp_path, config)
    embedding = model.get_input_embeddings().weight.detach().clone()
    rounded = quantize_model(model, Streamed(), Rounding("int4", "int4"), load_tokenizer(source), None)
    assert {each.split(".mlp.")[1] for each in rounded.kept} == kept
    np.testing.assert_allclose(model.get_input_embeddings().weight, embedding, rtol=2**-11, atol=1e-7)
    tokens = sample_tokens(320)
    want, layout, _ = reference(model, tokens)
    program = trace(model, layout)
    pack(program, model, Streamed())
    program.save(tmp_path / "graph.onnx", external_data=True)
    got = Exported(tmp_path / "graph.onnx", layout, "int4").logits(tokens)
    np.testing.assert_allclose(got, want, atol=1e-4)
    graph = onnx.load(tmp_path / "graph.onnx").graph
    assert sum(tensor.data_type == TensorProto.INT4 for tensor in graph.initializer) > 0
    weights = sum(np.prod(tensor.dims) for tensor in graph.initializer if tensor.data_type == TensorProto.INT4)
    assert weights == rounded.weights


def test_a_tied_head_that_stays_in_fp32_stays_exact(tmp_path: Path) -> None:
    model, source = random_model(tmp_path, hf.LlamaConfig(**COMMON, tie_word_embeddings=True))
    head = model.get_output_embeddings().weight.detach().clone()
    rounded = quantize_model(model, Streamed(), Rounding("int4", "fp32"), load_tokenizer(source), None)
    assert list(rounded.kept) == ["lm_head.weight"]
    assert torch.equal(model.get_output_embeddings().weight, head)
    assert not torch.equal(model.get_input_embeddings().weight, head)


@pytest.mark.slow
@pytest.mark.parametrize("precision", BITS)
def test_tensorrt_builds_it(tmp_path: Path, precision: str) -> None:
    """As no layer is a single block."""
    pytest.importorskip("tensorrt_rtx", reason="would show that quantized models build: pip install 'outrider[rtx]'")
    model = str(write_checkpoint(tmp_path / "model", llama(hidden_size=64, num_hidden_layers=1)))
    export_pair(model, None, tmp_path / "onnx", precision=precision)
    bundle = build(tmp_path / "onnx", tmp_path / "bundle", backend="tensorrt-rtx", capacity=100, k=[2], batch=1)
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    assert manifest.models["target"].precision == precision
