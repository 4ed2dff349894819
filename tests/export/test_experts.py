"""Experts of a mixture with rounded weights compute what transformers' own do with them, in every graph."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from transformers import PreTrainedModel

from outrider.backends.open import open_bundle, open_engines
from outrider.backends.tensorrt.process import build_plan
from outrider.engines.graph_session import GraphSession
from outrider.errors import OutriderWarning
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.graph.experts import BlockExperts
from outrider.export.graph.step_model import trace
from outrider.export.pair import export_pair
from outrider.export.parity import reference
from outrider.export.weights.quantize import pack, quantize_model
from outrider.export.weights.rounding import Rounding
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.export.recurrent_models import COMMON, DELTA
from outrider.tests.support import build, rtx_job, write_checkpoint

ONE_LAYER = {**COMMON, "num_hidden_layers": 1}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 16}
CONFIGS: dict[str, Any] = {
    "Qwen3-MoE": hf.Qwen3MoeConfig(**ONE_LAYER, **MIXTURE),
    "Qwen3.5-MoE": hf.Qwen3_5MoeTextConfig(**COMMON, **MIXTURE, **DELTA, shared_expert_intermediate_size=32),
    "GPT-OSS": hf.GptOssConfig(  # alternating, transposed, with biases, and a gate of its own
        **{**ONE_LAYER, "intermediate_size": 128},
        num_local_experts=6,
        num_experts_per_tok=2,
        head_dim=16,
        layer_types=["sliding_attention"],
        sliding_window=16,
    ),
}
BITS = {"int4": 4, "int8": 8}


def checkpoint(name: str, folder: Path) -> Path:
    """A random model whose biases are not zero."""
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(CONFIGS[name])
    for called, parameter in made.named_parameters():
        if called.endswith("bias"):
            nn.init.normal_(parameter)
    return write_checkpoint(folder / "model", made)


def experts_of(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]


def dequantized(experts: BlockExperts, of: nn.Module) -> None:
    """Give a module of transformers the weights that these experts have, by the definition of their bytes."""
    for name, (packed, scale, _) in zip(("gate_up_proj", "down_proj"), experts.stacks, strict=True):
        numbers = packed.to(torch.int64)
        if experts.bits == 4:
            numbers = torch.stack((numbers % 16, numbers // 16), -1).flatten(2)
        blocks = (numbers - 2 ** (experts.bits - 1)).unflatten(2, (scale.shape[2], -1))
        weights = (blocks * scale[..., None]).flatten(2)
        if name == "gate_up_proj" and of.is_concatenated:
            weights = torch.cat((weights[:, ::2], weights[:, 1::2]), 1)
        weights = weights.transpose(1, 2) if of.is_transposed else weights
        before = getattr(of, name)
        assert (weights - before).abs().max() < 0.2 * before.abs().max()
        before.data = weights.contiguous()


@pytest.mark.parametrize("precision", BITS)
@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_those_of_transformers_with_rounded_weights(name: str, precision: str, tmp_path: Path) -> None:
    source = Source.parse(str(checkpoint(name, tmp_path)))
    model, theirs = load_model(source, precision), load_model(source, precision)
    quantize_model(model, Streamed(), Rounding(precision), load_tokenizer(source), None)
    pairs = [(ours, of) for (_, ours), (_, of) in zip(experts_of(model), experts_of(theirs), strict=True)]
    assert len(pairs) == CONFIGS[name].num_hidden_layers
    for ours, of in pairs:
        assert isinstance(ours, BlockExperts)
        dequantized(ours, of)
        rows, chosen, weights = torch.randn(7, 64), torch.randint(0, 6, (7, 2)), torch.rand(7, 2)
        torch.testing.assert_close(ours(rows, chosen, weights), of(rows, chosen, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"moe_intermediate_size": 32}], ids=str)
def test_another_gate_and_inputs_of_one_block_stay_in_fp32(change: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(hf.Qwen3MoeConfig(**ONE_LAYER, **{**MIXTURE, **change}))
    source = Source.parse(str(write_checkpoint(tmp_path / "model", made)))
    rounded = quantize_model(load_model(source, "int4"), Streamed(), Rounding("int4"), load_tokenizer(source), None)
    assert sum(each.endswith(("experts.gate_up_proj", "experts.down_proj")) for each in rounded.kept) == 2


@pytest.fixture(scope="module")
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a random model of this family and precision, with n-grams to draft."""
    name, precision = request.param
    folder = tmp_path_factory.mktemp("mixture")
    manifest = export_pair(str(checkpoint(name, folder)), None, folder / "onnx", precision=precision)
    kept = manifest.models["target"].quantization.kept  # type: ignore[union-attr]
    assert not any("experts" in each.replace("shared_expert", "") for each in kept)
    sinks = pytest.warns(OutriderWarning, match="written out") if name == "GPT-OSS" else nullcontext()
    with sinks:
        return build(folder / "onnx", folder / "bundle", k=[1, 4], capacity=96, max_prompt_chunk=16, batch=2)


def mixtures(*fast: tuple[str, str]) -> pytest.MarkDecorator:
    """Every family in every precision; in `make test` these."""
    product = [(name, precision) for name in CONFIGS for precision in BITS]
    cases = [pytest.param(each, marks=() if each in fast else pytest.mark.slow, id="-".join(each)) for each in product]
    return pytest.mark.parametrize("mixture", cases, indirect=True)


@mixtures(("Qwen3-MoE", "int4"))
def test_drafted_texts_are_plain_ones_and_one_kernel_computes_them(mixture: Path) -> None:
    """What is fused was compared with the exported graph at the build."""
    manifest, made = open_bundle(mixture)
    target = manifest.models["target"]
    assert made.rewrites["target"]["experts"] == len(target.layers) + len(target.recurrent)
    texts = []
    with Outrider.load(mixture) as outrider:
        ways: list[dict[str, Any]] = [{"k": 0}, {"k": 1}, {"k": 4}, {"k": "auto"}]
        for way in ways:
            events = outrider.generate([5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(max_new_tokens=64), **way)
            texts.append([token for event in events for token in event.token_ids])
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize(
    "mixture", [("Qwen3-MoE", "int4"), pytest.param(("Qwen3-MoE", "int8"), marks=pytest.mark.slow)], indirect=True
)
def test_a_row_has_the_same_bits_alone_and_among_others(mixture: Path) -> None:
    session = open_engines(mixture, *open_bundle(mixture)).session("target", 2)
    assert isinstance(session, GraphSession)
    text = np.random.default_rng(0).integers(0, 320, (1, 32))
    session.write(text[:, :16], np.array([0]), 1)
    want = session.run(text[:, 16:], np.array([16]), 1)[0].copy()
    for count in (1, 2, 3, 5):
        np.testing.assert_array_equal(session.run(text[:, 16 : 16 + count], np.array([16]), 1)[0], want[:count])


@pytest.mark.slow
@pytest.mark.parametrize("precision", BITS)
def test_tensorrt_rtx_builds_them(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="would show that mixtures build: pip install 'outrider[rtx]'")
    source = Source.parse(str(checkpoint("Qwen3-MoE", tmp_path)))
    model = load_model(source, precision)
    quantize_model(model, Streamed(), Rounding(precision), load_tokenizer(source), None)
    _, layout, _ = reference(model, torch.randint(1, 320, (1, 20)))
    program = trace(model, layout)
    pack(program, model, Streamed())
    program.save(tmp_path / "graph.onnx", external_data=True)
    build_plan(rtx_job(tmp_path / "graph.onnx", layout.tensors()), "target")
