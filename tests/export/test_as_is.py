"""With `--precision as-is`, the integers of quantized checkpoints reach the kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from outrider.errors import UsageError
from outrider.export.arguments import ExportArguments
from outrider.export.checkpoints.adapters import Adapter
from outrider.export.checkpoints.checkpoint import load_model, open_model
from outrider.export.checkpoints.gguf_blocks import BLOCKS
from outrider.export.checkpoints.integers import CONTENTS
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.graph.experts import BlockExperts
from outrider.export.pair import export_pair
from outrider.export.parity import reference, sample_tokens
from outrider.export.weights.block_linear import BlockLinear
from outrider.export.weights.quantize import quantize_model
from outrider.export.weights.rounding import AS_IS, Rounding
from outrider.export.weights.stored import Form, StoredWeight
from outrider.progress import Progress
from outrider.tests.export import quantized
from outrider.tests.export.architectures import COMMON
from outrider.tests.export.gguf_files import write as write_gguf
from outrider.tests.export.packed.cases import CASES, case, packed_weight
from outrider.tests.export.quantized import HALVES
from outrider.tests.support import PAIR, run_here, write_checkpoint


def kept(tensor: Any, weight: torch.Tensor) -> Form | None:
    """The form of a checkpoint's tensor that has this weight, with blocks as large as possible."""
    stored = StoredWeight()
    for content in CONTENTS:
        if content in tensor.contents:
            stored.add(content, tensor.content(content))
    return stored.form(weight, 128)


def weight_of(form: Form | None) -> torch.Tensor:
    """What `DequantizeLinear` and the operators beside it make of a form, float32 [N, K], with numpy."""
    assert form is not None
    block = len(form.quantized) // len(form.scale)
    weight = form.quantized.numpy().astype(np.float32)
    if form.zero is not None:
        weight -= np.repeat(form.zero.numpy(), block, 0)
    weight *= np.repeat(form.scale.numpy(), block, 0)
    if form.offset is not None:
        weight += np.repeat(form.offset.numpy(), block, 0)
    if form.factors is not None:
        weight *= form.factors.numpy()[:, None]
    placed = np.empty_like(weight)
    placed[slice(None) if form.order is None else form.order.numpy()] = weight
    return torch.from_numpy(placed.T.copy())


def kind_of(form: Form | None) -> str:
    """Bits and inputs per scale of a form, and what it has besides."""
    assert form is not None
    more = [name for name in ("zero", "offset", "order", "factors") if getattr(form, name) is not None]
    return " ".join((f"{form.bits}/{len(form.quantized) // len(form.scale)}", *more))


