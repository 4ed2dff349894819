"""Tiny random multimodal models, and what they compute for a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from outrider.tests.export.architectures import COMMON

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
    """A model of `CONFIGS`, of its family's own class."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config).eval()
    for parameter in model.get_decoder().parameters():  # so that positions matter
        parameter.data *= 4 if parameter.dim() > 1 else 1
    return model


def logits(model: Any) -> torch.Tensor:
    """The logits of `TOKENS`."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


# The names of weights that transformers writes, and those in files of other releases.
RENAMED = {
    "LLaVA": {"language_model.lm_head.": "lm_head.", "language_model.model.": "model.language_model."},
    "Mistral-3": {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."},
    "Qwen2.5-VL": {"model.": "model.language_model.", "visual.": "model.visual."},
}


def separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of Qwen3-VL-MoE, with a matrix for each projection of an expert instead of one for all."""
    made = {}
    for name, tensor in tensors.items():
        experts, _, joined = name.rpartition(".")
        for at, each in enumerate(tensor if experts.endswith("experts") else ()):
            for part, matrix in zip(joined.split("_")[:-1], each.chunk(joined.count("_")), strict=True):
                made[f"{experts}.{at}.{part}_proj.weight"] = matrix.contiguous()
        made |= {} if experts.endswith("experts") else {name: tensor}
    return made


def join(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `separate` takes apart."""
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for experts in {name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        count = len({name.removeprefix(experts).split(".")[1] for name in tensors if name.startswith(f"{experts}.")})
        for parts in (("gate", "up"), ("down",)):
            each = [torch.cat([tensors[f"{experts}.{at}.{part}_proj.weight"] for part in parts]) for at in range(count)]
            made[f"{experts}.{'_'.join(parts)}_proj"] = torch.stack(each)
    return made


def rename(tensors: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of a file, with other beginnings of their names."""
    made = {}
    for name, tensor in tensors.items():
        old = next((each for each in names if name.startswith(each)), "")
        made[names.get(old, "") + name.removeprefix(old)] = tensor
    return made
