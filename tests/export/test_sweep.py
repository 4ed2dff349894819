"""Every configuration that transformers registers as a causal language model: a tiny random one of it is exported, or refused
with a reason. The last section of docs/models.md has the outcome.
"""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import re
import shutil
import textwrap
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.backends.onnxruntime.package import first_line
from outrider.errors import OutriderError, ParityError
from outrider.export.checkpoints.checkpoint import load_model, read_config
from outrider.export.checkpoints.source import Source
from outrider.export.graph.replaced import replaced
from outrider.export.graph.step_model import trace
from outrider.export.parity import CHUNKS, Exported, reference
from outrider.tests.export import models_page
from outrider.tests.export.recurrent_models import CONFIGS
from outrider.tests.support import write_checkpoint

TOLERANCE, LIMIT = 1e-4, 240  # of a logit; seconds for one model
EXPORTED, REFUSED, NOT_TRIED, FAILED = "exported", "refused", "not tried", "failed"
CONTEXT = multiprocessing.get_context("forkserver")
MODEL_TYPES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name != "gpt-sw3"]  # which is gpt2
MODULE = "outrider.tests.export.test_sweep"  # pytest gives it another name, which a new process cannot import
# What the fields of a configuration become, by their names in all families; a configuration gets those that it has.
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
# What the page says of a refusal whose message has this part; of others, it has the message.
REASONS = {
    "encoder-decoder": "an encoder-decoder",
    "no key/value cache": "no key/value cache",
    "no layer with attention": "a recurrent state and no attention",
    "several convolutions": "several convolutions in one layer",
    "indexer": "sparse attention, whose indexer keeps keys of its own",
    "recurrent state of an unknown kind": "a recurrent state of an unknown kind",
    "its own attention code": "its own attention code, outside transformers' attention interface",
    "Attention mask should be of size": "its own attention code, outside transformers' attention interface",
    "without a causal mask": "attention without a causal mask",
    "store_compression_weights": "compressed attention, which keeps more than keys and values",
    "cache of its own": "a cache of its own",
    "data-dependent": "experts whose shapes depend on the data",
    "grouped_mm": "grouped products of experts, which ONNX lacks",
    "Cannot view a tensor": "a view of attention's output that needs another order in memory",
    "not in VR": "a prompt of its own before the text",
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


def write(config: Any, folder: Path) -> None:
    """Write a random checkpoint of this configuration; of an encoder-decoder, the configuration."""
    config.save_pretrained(folder)
    if not config.is_encoder_decoder:
        torch.manual_seed(0)
        made = hf.AutoModelForCausalLM.from_config(config)
        for parameter in made.parameters():  # fresh norms and biases are ones and zeros, which would hide mistakes
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
        write_checkpoint(folder, made)
        config.save_pretrained(folder)  # a text model writes its own, which may not be registered


def attempt(kind: type[Any], folder: Path, connection: Connection) -> None:
    """Send how an export of a tiny model goes, and why."""
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        write(shrunk(kind), folder)
    except Exception as error:
        connection.send((NOT_TRIED, " ".join(str(error).split())))
        return
    try:
        connection.send((EXPORTED, export(Source.parse(str(folder)))))
    except OutriderError as error:
        connection.send((REFUSED, str(error)))
    except Exception as error:
        traceback.print_exc()
        connection.send((FAILED, f"{type(error).__name__}: {first_line(error)}"))


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
    if kind.model_type.endswith("assistant"):
        return NOT_TRIED, "a draft, which reads its target's cache"
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=importlib.import_module(MODULE).attempt, args=(kind, folder, sender))
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


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[dict[str, tuple[str, str]]]:
    """What becomes of each model type. After a run over all of them, the page may be written."""
    CONTEXT.set_forkserver_preload([MODULE])
    found: dict[str, tuple[str, str]] = {}
    yield found
    if request.config.getoption("--models-page"):
        models_page.write("sweep", section({name: found[name] for name in MODEL_TYPES}))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_TYPES)
