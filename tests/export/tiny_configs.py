"""Two tiny configurations of every architecture that transformers registers as a causal language model."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outrider.tests.export.recurrent_models import CONFIGS

# New values for fields of configurations, by field name; fields that a configuration lacks are left out.
SIZES: dict[int, str] = {
    320: """vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input audio_vocab_size shape_vocab_size
        pronunciation_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base""",
    128: """max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length max_target_positions""",
    64: """hidden_size n_embd d_model emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size
        output_embedding_size lru_width mamba_d_ssm""",
    96: """intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff d_inner
        feed_forward_size dense_intermediate_size intermediate_size_mlp""",
    32: """moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size
        moe_shared_expert_intermediate_size expert_ffn_hidden_size attention_head_dim shape_embed_dim
        pronunciation_embed_dim""",
    16: """head_dim v_head_dim dim_head d_head kv_channels kv_lora_rank q_lora_rank o_lora_rank mamba_d_head mamba_head_dim
        mamba_headdim mamba_d_state ssm_state_size state_size index_head_dim indexer_head_dim hidden_size_per_layer_input
        swa_head_dim swa_v_head_dim linear_key_head_dim linear_head_dim laurel_rank attention_head_size query_pre_attn_scalar
        router_hidden_size gated_norm_rank adapter_rank time_step_rank mamba_dt_rank hc_lowrank ple_embed_dim""",
    8: """qk_rope_head_dim qk_nope_head_dim rotary_dim mamba_n_heads mamba_num_heads linear_value_head_dim mamba_chunk_size
        chunk_size sliding_window window_size attention_window_size sliding_window_size local_attention attention_chunk_size
        keep_window_size""",  # windows shorter than the text, so that they matter
    4: """num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads
        num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads index_n_heads indexer_n_heads
        index_topk indexer_budget num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads
        linear_num_heads""",
    2: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers
        num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups n_groups mamba_n_groups linear_num_key_heads
        num_experts_per_tok moe_topk moe_k zero_expert_num indexer_compress_ratio""",
    1: """first_k_dense_replace num_dense_layers n_shared_experts num_shared_experts n_group topk_group moe_layer_start_index
        moe_layer_end_index indexer_kv_heads split_ngram_parts bos_token_id eos_token_id sep_token_id cls_token_id
        decoder_start_token_id""",
    0: "pad_token_id",
}
DOTS = "head_dim swa_head_dim swa_q_lora_rank swa_kv_lora_rank swa_v_head_dim"
HYBRID = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
SHARED = ["sliding_attention", "full_attention"] * 2
GEMMA_3N = {"activation_sparsity_pattern": [0.5, 0.0] * 2, "intermediate_size": [96] * 4}
# What families need beside it.
OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        **dict.fromkeys(DOTS.split(), 16),
        **{"swa_qk_nope_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
    },
    "gemma3n_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": SHARED, **GEMMA_3N},
    "gemma4_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": SHARED},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16)},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, **HYBRID},
    "zamba2": HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk(kind: type[Any]) -> Any:
    """Return a configuration of this class whose model is tiny, with a layer of each kind."""
    known = next((config for config in CONFIGS.values() if type(config) is kind), None)
    if known is not None:
        return known
    try:
        usual = vars(kind())
    except Exception:  # a class may have no default that it accepts
        usual = {}
    own = {field.name for field in dataclasses.fields(kind)}
    all_sizes: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names.split()} | {"is_decoder": True}
    if "qk_rope_head_dim" in own:  # multi-head latent attention
        all_sizes |= {"head_dim": all_sizes["qk_rope_head_dim"], "num_key_value_heads": all_sizes["num_attention_heads"]}
    sizes = {name: size for name, size in all_sizes.items() if name in own}
    layers = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(usual.get(name), int)), "")
    lists = {name: usual[name] for name in own - set(sizes) if isinstance(usual.get(name), list)}
    lists = {name: value for name, value in lists.items() if len(value) == usual.get(layers)}
    if lists:
        rows = zip(*(value for value in lists.values() if isinstance(value[0], str)), strict=True)
        first = {row: index for index, row in reversed([*enumerate(rows)])}
        kept = sorted({0, 1, *first.values()})
        sizes |= {name: [value[index] for index in kept] for name, value in lists.items()} | {layers: len(kept)}
    for name, inner in getattr(kind, "sub_configs", {}).items():
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            sizes[name] = shrunk(inner).to_dict()
    return kind(**(sizes | OVERRIDES.get(kind.model_type, {})))


