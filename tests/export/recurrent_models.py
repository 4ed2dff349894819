"""Tiny random models with recurrent layers."""

from __future__ import annotations

from typing import Any

import transformers as hf

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 32, "head_dim": 16}
ONE_OF_EACH = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
CONVOLUTIONS = ["conv", "full_attention", "conv"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
NEMOTRON: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "attention", "mamba", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
CONFIGS: dict[str, Any] = {
    "Qwen3.5": hf.Qwen3_5TextConfig(**COMMON, **DELTA, head_dim=16),
    "Qwen3.5-MoE": hf.Qwen3_5MoeTextConfig(**{**COMMON, **DELTA, **SHARED, **ONE_OF_EACH}),
    "Qwen3-Next": hf.Qwen3NextConfig(**COMMON, **DELTA, **SHARED),
    "OLMo-Hybrid": hf.OlmoHybridConfig(**COMMON, **DELTA),
    "LFM2": hf.Lfm2Config(**COMMON, layer_types=CONVOLUTIONS),
    "LFM2-MoE": hf.Lfm2MoeConfig(**COMMON, **EXPERTS, layer_types=CONVOLUTIONS, num_dense_layers=1),
    "Bamba": hf.BambaConfig(**COMMON, **MAMBA, attn_layer_indices=[1]),
    "Granite-4": hf.GraniteMoeHybridConfig(
        **COMMON,
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "Falcon-H1": hf.FalconH1Config(**{**COMMON, **MAMBA, "num_hidden_layers": 1}, mamba_d_ssm=128),
    "Nemotron-H": hf.NemotronHConfig(**NEMOTRON),
}
