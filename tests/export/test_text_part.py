"""The text models inside multimodal checkpoints compute what the whole models compute for texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from outrider.bundle.folder import read_manifest
from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.tests.export.architectures import COMMON
from outrider.tests.support import run_here, write_checkpoint

TOKENS = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
TEXT: dict[str, Any] = {**COMMON, "num_hidden_layers": 1, "head_dim": 16, "tie_word_embeddings": False, "eos_token_id": 0}
QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": TEXT["hidden_size"]}
DEEP = {"deepstack_visual_indexes": [0]}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PIXELS: dict[str, Any] = {**SMALL, "image_size": 28, "patch_size": 14}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Queries are scaled from position 16 on.
SCALED = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL = {"model_type": "ministral3", "rope_parameters": SCALED | {"llama_4_scaling_beta": 0.1}}

CONFIGS: dict[str, Callable[[], Any]] = {
    "Ministral-3": lambda: hf.Mistral3Config(
        text_config={**TEXT, **MINISTRAL}, vision_config={**PIXELS, "model_type": "pixtral"}
    ),
    "Qwen3-VL": lambda: hf.Qwen3VLConfig(text_config={**TEXT, **SECTIONS}, vision_config={**QWEN, **DEEP}),
    "Qwen3-VL-MoE": lambda: hf.Qwen3VLMoeConfig(text_config={**TEXT, **SECTIONS, **EXPERTS}, vision_config={**QWEN, **DEEP}),
    "Qwen2.5-VL": lambda: hf.Qwen2_5_VLConfig(
        text_config={**TEXT, **SECTIONS}, vision_config={**QWEN, "fullatt_block_indexes": [0]}
    ),
    "Qwen2-VL": lambda: hf.Qwen2VLConfig(
        text_config={**TEXT, **SECTIONS}, vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    ),
    "Mistral-3": lambda: hf.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"}, vision_config={**PIXELS, "model_type": "pixtral"}
    ),
    "LLaVA": lambda: hf.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**PIXELS, "model_type": "clip_vision_model", "projection_dim": 32},
    ),
    "LLaVA-OneVision": lambda: hf.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2"}, vision_config={**PIXELS, "model_type": "siglip_vision_model"}
    ),
    "InternVL": lambda: hf.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"}, vision_config={**SMALL, "image_size": [28, 28], "patch_size": [14, 14]}
    ),
    "SmolVLM": lambda: hf.SmolVLMConfig(text_config={**TEXT, "model_type": "llama"}, vision_config=PIXELS),
    "Idefics-3": lambda: hf.Idefics3Config(text_config={**TEXT, "model_type": "llama"}, vision_config=PIXELS),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    for parameter in model.get_decoder().parameters():  # so that positions matter
        parameter.data *= 4 if parameter.dim() > 1 else 1
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_model_is_that_of_the_whole(name: str, tmp_path: Path) -> None:
    whole = made(name)
    loaded = load_model(Source.parse(str(write_checkpoint(tmp_path / "model", whole))), "fp32")
    kept = ("model.language_model.", "model.text_model.", "lm_head.")
    assert all(each.startswith(kept) for each, _ in loaded.named_parameters())
    torch.testing.assert_close(logits(loaded), logits(whole), rtol=1e-5, atol=1e-6)
    assert logits(whole).std() > 0.1


# The names of weights that transformers writes, and those in files of other releases.
RENAMED = {
    "LLaVA": {"language_model.lm_head.": "lm_head.", "language_model.model.": "model.language_model."},
    "Mistral-3": {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."},
    "Qwen2.5-VL": {"model.": "model.language_model.", "visual.": "model.visual."},
}


@pytest.mark.parametrize("name", RENAMED)
def test_other_names_of_weights_are_read(name: str, tmp_path: Path) -> None:
    whole = made(name)
    folder = write_checkpoint(tmp_path / "model", whole)
    file, tensors = folder / "model.safetensors", {}
    for key, tensor in load_file(file).items():
        old = next((each for each in RENAMED[name] if key.startswith(each)), "")
        tensors[RENAMED[name].get(old, "") + key.removeprefix(old)] = tensor
    assert tensors.keys() != load_file(file).keys()
    save_file(tensors, file, metadata={"format": "pt"})
    torch.testing.assert_close(logits(load_model(Source.parse(str(folder)), "fp32")), logits(whole), rtol=1e-5, atol=1e-6)


def test_one_that_reads_prompts_in_both_directions_is_refused(tmp_path: Path) -> None:
    config = hf.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"}, vision_config={**PIXELS, "model_type": "siglip_vision_model"}
    )
    folder = write_checkpoint(tmp_path / "model", hf.PaliGemmaForConditionalGeneration(config))
    with pytest.raises(UnsupportedModelError, match="PaliGemmaForConditionalGeneration reads prompts in both directions"):
        load_model(Source.parse(str(folder)), "fp32")


@pytest.mark.parametrize(
    "name", [name if name == "Ministral-3" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_it_is_exported_and_says_so(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", made(name))
    done = run_here("export", "--target", folder, "--draft", "none", "-o", tmp_path / "export")
    assert done.returncode == 0, done.stderr
    assert "loading the target: text only, images are refused" in done.stderr
    target = read_manifest(tmp_path / "export").models["target"]
    assert target.parity.max_abs_diff <= target.parity.tolerance
    assert target.parity.argmax_agreement == 1
