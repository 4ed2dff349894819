"""The text models inside multimodal checkpoints that are quantized, with names and exceptions as in published ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from outrider.bundle.folder import read_manifest
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.tests.export import quantized
from outrider.tests.export.multimodal import RENAMED, join, logits, made, rename, separate
from outrider.tests.support import run_here, write_checkpoint

FILE = "model.safetensors"
VISION = "visual|vision|projector"
OF_MISTRAL = {"ignore": ["re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]}


@dataclass(frozen=True)
class Published:
    """A form in which models are published."""

    model: str
    method: str
    module: str  # a quantized module, by its name in the file
    settings: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # that replace those transformers writes
    kept: str = VISION
    separate: bool = False  # a matrix for each projection of an expert


PUBLISHED = {
    "Qwen2.5-VL, AWQ": Published(
        "Qwen2.5-VL", "awq", "model.layers.0.mlp.down_proj.qweight", {"modules_to_not_convert": ["visual"]}
    ),
    "Qwen2.5-VL, AWQ, newer names": Published(
        "Qwen2.5-VL",
        "awq",
        "model.language_model.layers.0.mlp.down_proj.qweight",
        {"modules_to_not_convert": ["model.visual", "lm_head"]},
        RENAMED["Qwen2.5-VL"],
    ),
    "Qwen2.5-VL, AWQ, images, too": Published("Qwen2.5-VL", "awq", "visual.blocks.0.mlp.down_proj.qweight", kept="lm_head"),
    "Qwen3-VL, compressed-tensors": Published(
        "Qwen3-VL",
        "compressed-tensors",
        "model.language_model.layers.0.mlp.down_proj.weight_packed",
        {"ignore": ["model.visual.blocks.0.attn.qkv", "model.visual.merger.linear_fc1", "lm_head"]},
    ),
    "Qwen3-VL-MoE, FP8 in blocks": Published(
        "Qwen3-VL-MoE",
        "fp8-blocks",
        "model.language_model.layers.0.mlp.experts.gate_up_proj_scale_inv",
        {"modules_to_not_convert": ["lm_head", "model.visual.merger.linear_fc1", "model.language_model.layers.0.mlp.gate"]},
    ),
    "Qwen3-VL-MoE, AWQ": Published(
        "Qwen3-VL-MoE", "awq", "model.language_model.layers.0.mlp.experts.3.up_proj.qweight", separate=True
    ),
    "Qwen3-VL-MoE, compressed-tensors": Published(
        "Qwen3-VL-MoE",
        "compressed-tensors",
        "model.language_model.layers.0.mlp.experts.3.up_proj.weight_packed",
        {"ignore": ["re:.*lm_head", "re:.*visual.*", "re:.*mlp.gate$"]},
        separate=True,
    ),
    "Mistral-3, compressed-tensors": Published(
        "Mistral-3", "compressed-tensors", "language_model.model.layers.0.mlp.down_proj.weight_packed", OF_MISTRAL
    ),
    "Mistral-3, FP8 in blocks, newer names": Published(
        "Mistral-3",
        "fp8-blocks",
        "model.language_model.layers.0.mlp.down_proj.weight_scale_inv",
        {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]},
        RENAMED["Mistral-3"],
    ),
    "Ministral-3, FP8 with scales of inputs": Published(
        "Ministral-3",
        "fp8",
        "language_model.model.layers.0.mlp.down_proj.activation_scale",
        {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]},
    ),
    "LLaVA, GPTQ": Published("LLaVA", "gptq", "language_model.model.layers.0.mlp.down_proj.g_idx"),
}


def write(published: Published, folder: Path) -> Path:
    """A checkpoint in a form."""
    plain = write_checkpoint(folder / "plain", made(published.model))
    if published.separate:
        save_file(separate(load_file(plain / FILE)), plain / FILE, metadata={"format": "pt"})
    model = quantized.write(plain, folder / "model", published.method, published.kept, **published.settings)
    file = model / FILE
    tensors = rename(load_file(file), published.names)
    assert published.module in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("form", PUBLISHED)
def test_the_text_model_is_that_of_the_whole(form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As transformers computes it of the same weights in fp32."""
    folder = write(PUBLISHED[form], tmp_path)
    plain = quantized.dequantized(folder, tmp_path / "dequantized")
    if PUBLISHED[form].separate:
        save_file(join(load_file(plain / FILE)), plain / FILE, metadata={"format": "pt"})
    whole = AutoModelForImageTextToText.from_pretrained(plain).eval()
    capfd.readouterr()
    loaded = load_model(Source.parse(str(folder)), "int4")
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
    torch.testing.assert_close(logits(loaded), logits(whole), rtol=1e-5, atol=1e-6)
    assert (logits(whole) - logits(made(PUBLISHED[form].model))).abs().max() > 1e-3  # the weights were rounded


def test_the_settings_may_be_those_of_the_text_model(tmp_path: Path) -> None:
    """Or have the first name that compressed-tensors gave them."""
    folder = write(PUBLISHED["Mistral-3, compressed-tensors"], tmp_path)
    want = logits(load_model(Source.parse(str(folder)), "int4"))
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    for moved in ({"compression_config": settings}, {"text_config": config["text_config"] | {"quantization_config": settings}}):
        (folder / "config.json").write_text(json.dumps(config | moved))
        assert torch.equal(logits(load_model(Source.parse(str(folder)), "int4")), want)


@pytest.mark.parametrize(
    "form", ["Qwen2.5-VL, AWQ", pytest.param("Qwen3-VL-MoE, AWQ", marks=pytest.mark.slow), "Mistral-3, compressed-tensors"]
)
def test_its_integers_are_kept(form: str, tmp_path: Path) -> None:
    folder = write(PUBLISHED[form], tmp_path)
    done = run_here("export", "--target", folder, "--draft", "none", "-o", tmp_path / "export")
    assert done.returncode == 0, done.stderr
    assert f"keeping the integers of {folder.name}, which is the default (--precision as-is)" in done.stderr
    assert "loading the target: text only, images are refused" in done.stderr
    target = read_manifest(tmp_path / "export").models["target"]
    assert target.quantization is not None
    assert (target.quantization.method, target.quantization.rounded) == ("as-is", ["lm_head"])
    assert target.parity.max_abs_diff <= target.parity.tolerance
    assert target.parity.unrounded_perplexity == pytest.approx(target.parity.reference_perplexity, rel=1e-3)
