"""Every configuration that transformers registers as a causal language model: a tiny random one of it is exported, or refused
with a reason.

`make test-all` writes the last section of docs/models.md.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outrider.backends.onnxruntime.engine import first_line
from outrider.errors import OutriderError, ParityError, UnsupportedModelError
from outrider.export.checkpoint import load_model, read_config
from outrider.export.parity import CHUNKS, Exported, reference
from outrider.export.source import Source
from outrider.export.step_model import trace
from outrider.tests.export.recurrent_models import CONFIGS
from outrider.tests.support import ROOT, write_checkpoint, write_models_page

TOLERANCE, LIMIT = 1e-4, 240  # of a logit; seconds for one model
EXPORTED, REFUSED, NOT_TRIED = "exported", "refused", "not tried"
CONTEXT = multiprocessing.get_context("forkserver")
PLACES, WINDOW = 128, 8  # the window is shorter than the text, so that it matters
# What the fields of a configuration become, by their names in all families; a configuration gets those that it has.
SIZES: dict[int, str] = {
    320: "vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input",
    64: "hidden_size n_embd d_model emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size"
    " output_embedding_size attention_hidden_size lru_width mamba_d_ssm",
    96: "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff d_inner feed_forward_size"
    " dense_intermediate_size intermediate_size_mlp",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size"
    " moe_shared_expert_intermediate_size expert_ffn_hidden_size attention_head_dim",
    16: "head_dim v_head_dim dim_head d_head kv_channels kv_lora_rank q_lora_rank o_lora_rank mamba_d_head mamba_head_dim"
    " mamba_headdim mamba_d_state ssm_state_size state_size index_head_dim hidden_size_per_layer_input swa_head_dim"
    " linear_key_head_dim linear_head_dim laurel_rank attention_head_size query_pre_attn_scalar router_hidden_size"
    " gated_norm_rank adapter_rank time_step_rank mamba_dt_rank swa_v_head_dim",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads"
    " num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads"
    " swa_num_attention_heads index_n_heads index_topk num_decoder_attention_heads num_encoder_attention_heads",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_key_value_heads num_kv_heads n_groups"
    " mamba_n_groups linear_num_key_heads num_experts_per_tok moe_topk moe_k swa_num_key_value_heads num_query_groups"
    " num_decoder_layers num_encoder_layers",
    1: "first_k_dense_replace num_dense_layers n_shared_experts num_shared_experts n_group topk_group moe_layer_start_index"
    " bos_token_id eos_token_id sep_token_id cls_token_id decoder_start_token_id moe_layer_end_index",
    0: "pad_token_id num_kv_shared_layers",
    PLACES: "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length max_target_positions",
    WINDOW: "qk_rope_head_dim qk_nope_head_dim rotary_dim mamba_n_heads mamba_num_heads linear_value_head_dim mamba_chunk_size"
    " chunk_size sliding_window window_size attention_window_size sliding_window_size local_attention attention_chunk_size"
    " keep_window_size",
}
# What families need beside it.
OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4, "index_head_dim": 16, "head_dim": 16} | {
        f"swa_{name}": 16 for name in ("head_dim", "q_lora_rank", "kv_lora_rank", "v_head_dim")
    } | {"swa_qk_nope_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "moshi": {"audio_vocab_size": 64},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 512,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16)},
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64, "shape_embed_dim": 32, "pronunciation_embed_dim": 32},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
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
    sizes = {name: size for size, names in SIZES.items() for name in names.split() if name in own}
    if "qk_rope_head_dim" in own:
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": sizes["num_attention_heads"]}
        sizes = {name: size for name, size in sizes.items() if name in own}
    if "is_decoder" in own:
        sizes["is_decoder"] = True
    layers = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(usual.get(name), int)), "")
    lists = {name: usual[name] for name in own - set(sizes) if isinstance(usual.get(name), list)}
    lists = {name: value for name, value in lists.items() if len(value) == usual.get(layers)}
    if lists:
        rows = zip(*(value for value in lists.values() if isinstance(value[0], str)), strict=True)
        first = {row: index for index, row in reversed([*enumerate(rows)])}
        kept = sorted({0, 1, *first.values()})
        sizes |= {name: [value[index] for index in kept] for name, value in lists.items()} | {layers: len(kept)}
    for name, inner in getattr(kind, "sub_configs", {}).items():
        if dataclasses.is_dataclass(inner):
            sizes[name] = shrunk(inner).to_dict()
    return kind(**(sizes | OVERRIDES.get(kind.model_type, {})))


def resolved(kind: type[Any]) -> type[Any]:
    """Return the class of a multimodal configuration's text model, if that is registered by itself, and else the class."""
    try:
        text = type(kind().get_text_config()) if "assistant" not in kind.model_type else kind
    except Exception:
        return kind
    return text if text in MODEL_FOR_CAUSAL_LM_MAPPING else kind


def attempt(kind: type[Any], folder: Path, connection: Connection) -> None:
    """Send how an export of a tiny model goes, and why."""
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        config = shrunk(kind)
        config.save_pretrained(folder)
        if not config.is_encoder_decoder:
            torch.manual_seed(0)
            made = hf.AutoModelForCausalLM.from_config(config)
            for parameter in made.parameters():  # fresh norms and biases are ones and zeros, which would hide mistakes
                if parameter.dim() == 1:
                    parameter.data += 0.1 * torch.randn_like(parameter)
            write_checkpoint(folder, made)
    except Exception as error:
        connection.send((NOT_TRIED, first_line(error)))
        return
    try:
        connection.send((EXPORTED, export(Source.parse(str(folder)))))
    except OutriderError as error:
        connection.send((REFUSED, str(error)))
    except Exception as error:
        traceback.print_exc()
        connection.send((REFUSED, f"{type(error).__name__}: {first_line(error)}"))


def export(source: Source) -> str:
    """Export a checkpoint and compare the logits; return the difference."""
    read_config(source)
    model = load_model(source, "fp32")
    tokens = torch.randint(2, 320, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    want, layout, _ = reference(model, tokens)
    graph = Path(source.location) / "fp32.onnx"
    trace(model, layout).save(graph, external_data=True)
    difference = float(np.abs(want - Exported(graph, layout, "fp32").logits(tokens)).max())
    if not difference <= TOLERANCE:  # also true for NaN
        raise ParityError(f"logits differ by {difference:.1g}", "")
    return f"{difference:.1g}"


def outcome(kind: type[Any], folder: Path) -> tuple[str, str]:
    """Return how an export goes in a process of its own, which may crash or hang."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=attempt, args=(kind, folder, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(LIMIT) else (NOT_TRIED, f"it takes more than {LIMIT} seconds")
    except EOFError:
        process.join()
        return NOT_TRIED, f"the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
