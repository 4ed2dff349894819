"""The heads behind `fixtures.npz`: what their configs say, and which tensors their checkpoints have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
