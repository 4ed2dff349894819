"""Make the checkpoints behind `fixtures.npz` from seeds, so that the repository stores results and no weights.

`checkpoint` gives a block head's config.json and tensors as its trainer writes them, `target` what a head takes from its
target, `inputs` what the fixtures were computed from. `make_fixtures.py` has computed them and says what is in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import numpy as np

VOCAB, DRAFT_VOCAB, MASK = 96, 40, 95
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 4, 2, 8, 48
TARGET_LAYERS = 8  # of the target that the ids of the layers mean
ROWS = 16  # of text
ANCHORS = (1, 2, 5, 9, 10)  # positions of the last confirmed tokens of the rounds
EPSILON, THETA = 1e-2, 500_000.0  # so large that a reader who ignores them is caught
RANK = 6  # of a Markov head

Format = Literal["z-lab", "z-lab-nested", "deepspec", "speculators"]


@dataclass(frozen=True)
class Case:
    """Describe a block head: what its config says, and which tensors its checkpoint has."""

    format: Format = "z-lab"
    layers: int = 2
    block: int = 5
    inputs_of: tuple[int, ...] | None = (2, 4, 6)  # the features are what goes INTO these layers; None: the config is silent
    draft_vocab: int = VOCAB
    windows: tuple[bool, ...] = ()  # of each layer
    window: int = 3
    sees_ahead: bool = False  # windows are not causal
    from_anchor: bool = False
    markov: Literal["", "vanilla", "gated", "rnn"] = ""
    confidence: Literal["", "alone", "with markov"] = ""

    @property
    def features(self) -> list[int]:
        """The layers whose inputs are the features."""
        return list(self.inputs_of or (2, 6))  # by z-lab's rule for two layers over eight

    @property
    def is_dspark(self) -> bool:
        """Whether it has more heads than one."""
        return bool(self.markov or self.confidence)

    @property
    def drafted(self) -> int:
        """The tokens that a block of its training drafts."""
        return self.block - (not self.from_anchor)


CASES = {
    "z-lab": Case(),
    "z-lab-nested": Case("z-lab-nested", block=4),
    "z-lab-default-layers": Case(inputs_of=None),
    "z-lab-one-layer": Case(layers=1, inputs_of=(5,), block=3),
    "deepspec": Case("deepspec", from_anchor=True, inputs_of=(0, 3, 7)),
    "speculators": Case("speculators", draft_vocab=DRAFT_VOCAB),
    "speculators-whole-vocabulary": Case("speculators", inputs_of=(1, 4, 7)),
    "speculators-windows": Case("speculators", windows=(True, False), draft_vocab=DRAFT_VOCAB),
    "speculators-windows-that-see-ahead": Case("speculators", windows=(False, True), sees_ahead=True),
    "speculators-from-anchor": Case("speculators", from_anchor=True),
    "dspark": Case("speculators", from_anchor=True, markov="vanilla", confidence="with markov", draft_vocab=DRAFT_VOCAB),
    "dspark-gated": Case("speculators", from_anchor=True, markov="gated", confidence="alone"),
    "dspark-from-masks": Case("speculators", markov="gated", confidence="with markov"),
    "dspark-confidence": Case("speculators", from_anchor=True, confidence="alone"),
    "dspark-markov": Case("speculators", from_anchor=True, markov="vanilla"),
    "deepspec-dspark": Case("deepspec", from_anchor=True, markov="vanilla", confidence="with markov"),
}


def checkpoint(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return config.json and the tensors of a case, float32."""
    return config(CASES[name]), _tensors(name)


def target(name: str) -> dict[str, np.ndarray]:
    """Return the target's embedding and output head."""
    return {
        "model.embed_tokens.weight": _uniform(name, "target.embed", (VOCAB, HIDDEN)) * np.float32(3**0.5),
        "lm_head.weight": _matrix(name, "target.head", (VOCAB, HIDDEN)),
    }


def target_ids(name: str) -> np.ndarray:
    """Return the target's token for each draft token, ascending."""
    order = np.argsort(_drawn(name, "d2t", (VOCAB,)))
    return np.sort(order[: CASES[name].draft_vocab]).astype(np.int64)