def resolved(kind: type[Any]) -> type[Any]:
    """Return the class of a multimodal configuration's text model, if that is registered by itself, and else the class."""
    try:
        text = type(kind().get_text_config()) if "assistant" not in kind.model_type else kind
    except Exception:
        return kind
    return text if text in MODEL_FOR_CAUSAL_LM_MAPPING else kind


def fields_of(config: Any) -> dict[str, Any]:
    """Return a configuration's fields by argument of its constructor; some have other names in config.json."""
    names, given = type(config).attribute_map, config.to_dict()
    own = {field.name: names.get(field.name, field.name) for field in dataclasses.fields(config)}
    return {field: given[name] for field, name in own.items() if name in given}


def changed(name: str, changes: dict[str, Any]) -> Any:
    """The configuration of a tiny model, with changes."""
    first = shrunk(CONFIG_MAPPING[name])
    return type(first)(**(fields_of(first) | changes))


# What the second configuration has, where a class has the field: heads of another width than the hidden size gives, one head of
# keys, a shorter window, more experts and in groups, and other layers of them.
OTHER_SIZES: dict[int, str] = {
    24: "head_dim v_head_dim swa_head_dim attention_head_size",
    16: "qk_nope_head_dim",
    8: "num_experts n_routed_experts num_local_experts moe_num_experts",
    5: "sliding_window sliding_window_size window_size attention_chunk_size local_attention",
    3: "num_experts_per_tok moe_topk moe_k",
    2: "n_group decoder_sparse_step interleave_moe_layer_step expert_layer_period moe_layer_interval",
    1: "num_key_value_heads num_kv_heads num_query_groups swa_num_key_value_heads max_window_layers",
    0: "first_k_dense_replace num_dense_layers",
}
FLIPPED = """tie_word_embeddings attention_bias attention_out_bias mlp_bias bias qkv_bias use_qkv_bias use_bias conv_bias
    mamba_conv_bias mamba_proj_bias use_conv_bias lm_head_bias projectors_bias norm_bias norm_topk_prob qk_layernorm use_qk_norm
    use_parallel_residual multi_query rope_interleave use_attention_gate use_sandwich_norm mup_enabled gating use_expert_bias
    use_sliding_window moe_apply_router_weight_on_input attn_temperature_tuning attention_k_eq_v use_double_wide_mlp
    scale_embedding scale_attn_by_inverse_layer_idx do_layer_norm_before use_post_norm mamba_rms_norm mamba_norm_before_gate
    linear_allow_neg_eigval add_bias_linear enable_bias"""
LAYERS = "num_hidden_layers n_layer n_layers num_layers decoder_layers"
# What classes refuse of that, or cannot run, and what has names of its own.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "axk1": {"q_lora_rank": 16},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4},
    "diffllama": {"num_key_value_heads": 4},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "helium": {"head_dim": 16},
    "laguna": {"moe_apply_router_weight_on_input": False},
    "llama4_text": {"moe_layers": [1]},
}


def another(kind: type[Any]) -> Any:
    """Return a second tiny configuration of this class, of four layers or more, other than the first in `other_fields`."""
    first = shrunk(kind)
    usual = fields_of(first)
    parts = getattr(kind, "sub_configs", {}).items()
    inner = {name: another(part).to_dict() for name, part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)}
    other = other_fields(usual, getattr(first, "num_hidden_layers", 0))
    return kind(**(usual | other | inner | EXCEPTIONS.get(kind.model_type, {})))


def other_fields(usual: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return what a second configuration has in place of these fields of the first. Its layers are those in reverse order, in
    turn, four of them or more.
    """
    sizes: dict[str, Any] = {name: size for size, names in OTHER_SIZES.items() for name in names.split() if name in usual}
    if "qk_rope_head_dim" in usual:  # multi-head latent attention, whose sizes go together; queries may have no rank
        sizes = {name: size for name, size in sizes.items() if name not in ("head_dim", "num_key_value_heads")}
        sizes |= {"q_lora_rank": None} if "q_lora_rank" in usual else {}
    flags = {name: not usual[name] for name in FLIPPED.split() if isinstance(usual.get(name), bool)}
    lists = {
        name: (value[::-1] * 4)[: max(layers, 4)]
        for name, value in usual.items()
        if isinstance(value, list) and len(value) == layers
    }
    if set(lists.get("mlp_layer_types", ())) == {"sparse"}:
        lists["mlp_layer_types"] = ["dense", *lists["mlp_layer_types"][1:]]
    if set(lists.get("layer_types", ())) == {"full_attention"} and "sliding_window" in usual:
        lists["layer_types"] = ["sliding_attention", *lists["layer_types"][1:]]
    return sizes | flags | lists | {name: max(usual[name], 4) for name in LAYERS.split() if isinstance(usual.get(name), int)}