def test_a_causal_language_model_is_exported_or_refused_with_a_reason(
    name: str, results: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    """What the page lists as exported stays so. A machine may be too slow for others, or a transformers know more."""
    text = resolved(CONFIG_MAPPING[name])
    if text.model_type not in results:
        results[text.model_type] = outcome(text, tmp_path)
        shutil.rmtree(tmp_path)
    status, reason = results[name] = results[text.model_type]
    assert status != FAILED, reason  # no refusal, but a traceback
    listed = re.search(r"^Exported: (.*)\.$", models_page.parts()["sweep"], re.MULTILINE)
    assert listed is not None
    assert status == EXPORTED or name not in listed[1].split(", "), reason


OF_GEMMA_3N: dict[str, Any] = {
    **{"num_hidden_layers": 2, "altup_num_inputs": 2, "layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1},
    **{"activation_sparsity_pattern": [0.5, 0.0], "intermediate_size": [96] * 2},
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v2", {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
        pytest.param("gemma3n_text", OF_GEMMA_3N, marks=pytest.mark.slow),
        ("roberta", {"num_hidden_layers": 1}),
    ],
    ids=["deepseek_v2", "gemma3n_text", "roberta"],
)
def test_what_stands_in_for_functions_that_onnx_lacks(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Rotary embeddings in complex numbers, with latent attention and shared experts; a quantile of the normal
    distribution, and keys shared by layers; positions from 2 on."""
    write(changed(name, changes), tmp_path)
    assert float(export(Source.parse(str(tmp_path)))) <= TOLERANCE


def changed(name: str, changes: dict[str, Any]) -> Any:
    """The configuration of a tiny model, with changes."""
    kind = CONFIG_MAPPING[name]
    own = {field.name for field in dataclasses.fields(kind)}
    usual = {field: value for field, value in shrunk(kind).to_dict().items() if field in own}
    return kind(**(usual | changes))


def test_what_stands_in_for_a_quantile_computes_it() -> None:
    """Without the trace, which takes most of the time of the test above."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(changed("gemma3n_text", OF_GEMMA_3N)).eval()
    tokens = torch.randint(1, 64, (1, 20))
    with torch.no_grad():
        want = model(tokens, use_cache=False).logits
        with replaced(model):
            got = model(tokens, use_cache=False).logits
        model.model.layers[0].mlp.activation_sparsity = 0.3
        other = model(tokens, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(other, want, atol=1e-3)


def section(results: dict[str, tuple[str, str]]) -> str:
    """The last section of docs/models.md, below its heading."""
    exported = sorted(name for name, (status, _) in results.items() if status == EXPORTED)
    lines = [
        f"transformers {hf.__version__} registers {len(results)} model types as causal language models.",
        "`make models-page` (`tests/export/test_sweep.py`) makes a tiny random model of each, with a layer of each kind in",
        "its default configuration, and exports it in fp32. For a multimodal model type, it exports the text model if that is",
        "registered separately. Encoders run as decoders (`is_decoder`).",
        "",
        f"**{len(exported)} of {len(results)} are exported**: run on ONNX Runtime in chunks of {', '.join(map(str, CHUNKS))}"
        f" tokens, the logits are within {TOLERANCE:.0e}",
        "of eager transformers'. Model types outside the first table are tested no further.",
        "",
        f"Exported: {', '.join(exported)}.",
        "",
        "| model type | reason |",
        "|---|---|",
    ]
    for name, (status, reason) in sorted(results.items()):
        if status != EXPORTED:
            lines.append(f"| {name} | {'not tried: ' if status == NOT_TRIED else ''}{short(reason)} |")
    return "\n".join(lines)


def short(reason: str) -> str:
    """Return a reason for a cell of the table."""
    known = next((words for part, words in REASONS.items() if part in reason), None)
    return known or textwrap.shorten(reason.split(" graph: ")[-1], 160, placeholder=" ...").replace("|", "\\|")