def inputs(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the target's hidden states side by side, [ROWS, features x HIDDEN], and the text, int64 [ROWS]."""
    hidden = _uniform(name, "hidden", (ROWS, len(CASES[name].features) * HIDDEN)) * 2
    return hidden, (_drawn(name, "tokens", (ROWS,)) * MASK).astype(np.int64)


def _drawn(name: str, what: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([crc32(name.encode()), crc32(what.encode())]).random(shape)


def _uniform(name: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    return (_drawn(name, tensor, shape) * 2 - 1).astype(np.float32)


def _matrix(name: str, tensor: str, shape: tuple[int, int]) -> np.ndarray:
    return _uniform(name, tensor, shape) * np.float32((3 / shape[1]) ** 0.5)


def _tensors(name: str) -> dict[str, np.ndarray]:
    case = CASES[name]
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {"fc": (HIDDEN, len(case.features) * HIDDEN)}
    norms, biases = {"norm": HIDDEN, "hidden_norm": HIDDEN}, dict[str, int]()
    for layer in range(case.layers):
        prefix = f"layers.{layer}"
        attention = {
            "q_proj": (queries, HIDDEN),
            "k_proj": (keys, HIDDEN),
            "v_proj": (keys, HIDDEN),
            "o_proj": (HIDDEN, queries),
        }
        mlp = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
        matrices |= {f"{prefix}.self_attn.{key}": shape for key, shape in attention.items()}
        matrices |= {f"{prefix}.mlp.{key}": shape for key, shape in mlp.items()}
        norms |= {f"{prefix}.{key}": HIDDEN for key in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{prefix}.self_attn.{key}": HEAD_DIM for key in ("q_norm", "k_norm")}
    if case.markov:
        matrices |= {"markov_head.markov_w1": (VOCAB, RANK), "markov_head.markov_w2": (case.draft_vocab, RANK)}
    if case.markov == "gated":
        matrices["markov_head.gate_proj"], biases["markov_head.gate_proj"] = (RANK, HIDDEN + RANK), RANK
    if case.confidence:
        wide = HIDDEN + RANK * (case.confidence == "with markov")
        matrices["confidence_head.proj"], biases["confidence_head.proj"] = (1, wide), 1
    if case.format == "speculators":
        matrices["lm_head"] = (case.draft_vocab, HIDDEN)
    tensors = {f"{key}.weight": _matrix(name, key, shape) for key, shape in matrices.items()}
    tensors |= {f"{key}.weight": 1 + _uniform(name, key, (size,)) / 2 for key, size in norms.items()}
    tensors |= {f"{key}.bias": _uniform(name, f"{key}.bias", (size,)) / 2 for key, size in biases.items()}
    if case.format in ("speculators", "deepspec"):  # z-lab's have the target's
        tensors["embed_tokens.weight"] = target(name)["model.embed_tokens.weight"]
    if case.format == "deepspec":
        tensors["lm_head.weight"] = target(name)["lm_head.weight"]
    if case.format == "speculators" and case.draft_vocab < VOCAB:
        ids = target_ids(name)
        tensors |= {"d2t": ids - np.arange(case.draft_vocab), "t2d": np.isin(np.arange(VOCAB), ids)}
    return tensors


def config(case: Case) -> dict[str, Any]:
    decoder: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 64,
        "max_window_layers": case.layers,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": case.layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPSILON,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    types = ["sliding_attention" if slides else "full_attention" for slides in case.windows or [False] * case.layers]
    outputs = [layer - 1 for layer in case.features]  # the same places, as z-lab and DeepSpec count them
    heads = {
        "markov_rank": RANK if case.markov else 0,
        "enable_confidence_head": bool(case.confidence),
        **({"markov_head_type": case.markov} if case.markov else {}),
        **({"confidence_head_with_markov": case.confidence == "with markov"} if case.confidence else {}),
    }
    if case.format == "speculators":
        decoder |= {"layer_types": types, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
        if any(case.windows):
            decoder |= {"use_sliding_window": True, "sliding_window": case.window}
        kind = "dspark" if case.is_dspark else "dflash"
        greedy = {
            "accept_tolerance": 0.0,
            "proposal_type": "greedy",
            "speculative_tokens": case.drafted,
            "verifier_accept_k": 1,
        }
        return {
            "architectures": ["DSparkDraftModel" if case.is_dspark else "DFlashDraftModel"],
            "aux_hidden_state_layer_ids": case.features,
            "block_size": case.block,
            "draft_vocab_size": case.draft_vocab,
            "dtype": "float32",
            "mask_token_id": MASK,
            "sample_from_anchor": case.from_anchor,
            "sliding_window_non_causal": case.sees_ahead,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [greedy],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
            },
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": decoder,
            "transformers_version": "5.19.0",
            **(heads if case.is_dspark else {}),
        }
    decoder |= {"dtype": "float32", "layer_types": types, "num_target_layers": TARGET_LAYERS, "transformers_version": "4.57.1"}
    decoder |= {"rope_theta": THETA, "rope_scaling": None}
    if case.format == "deepspec":
        own = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "target_layer_ids": outputs}
        return {**decoder, **own, "block_size": case.block, "mask_token_id": MASK, **heads}
    dflash: dict[str, Any] = {"mask_token_id": MASK}
    if case.inputs_of is not None:
        dflash["target_layer_ids"] = outputs
    if case.format == "z-lab-nested":
        dflash["block_size"] = case.block
    else:
        decoder["block_size"] = case.block
    auto = {"AutoModel": "dflash.DFlashDraftModel"}
    return {**decoder, "architectures": ["DFlashDraftModel"], "auto_map": auto, "dflash_config": dflash}
