"""Heads in quantized checkpoints have the weights that the libraries of the formats read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.export.heads.draft_head import Target
from outrider.export.heads.mtp import MtpCheckpoint
from outrider.tests.export import quantized
from outrider.tests.export.mtp_heads import LAYERS, OF_DEEPSEEK, build, write_with_head
from outrider.tests.export.packed.cases import UNUSED, case
from outrider.tests.export.recurrent_models import COMMON


def describe(folder: Path, settings: dict[str, Any]) -> None:
    """Say in a checkpoint's configuration how it is quantized."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def test_weights_in_fp8_are_dequantized(tmp_path: Path) -> None:
    """DeepSeek-V3 is published like this. The last blocks of rows and columns are smaller than the others."""
    folder = write_with_head(tmp_path / "model", OF_DEEPSEEK["DeepSeek-V3"], of_qwen=False)
    path, block = folder / "model.safetensors", (24, 40)
    tensors = load_file(path)
    name = f"model.layers.{LAYERS}.self_attn.o_proj.weight"
    rows, columns = tensors[name].shape
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    small = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors | {name: small, f"{name}_scale_inv": scales}, path, metadata={"format": "pt"})
    describe(folder, {"quant_method": "fp8", "weight_block_size": list(block)})
    got = MtpCheckpoint.read(Source.parse(str(folder))).tensors["model.layers.0.self_attn.o_proj.weight"]
    for row, column in ((0, 0), (rows - 1, columns - 1), (24, 39), (23, 40)):
        assert got[row, column] == small[row, column].float() * scales[row // block[0], column // block[1]]


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with the names of Qwen's and a layer in which the cases of `packed` fit, and its tensors."""
    folder = write_with_head(tmp_path / "model", hf.LlamaConfig(**{**COMMON, "intermediate_size": 256}), of_qwen=True)
    return folder, load_file(folder / "model.safetensors")


def replace(plain: tuple[Path, dict[str, torch.Tensor]], module: str, parts: dict[str, torch.Tensor]) -> Source:
    """Write other tensors in the place of a module's weight."""
    own = {name: each for name, each in plain[1].items() if name != f"{module}.weight"}
    own |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
    save_file(own, plain[0] / "model.safetensors", metadata={"format": "pt"})
    return Source.parse(str(plain[0]))


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "ct-asymmetric", "ct-fp8-channel", "ct-fp8-block", "ct-fp8-tensor"])
def test_a_quantized_module_has_the_weight_that_its_library_reads(
    name: str, plain: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    """The layer's other modules are not quantized, and neither is the target."""
    whole, (settings, parts, want) = MtpCheckpoint.read(Source.parse(str(plain[0]))).tensors, case(name)
    describe(plain[0], settings)
    source = replace(plain, "mtp.layers.0.mlp.down_proj", parts)
    got, own = MtpCheckpoint.read(source).tensors, "model.layers.0.mlp.down_proj.weight"
    assert got.keys() == whole.keys()
    assert all(torch.equal(each, want if name == own else whole[name]) for name, each in got.items())
    assert torch.equal(build(plain[0])[1].get_parameter(own), want)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "modelopt"])
def test_a_head_may_be_quantized_as_a_whole(method: str, plain: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """With the first of its tensors, too, whose name tells which layout the head has."""
    whole = build(plain[0])[1]
    replace(plain, "mtp.fc", quantized.METHODS[method][0](plain[1]["mtp.fc.weight"]))
    got = build(quantized.write(plain[0], tmp_path / "quantized", method))[1]
    for (name, each), want in zip(got.named_parameters(), whole.parameters(), strict=True):
        assert (each - want).norm() < 0.2 * want.norm(), name
        assert torch.equal(each, want) != name.endswith("_proj.weight")


def test_what_a_quantized_head_lacks_is_named(plain: tuple[Path, dict[str, torch.Tensor]]) -> None:
    target, module = Target.of(load_model(Source.parse(str(plain[0])), "fp32")), "mtp.layers.0.mlp.down_proj"
    settings, parts, _ = case("ct-fp8-block")
    in_blocks = {"quant_method": "fp8", "weight_block_size": [48, 128]}
    for quantization, scale in ((settings, "weight_scale"), (in_blocks, "weight_scale_inv")):
        describe(plain[0], quantization)
        with pytest.raises(SourceError, match=rf"{module}\.weight is quantized, but has no scale"):
            MtpCheckpoint.read(replace(plain, module, {"weight": parts["weight"]}))
        with pytest.raises(SourceError, match=rf"{module}.* do not fit each other"):
            MtpCheckpoint.read(replace(plain, module, {"weight": parts["weight"], scale: parts["weight_scale"][:, :1]}))
    with pytest.raises(SourceError, match=r"lacks the tensor of model\.layers\.0\.mlp\.down_proj\.weight"):
        MtpCheckpoint.read(replace(plain, module, {scale: parts["weight_scale"]})).build(target)
    describe(plain[0], {"quant_method": "another"})
    with pytest.raises(UnsupportedModelError, match="model is quantized by another, which is not read"):
        MtpCheckpoint.read(replace(plain, module, parts))


@pytest.mark.parametrize("name", ["gptq", "ct-fp8-tensor"])
def test_what_servers_round_by_is_left_out(name: str, plain: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """And the bias that AutoGPTQ adds to every module, if it is 0."""
    module = "mtp.layers.0.mlp.down_proj"
    settings, parts, want = case(name)
    describe(plain[0], settings)
    bias = torch.zeros(len(want))
    unused = {f"mtp.layers.0.{each}": torch.rand(1) for each in UNUSED}
    source = replace((plain[0], plain[1] | unused), module, parts | {"bias": bias})
    assert torch.equal(build(plain[0])[1].get_parameter("model.layers.0.mlp.down_proj.weight"), want)
    target = Target.of(load_model(source, "fp32"))
    bias[0] = 1
    with pytest.raises(UnsupportedModelError, match=r"the tensor of model\.layers\.0\.mlp\.down_proj\.bias"):
        MtpCheckpoint.read(replace(plain, module, parts | {"bias": bias})).build(target)
