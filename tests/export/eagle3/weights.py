"""Make the checkpoints behind `fixtures.npz` from seeds, so that the repository stores results and no weights.

`checkpoint` gives a head's config.json and tensors as its trainer writes them, `target` what a head takes from its target,
`inputs` what the fixtures were computed from. `make_fixtures.py` has computed them and says what is in the file.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from zlib import crc32

import numpy as np

from outrider.tests.export.eagle3.cases import (
    ALL,
    EPSILON,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    MIDLAYER,
    ROWS,
    SEEDS,
    VOCAB,
    Case,
)


def checkpoint(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a head's config.json and its tensors by their names in the checkpoint."""
    return deepcopy(_config(ALL[name])), _tensors(name)


def target(name: str) -> dict[str, np.ndarray]:
    """Return the target's embedding and its lm_head, both [VOCAB, target_hidden]."""
    shape = (VOCAB, ALL[name].target_hidden)
    # Rows of an embedding are looked up, not summed over: their elements are about 1.
    embedding = _uniform(name, "target.embed_tokens", shape) * 3**0.5
    return {"model.embed_tokens.weight": embedding, "lm_head.weight": _matrix(name, "target.lm_head", shape)}


def inputs(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the features [ROWS, features * target_hidden] and the tokens int64 [ROWS + 1]."""
    case = ALL[name]
    features = _uniform(name, "features", (ROWS, case.features, case.target_hidden))
    features *= 2.0 ** np.arange(-1, case.features - 1, dtype=np.float32)[:, None]  # residual streams grow from layer to layer
    tokens = _drawn(name, "tokens", (ROWS + 1,)) * VOCAB
    return features.reshape(ROWS, -1), tokens.astype(np.int64)


def target_ids(name: str) -> np.ndarray:
    """Return the target's token for each draft token, ascending."""
    case = ALL[name]
    order = np.argsort(_drawn(name, "d2t", (VOCAB,)))
    return np.sort(order[: case.draft_vocab]).astype(np.int64)


def _drawn(name: str, what: str, shape: tuple[int, ...]) -> np.ndarray:
    # Seeded by both names: a further tensor, or a further case, leaves all others as they are.
    return np.random.default_rng([crc32(name.encode()), crc32(what.encode()), SEEDS.get(name, 0)]).random(shape)


def _uniform(name: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    return (_drawn(name, tensor, shape) * 2 - 1).astype(np.float32)


def _matrix(name: str, tensor: str, shape: tuple[int, int]) -> np.ndarray:
    return _uniform(name, tensor, shape) * np.float32((3 / shape[1]) ** 0.5)


def _tensors(name: str) -> dict[str, np.ndarray]:
    case = ALL[name]
    queries, keys, wide = HEADS * case.head_dim, KV_HEADS * case.head_dim, case.features * case.target_hidden
    matrices = {"fc": (HIDDEN, wide)}
    norms = {"norm": HIDDEN}
    biases: dict[str, int] = {}
    if case.norm_before_fc:
        norms["input_norm"] = wide
    if case.fc_norm:
        norms |= {f"fc_norm.{i}": case.target_hidden for i in range(case.features)}
    for layer in range(case.layers):
        prefix = "midlayer" if case.format in MIDLAYER else f"layers.{layer}"
        entering = HIDDEN if layer else 2 * HIDDEN  # only the first layer sees the embedding
        attention = {
            "q_proj": (queries, entering),
            "k_proj": (keys, entering),
            "v_proj": (keys, entering),
            "o_proj": (HIDDEN, queries),
        }
        mlp = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
        matrices |= {f"{prefix}.self_attn.{key}": shape for key, shape in attention.items()}
        matrices |= {f"{prefix}.mlp.{key}": shape for key, shape in mlp.items()}
        norms |= {f"{prefix}.{key}": HIDDEN for key in ("input_layernorm", "post_attention_layernorm")}
        if layer == 0:
            norms[f"{prefix}.hidden_norm"] = HIDDEN
        if case.layer == "qwen3":
            norms |= {f"{prefix}.self_attn.{key}": case.head_dim for key in ("q_norm", "k_norm")}
        if case.attention_bias:
            biases |= {f"{prefix}.self_attn.{key}": shape[0] for key, shape in attention.items()}
        if case.mlp_bias:
            biases |= {f"{prefix}.mlp.{key}": shape[0] for key, shape in mlp.items()}
    if case.mask is not None:
        matrices["mask_hidden"] = (1, wide)
    if case.head:
        matrices["lm_head"] = (case.draft_vocab, HIDDEN)
    tensors = {f"{key}.weight": _matrix(name, key, shape) for key, shape in matrices.items()}
    tensors |= {f"{key}.weight": 1 + _uniform(name, key, (size,)) / 2 for key, size in norms.items()}
    tensors |= {f"{key}.bias": _uniform(name, f"{key}.bias", (size,)) / 2 for key, size in biases.items()}
    if case.mask is not None:
        tensors["mask_hidden"] = tensors.pop("mask_hidden.weight").reshape(1, 1, wide) * 4
    if case.embedding == "copy":
        tensors["embed_tokens.weight"] = target(name)["model.embed_tokens.weight"]
    elif case.embedding == "own":
        tensors["embed_tokens.weight"] = _uniform(name, "embed_tokens", (VOCAB, HIDDEN)) * np.float32(3**0.5)
    ids = target_ids(name)
    if case.mapping != "none":
        tensors["d2t"] = ids - np.arange(case.draft_vocab)
    if case.mapping in ("both", "identity"):
        tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
    return tensors


def _config(case: Case) -> dict[str, Any]:
    shapes: dict[str, Any] = {
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 64,
        "num_attention_heads": HEADS,
        "num_hidden_layers": case.layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPSILON,
        "use_cache": True,
        "vocab_size": VOCAB,
    }
    further: dict[str, Any] = {"attention_bias": case.attention_bias, "attention_dropout": 0.0, "head_dim": case.head_dim}
    llama: dict[str, Any] = {**further, "mlp_bias": case.mlp_bias, "pretraining_tp": 1}
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False}
    rope4 = {} if case.theta is None else {"rope_scaling": case.scaling, "rope_theta": case.theta}
    rope5 = {"rope_parameters": {"rope_type": "default", **(case.scaling or {}), "rope_theta": case.theta or 10_000.0}}
    inputs_of = list(case.inputs_of or ())
    outputs_of = [layer - 1 for layer in inputs_of]  # the same places, as SpecForge and ModelOpt count them
    if case.format.startswith("speculators"):
        decoder: dict[str, Any] = {**shapes, **(llama if case.layer == "llama" else further), "model_type": case.layer}
        if case.format == "speculators-0.1":
            return speculators_config(case) | {"transformer_layer_config": {**decoder, **rope4}}
        decoder |= {**special, **rope5}
        if case.format == "speculators-converter":
            decoder["dtype"] = "float32"
        if case.sliding:
            used = any(case.sliding)
            decoder["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in case.sliding]
            decoder |= {"use_sliding_window": used, "sliding_window": case.window if used or case.layer == "llama" else None}
        if case.layer == "qwen3":
            decoder["max_window_layers"] = 28
        return speculators_config(case) | {"transformer_layer_config": decoder}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": case.draft_vocab,
        **shapes,
        **special,
    }
    old = {"torch_dtype": "float32", "transformers_version": "4.51.0"}
    if case.format == "safeailab":
        config |= {"architectures": ["LlamaForCausalLM"], "pad_token_id": 0, **old, **rope4}
        if case.target_hidden != HIDDEN:
            config["target_hidden_size"] = case.target_hidden
    elif case.format == "specforge-4":
        config |= {**further, "pad_token_id": 0, **old, **rope4}
    elif case.format == "specforge-5":
        config |= {**llama, **rope5, "rope_theta": case.theta, "dtype": "float32", "transformers_version": "5.8.0"}
    else:
        eagle = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
        config |= {**llama, **old, "rope_theta": case.theta, "eagle_config": {**eagle, "use_mtp_layernorm": False}}
        config["rope_scaling"] = case.scaling or {"rope_type": "default", "rope_theta": case.theta}
        if case.format == "modelopt":
            config["eagle_config"] |= {
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": 1,
            }
    if inputs_of and case.format != "safeailab":
        config["eagle_config"] = {**config.get("eagle_config", {}), "eagle_aux_hidden_state_layer_ids": outputs_of}
    return config | dict(case.extra)


def speculators_config(case: Case) -> dict[str, Any]:
    """Return the keys of speculators' config.json around transformer_layer_config."""
    old = case.format == "speculators-0.1"
    greedy = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    verifier = {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"}
    config: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel" if case.format == "speculators" else "Eagle3Speculator"],
        "auto_map": {"": f"{'eagle3' if old else 'config'}.Eagle3SpeculatorConfig"},
        "draft_vocab_size": case.draft_vocab,
        "norm_before_residual": case.norm_before_residual,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": verifier,
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev14" if old else "0.9.0",
        "target_hidden_size": None if case.target_hidden == HIDDEN else case.target_hidden,
        "transformers_version": "4.53.1" if old else "5.19.0",
    }
    if case.mask is not None:
        config |= {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": case.mask}
        config["speculators_config"]["algorithm"] = "peagle"
    if old:
        return config | {"has_no_defaults_at_init": False, "torch_dtype": "float32"}
    return config | {
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": None if case.inputs_of is None else list(case.inputs_of),
        "embed_requires_grad": case.embedding == "own",
        "fc_norm": case.fc_norm,
        "norm_before_fc": case.norm_before_fc,
        "norm_output": case.norm_output,
        "tie_word_embeddings": False,
    }
