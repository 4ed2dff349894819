"""Tiny configurations of the architectures that are exported, the exceptions among them, and the ones that are refused."""

from __future__ import annotations

from typing import Any

import transformers as hf

from outrider.tests.export import recurrent_models
from outrider.tests.export.tiny_configs import fields_of

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ONE_LAYER = {**COMMON, "num_hidden_layers": 1}
WINDOW = 6  # shorter than the text, so that the window matters
GEMMA = {**COMMON, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
MIXED_LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {**COMMON, "num_experts_per_tok": 2}
ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, Any] = {
    "Llama": hf.LlamaConfig(**ONE_LAYER),
    "Qwen2": hf.Qwen2Config(**COMMON),
    "Qwen3": hf.Qwen3Config(**COMMON, head_dim=24),
    "Mistral, sliding window": hf.MistralConfig(**ONE_LAYER, sliding_window=WINDOW),
    "Phi-3": hf.Phi3Config(**COMMON),
    # Written-out attention takes long to trace: a layer without a window, and GPT-OSS's with one. Random weights reach the cap.
    "Gemma-2": hf.Gemma2Config(
        **{**GEMMA, "num_hidden_layers": 1, "layer_types": ["full_attention"]}, attn_logit_softcapping=0.02
    ),
    "Gemma-3": hf.Gemma3TextConfig(**GEMMA, layer_types=MIXED_LAYERS),
    "GPT-2": hf.GPT2Config(vocab_size=320, n_embd=64, n_layer=1, n_head=4, n_positions=128),
    "GPT-NeoX": hf.GPTNeoXConfig(**{name: value for name, value in COMMON.items() if name != "num_key_value_heads"}),
    "OLMo-2": hf.Olmo2Config(**COMMON),
    "StableLM": hf.StableLmConfig(**COMMON),
    "SmolLM3": hf.SmolLM3Config(**COMMON),
    "Granite": hf.GraniteConfig(**COMMON),
    "Qwen3-MoE": hf.Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=16),
    "Mixtral": hf.MixtralConfig(**EXPERTS, num_local_experts=4),
    "GPT-OSS": hf.GptOssConfig(
        **{**EXPERTS, "num_hidden_layers": 1, "layer_types": MIXED_LAYERS[:1]},
        num_local_experts=4,
        head_dim=16,
        sliding_window=WINDOW,
    ),
    "Llama, dynamic RoPE": hf.LlamaConfig(**COMMON, rope_parameters={**ROPE, "rope_type": "dynamic"}),
    "Qwen3, YaRN": hf.Qwen3Config(**ONE_LAYER, head_dim=24, rope_parameters={**ROPE, "rope_type": "yarn"}),
    "Phi-3, long RoPE": hf.Phi3Config(
        **COMMON,
        original_max_position_embeddings=64,
        rope_parameters={**ROPE, "rope_type": "longrope", "short_factor": [1.1] * 8, "long_factor": [4.0] * 8},
    ),
    **recurrent_models.CONFIGS,
}
IN_FOUR: dict[str, dict[str, Any]] = {  # what these have otherwise, with four layers
    "Gemma-2": {"layer_types": MIXED_LAYERS * 2},
    "GPT-OSS": {"layer_types": MIXED_LAYERS * 2},
    "Bamba": {"attn_layer_indices": [1, 3]},
}
# One of each mechanism, of as few layers as it needs: full attention, sliding windows, soft caps, both kinds of layers, learned
# positions, experts and sinks, scaled rotary embeddings, convolutions, and Mamba-2 beside attention. Gated delta nets with
# M-RoPE are in tests/runtime/hybrid.
IN_TEST = (
    *("Llama", "Mistral, sliding window", "Gemma-2", "Gemma-3", "GPT-2", "GPT-OSS", "Qwen3, YaRN"),
    *("LFM2", "Falcon-H1"),
)
WRITTEN_OUT = ("Gemma-2", "GPT-OSS")  # soft-capped scores, and attention sinks
REFUSED: dict[str, tuple[Any, str]] = {
    "T5": (hf.T5Config(vocab_size=320, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16), "encoder-decoder"),
    "BERT": (hf.BertConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2), "no key/value cache"),
    "Mamba": (hf.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1), "no layer with attention"),
    "Jamba": (hf.JambaConfig(**COMMON, attn_layer_period=2, attn_layer_offset=1), "of an unknown kind"),
    "Falcon": (
        hf.FalconConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
        "its own attention code",
    ),
    "BLOOM": (hf.BloomConfig(vocab_size=320, hidden_size=32, n_layer=1, n_head=2), "its own attention code"),
}
# What TensorRT-RTX refuses, and how: (architecture, precision) -> a part of its message.
NOT_BUILT: dict[tuple[str, str], str] = {
    (name, precision): "CHECK(is_const()) failed"  # its compiler's, of the recurrence's Loop
    for name in recurrent_models.CONFIGS
    if not name.startswith("LFM2")
    for precision in ("fp16", "bf16", "fp32")
}
# What OpenVINO does not run, and why.
NOT_ON_OPENVINO = dict.fromkeys(WRITTEN_OUT, "attention that is written out, as with soft-capped scores")
NOT_ON_OPENVINO |= dict.fromkeys(recurrent_models.CONFIGS, "recurrent layers")


def four_layers(name: str) -> Any:
    """The configuration of an architecture with four layers, which are of the same kinds in turn."""
    given = fields_of(CONFIGS[name])
    counts = {field: 4 for field in ("num_hidden_layers", "n_layer") if field in given}
    lists = {field: (given[field] * 4)[:4] for field in ("layer_types", "no_rope_layers") if isinstance(given.get(field), list)}
    return type(CONFIGS[name])(**(given | counts | lists | IN_FOUR.get(name, {})))
