"""Tiny random checkpoints with MTP heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.mimo import MiMoConfig
from outrider.export.checkpoints.source import Source
from outrider.export.heads.draft_head import Target
from outrider.export.heads.mtp import MtpCheckpoint, MtpHead
from outrider.tests.export.recurrent_models import COMMON, CONFIGS, EXPERTS
from outrider.tests.support import write_checkpoint

WIDTH, LAYERS = COMMON["hidden_size"], COMMON["num_hidden_layers"]
ROUTED = {**COMMON, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
OF_DEEPSEEK: dict[str, Any] = {
    "GLM-4.5": hf.Glm4MoeConfig(**ROUTED, head_dim=16, first_k_dense_replace=1),
    "DeepSeek-V3": hf.DeepseekV3Config(**{**ROUTED, "num_key_value_heads": 4}, **LATENT, first_k_dense_replace=1),
}
OF_MIMO = MiMoConfig(**{**COMMON, "num_key_value_heads": 2, "num_hidden_layers": 1})
OF_QWEN = {name: CONFIGS[name] for name in ("Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next")}
assert EXPERTS["num_experts"] == ROUTED["n_routed_experts"]


def write_with_head(folder: Path, config: Any, of_qwen: bool) -> Path:
    """Write a tiny random checkpoint whose head is its last layer, changed a little."""
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(config)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    write_checkpoint(folder, made)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    layer = {name.removeprefix(last): each + 0.05 * torch.randn_like(each) for name, each in tensors.items() if last in name}
    wide, norms = 0.1 * torch.randn(WIDTH, 2 * WIDTH), [0.3 * torch.randn(WIDTH) for _ in range(3)]
    if of_qwen:
        tensors |= {f"mtp.layers.0.{name}": each for name, each in layer.items()}
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        tensors |= {f"mtp.{name}.weight": each for name, each in zip(names, norms, strict=True)} | {"mtp.fc.weight": wide}
    else:
        own = f"model.layers.{LAYERS}."
        tensors |= {own + name: each for name, each in layer.items()}
        names = ("enorm", "hnorm", "shared_head.norm")
        tensors |= {f"{own}{name}.weight": 1 + each for name, each in zip(names, norms, strict=True)}
        tensors |= {own + "eh_proj.weight": wide, own + "shared_head.head.weight": tensors["lm_head.weight"].clone()}
        tensors[own + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def build(folder: Path) -> tuple[hf.PreTrainedModel, MtpHead]:
    """The model and the head of a checkpoint."""
    source = Source.parse(str(folder))
    model = load_model(source, "fp32")
    return model, MtpCheckpoint.read(source).build(Target.of(model))[1]
