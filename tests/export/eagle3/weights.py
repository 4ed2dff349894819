"""Make the checkpoints behind `fixtures.npz` from seeds, so that the repository stores results and no weights.

`checkpoint` gives a head's config.json and tensors as its trainer writes them, `target` what a head takes from its target,
`inputs` what the fixtures were computed from. `make_fixtures.py` has computed them and says what is in the file.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import numpy as np

VOCAB, DRAFT_VOCAB = 96, 40
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 32, 4, 2, 48
TARGET_LAYERS = 8  # of the target that the ids of the feature layers mean
ROWS = 12  # of confirmed text
PREFIXES = range(6, 11)  # confirmed rows before a chain of draft steps
STEPS = 4  # of a chain
EPSILON = 1e-2  # so large that a reader who ignores rms_norm_eps is caught
THETA = 500_000.0
WINDOW = 5
# The original lengths are so short that the fixtures' positions feel the scaling.
LLAMA3 = {
    "factor": 4.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8,
    "rope_type": "llama3",
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}

Format = Literal[
    "speculators",  # what its trainer writes since 0.9
    "speculators-converter",  # what its converter makes of the other formats
    "speculators-0.1",  # the heads published in 2025, and what ModelOpt's convert_to_vllm_ckpt.py writes
    "safeailab",
    "specforge-4",  # with transformers 4
    "specforge-5",  # with transformers 5
    "modelopt-midlayer",  # until 2025-12-18
    "modelopt",
]
MIDLAYER = ("safeailab", "specforge-4", "specforge-5", "modelopt-midlayer")  # their layer is `midlayer`, not `layers.0`


@dataclass(frozen=True)
class Case:
    """Describe a head: what its config says, and which tensors its checkpoint has."""

    format: Format = "speculators"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layer: Literal["llama", "qwen3"] = "llama"
    layers: int = 1
    inputs_of: tuple[int, ...] | None = (2, 4, 5)  # the features are what goes INTO these layers; None: the config is silent
    target_hidden: int = HIDDEN
    draft_vocab: int = DRAFT_VOCAB
    head_dim: int = 8
    attention_bias: bool = False
    mlp_bias: bool = False
    theta: float | None = THETA
    scaling: dict[str, Any] | None = None
    window: int = 2048
    sliding: tuple[bool, ...] = ()  # of each layer; empty: none, and the config does not list the layers
    extra: tuple[tuple[str, Any], ...] = ()  # further keys of config.json
    embedding: Literal["absent", "copy", "own"] = "absent"  # `copy`: equal to the target's
    head: bool = True  # lm_head is in the checkpoint
    mapping: Literal["both", "d2t", "identity", "none"] = "both"  # d2t and t2d, d2t alone, both for all tokens, neither
    file: Literal["model.safetensors", "pytorch_model.bin"] = "model.safetensors"
    mask: int | None = None  # the token of P-EAGLE's masks

    @property
    def features(self) -> int:
        """Count the features that are concatenated for `fc`."""
        return len(self.inputs_of or (2, 4, 5))


def _speculators(**fields: Any) -> Case:
    # What the trainer writes unless told otherwise: a sliding window of 2048, and the target's embedding.
    return Case(**{"sliding": (True,), "embedding": "copy", **fields})


def _combinations() -> dict[str, Case]:
    """Return every combination of the flags: norm_before_fc and fc_norm together are refused by speculators' config."""
    cases = {}
    for residual in (False, True):
        for before in ("", "-before-fc", "-fc-norm"):
            for output in (False, True):
                name = "speculators" + "-residual" * residual + before + "-output" * output
                cases[name] = _speculators(
                    norm_before_residual=residual,
                    norm_before_fc=before == "-before-fc",
                    fc_norm=before == "-fc-norm",
                    norm_output=output,
                )
    return cases