FORMS = {
    "auto-round": "4/32",  # 3 bits
    "auto-round-awq": "4/32 zero",
    "auto-round-gptq": "4/32 zero",
    "awq": "4/128 zero",
    "ct-3-bits": "4/64",
    "ct-8-bits": "8/128",
    "ct-asymmetric": "4/32 zero",
    "ct-group": "4/128",
    "ct-int8": "8/128",
    "gptq": "4/32 zero",
    "gptq-2-bits": "4/32 order",  # -3 to 3, with any zero point
    "gptq-3-bits": "4/32",
    "gptq-8-bits": "8/32",
    "gptq-act-order": "4/32 zero order",
    "gptq-symmetric": "4/32",
    "gptq-v2": "4/32 zero",
    "modelopt-awq": "4/128",
    "modelopt-awq-smooth": "4/128 factors",
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_get_the_library_s_weights(name: str) -> None:
    settings, tensors, weight = case(name)
    packed = packed_weight(settings, tensors)
    if name not in FORMS:
        assert not packed.contents
        assert "fp" in name
        return
    form = kept(packed, weight)
    assert kind_of(form) == FORMS[name]
    assert form is not None
    assert torch.equal(weight_of(form), weight)
    rows = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(BlockLinear(form, None, exact=True)(rows), rows @ weight.T, rtol=1e-4, atol=1e-4)
    assert kept(packed, weight.nextafter(torch.zeros(()))) is None


GGUF_FORMS = {
    "Q4_0": "4/32",
    "Q4_1": "4/32 zero offset",
    "Q5_0": "8/32",
    "Q5_1": "8/32 offset",
    "Q8_0": "8/32",
    "Q4_K": "4/32 zero offset",
    "Q5_K": "8/32 offset",
    "Q6_K": "8/16",
}


class Blocks:
    """The blocks of a GGUF tensor, [N, K]."""

    def __init__(self, kind: gguf.GGMLQuantizationType):
        size, bytes_ = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(0)
        blocks = random.integers(0, 256, (8 * 512 // size, bytes_), dtype=np.uint8)
        for at in HALVES.get(kind.name, [0, 2]):
            halves = random.standard_normal(len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
        self.weight = torch.from_numpy(gguf.dequantize(blocks, kind)).reshape(8, 512)
        self._groups = BLOCKS[kind](torch.from_numpy(blocks))
        self.contents = {"integers", "scales"} | (set() if self._groups.offsets is None else {"offsets"})

    def content(self, name: str) -> torch.Tensor:
        numbers = torch.empty(8, 512)
        self._groups.write(name, numbers.view(-1))
        return numbers


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_the_kernels_get_the_numbers_of_a_gguf_file(kind: gguf.GGMLQuantizationType) -> None:
    blocks = Blocks(kind)
    form = kept(blocks, blocks.weight)
    assert kind_of(form) == GGUF_FORMS[kind.name]
    assert torch.equal(weight_of(form), blocks.weight)


class Grouped:
    """Weights [8, 64] with one scale for some inputs, of integers in a range."""

    contents = ("groups", "integers", "zeros", "scales")

    def __init__(self, inputs: int, low: int, high: int, zero: int, mixed: bool = False):
        groups = torch.arange(64) // inputs
        scales = torch.rand(8, 64 // inputs, generator=torch.Generator().manual_seed(0))[:, groups]
        integers = torch.arange(512).reshape(8, 64) % (high - low + 1) + low
        self._numbers = {"groups": groups.expand(8, 64).clone(), "integers": integers, "scales": scales}
        self._numbers["zeros"] = torch.full((8, 64), zero)
        if mixed:
            self._numbers["groups"][3] = self._numbers["groups"][3].flip(0)

    def content(self, name: str) -> torch.Tensor:
        return self._numbers[name].float()


@pytest.mark.parametrize(
    ("weights", "want"),
    [
        (Grouped(32, 0, 15, 7), "4/32 zero"),
        (Grouped(16, 0, 15, 8), "4/16"),
        (Grouped(32, 0, 255, 100), "8/32 zero"),
        (Grouped(32, -100, 100, -50), "8/32 zero"),
        (Grouped(32, 0, 100, 50), "8/32"),
        (Grouped(8, 0, 15, 8), None),  # kernels have no such groups
        (Grouped(32, 0, 255, -100), None),  # differences of nine bits
        (Grouped(32, 0, 15, 8, mixed=True), None),  # outputs with groups of their own
    ],
)
def test_the_smallest_form_that_loses_nothing(weights: Grouped, want: str | None) -> None:
    integers, zeros, scales = map(weights.content, ("integers", "zeros", "scales"))
    numbers = (integers - zeros) * scales
    form = kept(weights, numbers)
    assert (None if form is None else kind_of(form)) == want
    assert form is None or torch.equal(weight_of(form), numbers)


@pytest.mark.parametrize(("method", "bits"), [("compressed-tensors", 4), ("awq", 8)])
def test_experts_are_kept(method: str, bits: int, tmp_path: Path) -> None:
    """Their matrices are joined when they are loaded. The first layer has none. With zero points, they are in 8 bits."""
    config = Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16, mlp_only_layers=[0]
    )
    torch.manual_seed(0)
    made = write_checkpoint(tmp_path / "made", AutoModelForCausalLM.from_config(config))
    source = Source.parse(str(quantized.write(made, tmp_path / "model", method)))
    tokens = sample_tokens(320)
    loaded = load_model(source, "int4")
    loaded.model.embed_tokens.weight.data = loaded.model.embed_tokens.weight.half().float()  # as everywhere
    want = reference(loaded, tokens).logits
    model, weights = open_model(source, "int4", tmp_path)
    rounding = Rounding("int4", head_precision="fp32", method=AS_IS)
    found = quantize_model(model, weights, rounding, load_tokenizer(source), None)
    assert found.rounded == []
    assert [each.bits for each in model.modules() if isinstance(each, BlockExperts)] == [bits]
    np.testing.assert_allclose(reference(model, tokens).logits, want, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        (None, None),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "gptq", "bits": "4"}, None),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\.v_proj": {"bits": 8}, r"-:.*\.mlp": {}}}, 8),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 16}, "a": 5}}, 4),
        ({"quant_method": "fp8", "bits": 8}, None),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
        ({"quant_method": "compressed-tensors"}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}, "b": 3}}, None),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}, "b": {"weights": quantized.FLOAT8}},
            },
            8,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {each: {"weights": {"num_bits": bits, "type": "int"}} for each, bits in (("a", 4), ("b", 8))},
            },
            8,
        ),
    ],
)
def test_the_configuration_tells_the_bits(settings: object, bits: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    assert Source.parse(str(tmp_path)).stored_bits() == bits


@pytest.mark.parametrize(
    ("stored", "precision", "said"),
    [
        ("gptq", "fp32", "dequantizing; --precision as-is would keep its integers of 8 bits"),
        ("act-order", "fp32", "dequantizing; --precision as-is would keep its integers of 4 bits, up to a fifth slower"),
        ("actorder", "fp32", "dequantizing; --precision as-is would keep its integers of 4 bits, up to a fifth slower"),
        ("awq", "as-is", "keeping the integers of model, which is the default"),
        ("Q4_0", "as-is", "keeping the integers of model.gguf, which is the default"),
        ("Q4_1", "fp32", "dequantizing; --precision as-is would keep the file's Q4_1 weights, in 1.0 times the memory of int4"),
        ("F32", "fp32", ""),
        ("nothing", "fp32", ""),
    ],
)
def test_integers_are_kept_by_default_where_they_are_as_fast_as_int4(
    stored: str, precision: str, said: str, tmp_path: Path
) -> None:
    said_by = list[str]()

    class Recorded(Progress):
        def stage(self, name: str, total: int | None = None) -> None:
            said_by.append(name)

    if stored in gguf.GGMLQuantizationType.__members__:
        path = tmp_path / "model.gguf"
        write_gguf(path, kind=gguf.GGMLQuantizationType[stored])
    else:
        path = tmp_path / "model"
        path.mkdir()
        scheme = {"num_bits": 4, "type": "int", "actorder": "group"}
        settings = {
            "awq": {"quant_method": "awq", "bits": 4},
            "gptq": {"quant_method": "gptq", "bits": 8},
            "act-order": {"quant_method": "gptq", "bits": 4, "desc_act": True},
            "actorder": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": scheme}}},
        }
        (path / "config.json").write_text(json.dumps({"quantization_config": settings.get(stored)}))
    asked = ExportArguments.check(str(path), [], tmp_path / "export")
    found = asked.with_default(Recorded())
    kept = found.rounding is not None and found.rounding.method == AS_IS
    assert (AS_IS if kept else found.precision) == precision
    assert "; ".join(said_by).startswith(said)
    assert bool(said_by) == bool(said)
    adapter = Adapter(Source.parse(str(path)), 1.0, {})  # it changes what is stored
    assert replace(asked, adapters=(adapter,)).with_default(Recorded()).precision == "fp32"
    explicit = ExportArguments.check(str(path), [], tmp_path / "export", precision="int8")
    assert explicit.with_default(Recorded()) == explicit


def test_a_checkpoint_without_integers_is_wrong_use(tmp_path: Path) -> None:
    options = ("--draft", "none", "--precision", "as-is")
    done = run_here("export", "--target", PAIR / "target", *options, "-o", tmp_path / "export")
    assert done.returncode == 2
    assert "target stores no integers that as-is could keep" in done.stderr
    with pytest.raises(UsageError, match="--method cannot be used with --precision as-is"):
        export_pair(str(PAIR / "target"), None, tmp_path / "export", precision="as-is", method="rtn")
    assert not (tmp_path / "export").exists()