# Of speculators' trainer.
DEFAULTS: dict[str, Any] = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
CASES: dict[str, Case] = {
    **_combinations(),
    "speculators-qwen3": _speculators(layer="qwen3", sliding=(False,)),
    "speculators-qwen3-residual-before-fc-output": _speculators(layer="qwen3", **DEFAULTS),
    "speculators-qwen3-wide-heads": _speculators(layer="qwen3", head_dim=16, **DEFAULTS),
    "speculators-two-layers": _speculators(layers=2, sliding=(True, True), **DEFAULTS),
    "speculators-two-layers-mixed": _speculators(layers=2, sliding=(False, True), window=WINDOW, **DEFAULTS),
    "speculators-two-features": _speculators(inputs_of=(2, 5), **DEFAULTS),
    # 8 is what the last layer puts out.
    "speculators-four-features": _speculators(inputs_of=(1, 3, 5, 8), fc_norm=True, norm_output=True),
    "speculators-window": _speculators(window=WINDOW, **DEFAULTS),
    "speculators-window-unused": _speculators(window=WINDOW, sliding=(False,), **DEFAULTS),
    "speculators-full-vocabulary": _speculators(draft_vocab=VOCAB, mapping="none", **DEFAULTS),
    "speculators-own-embedding": _speculators(embedding="own", **DEFAULTS),
    "speculators-no-head": _speculators(head=False, **DEFAULTS),
    "speculators-no-head-full-vocabulary": _speculators(head=False, draft_vocab=VOCAB, mapping="none", **DEFAULTS),
    "speculators-bias": _speculators(attention_bias=True, mlp_bias=True, **DEFAULTS),
    "speculators-converted": Case("speculators-converter", inputs_of=None),
    # A target of another width cannot lend its embedding.
    "speculators-converted-target-hidden": Case("speculators-converter", inputs_of=None, target_hidden=48, embedding="own"),
    "speculators-0.1": Case("speculators-0.1", inputs_of=None, norm_before_residual=True, scaling=LLAMA3),
    "speculators-0.1-no-theta": Case("speculators-0.1", inputs_of=None, norm_before_residual=True, theta=None),
    "safeailab": Case("safeailab", inputs_of=None, theta=None, file="pytorch_model.bin"),
    "safeailab-theta": Case("safeailab", inputs_of=None),
    "safeailab-target-hidden": Case("safeailab", inputs_of=None, theta=None, target_hidden=48, embedding="own"),
    "safeailab-full-vocabulary": Case("safeailab", inputs_of=None, theta=None, draft_vocab=VOCAB, mapping="none"),
    "specforge": Case("specforge-4", inputs_of=None, theta=None),
    # As configs/gemma3-1b-eagle3.json: a window that nothing uses.
    "specforge-theta": Case("specforge-4", extra=(("sliding_window", WINDOW), ("use_sliding_window", False))),
    "specforge-5": Case("specforge-5", inputs_of=None),
    "specforge-full-vocabulary": Case("specforge-5", inputs_of=None, draft_vocab=VOCAB, mapping="identity", embedding="copy"),
    "specforge-3.1": Case("specforge-5", fc_norm=True, norm_output=True, extra=(("fc_norm", True), ("norm_output", True))),
    "specforge-fc-norm": Case("specforge-4", fc_norm=True, extra=(("fc_norm", True),)),
    "specforge-norm-output-false": Case("specforge-5", inputs_of=None, extra=(("norm_output", False),)),
    "modelopt": Case("modelopt", theta=10_000.0, scaling=YARN, mapping="d2t"),
    "modelopt-default-rope": Case("modelopt", mapping="d2t"),
    "modelopt-two-layers": Case("modelopt", layers=2, inputs_of=(2, 4, 5, 6), mapping="d2t"),
    "modelopt-full-vocabulary": Case("modelopt", draft_vocab=VOCAB, mapping="none"),
    "modelopt-midlayer": Case("modelopt-midlayer", scaling=LLAMA3, mapping="d2t"),
}
# P-EAGLE, whose heads draft several tokens in one pass.
PARALLEL = {
    "parallel": _speculators(mask=95, embedding="own"),
    "parallel-two-layers": _speculators(mask=95, embedding="own", layers=2, sliding=(False, True), window=WINDOW, **DEFAULTS),
    "parallel-fc-norm": _speculators(mask=90, embedding="copy", fc_norm=True, norm_before_residual=True, layer="qwen3"),
}
ALL = CASES | PARALLEL
# Of the cases in which, with seed 0, two tokens are about as likely.
SEEDS = {"speculators-fc-norm": 1, "speculators-two-layers": 1, "speculators-converted-target-hidden": 1}
# What some trainers computed, though no server does and the checkpoint does not tell: no reader may agree with these.
OTHER_READINGS: dict[str, str] = {
    "modelopt-default-rope/normed-twice": "modelopt-default-rope",
    "specforge-3.1/before-879": "specforge-3.1",
    "specforge-norm-output-false/before-879": "specforge-norm-output-false",
}


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
