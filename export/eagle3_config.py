"""The configuration of an EAGLE-3 head, in any of the formats that `outrider.export.eagle3` names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from transformers import PreTrainedConfig, Qwen3Config

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoint import LENGTH_DEPENDENT_ROPE
from outrider.export.source import EAGLE3

THETA = 10_000.0  # of a rotary embedding whose configuration has none
IDS = "eagle_aux_hidden_state_layer_ids"
AGAIN = "download the checkpoint again"

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=1)]
LayerId = Annotated[int, msgspec.Meta(ge=-1)]


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """The decoder layers of a head."""

    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    vocab_size: Count
    model_type: str = "llama"
    num_hidden_layers: Count = 1
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: Count | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    tie_word_embeddings: bool | None = None

    def windows(self) -> list[str]:
        """Return which attention each layer has. Without a list, only a Qwen3 has windows, as in transformers."""
        if self.layer_types is not None:
            return self.layer_types
        full = self.num_hidden_layers
        if self.model_type == "qwen3" and self.use_sliding_window and self.sliding_window is not None:
            full = 28 if self.max_window_layers is None else self.max_window_layers
        return ["sliding_attention" if index >= full else "full_attention" for index in range(self.num_hidden_layers)]


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """Norms of a head that not every head has."""

    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None


class _Head(Flags, frozen=True, kw_only=True):
    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    eagle_config: dict[str, Any] | None = None  # of ModelOpt
    # Of speculators:
    transformer_layer_config: dict[str, Any] | None = None
    eagle_aux_hidden_state_layer_ids: list[LayerId] | None = None
    speculators_model_type: str | None = None
    tie_word_embeddings: bool | None = None


class _EagleConfig(msgspec.Struct, frozen=True):
    """ModelOpt's `eagle_config`."""

    eagle_aux_hidden_state_layer_ids: list[LayerId] | None = None


# These say how the head was trained, by what, or how long its texts may be; or they repeat others.
WITHOUT_EFFECT = {
    *("auto_map", "dtype", "torch_dtype", "attention_dropout", "initializer_range", "pretraining_tp", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
    *("speculators_config", "speculators_version", "embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init"),
}
# The values that ModelOpt's `eagle_config` must have, as EAGLE-3 has them; None is any value.
EAGLE_CONFIG: dict[str, Any] = {
    IDS: None,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


class HeadConfig(msgspec.Struct, frozen=True):
    """What a head's configuration says, however it says it."""

    layers: Layers
    flags: Flags
    target_hidden_size: int
    draft_vocab: int
    ids: list[int] | None  # the features are what enters these layers of the target; None leaves it to the default
    tied: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any], name: str) -> HeadConfig:
        """Read a `config.json`.

        Raises:
            SourceError: a value is missing or impossible.
            UnsupportedModelError: it has a key or a value that is not known here.
        """
        of_speculators = "transformer_layer_config" in config
        known = {*_Head.__struct_fields__} if of_speculators else {*_Head.__struct_fields__, *Layers.__struct_fields__} - {IDS}
        _refuse_unknown(config, known, name)
        head = _convert(config, _Head, name)
        inner = (head.transformer_layer_config or {}) if of_speculators else config
        if of_speculators:
            _refuse_unknown(inner, {*Layers.__struct_fields__}, name)
        layers = _convert({key: value for key, value in inner.items() if value is not None}, Layers, name)
        eagle = head.eagle_config or {}
        for key, value in eagle.items():
            if key not in EAGLE_CONFIG or (EAGLE_CONFIG[key] is not None and value not in (EAGLE_CONFIG[key], None)):
                raise not_known(name, f"eagle_config.{key} = {value!r}")
        if head.speculators_model_type not in (None, EAGLE3):
            raise not_known(name, f"speculators_model_type = {head.speculators_model_type!r}")
        if layers.model_type not in ("llama", "qwen3"):
            raise not_known(name, f"layers of the type {layers.model_type!r}")
        if layers.rope_parameters and layers.rope_scaling and layers.rope_parameters != layers.rope_scaling:
            raise not_known(name, "both rope_parameters and rope_scaling")
        for key in {*(layers.rope_parameters or ()), *(layers.rope_scaling or ())} - ROPE_KEYS:
            raise not_known(name, f"the key {key} of a rotary embedding")
        if head.fc_norm and head.norm_before_fc:
            raise SourceError(
                f"the configuration of {name} has both fc_norm and norm_before_fc", "the features have one kind of norm"
            )
        ids = head.eagle_aux_hidden_state_layer_ids
        if not of_speculators:
            ids = [each + 1 for each in _convert(eagle, _EagleConfig, name).eagle_aux_hidden_state_layer_ids or ()]
        return cls(
            layers,
            head,
            head.target_hidden_size or layers.hidden_size,
            head.draft_vocab_size or layers.vocab_size,
            sorted(ids) if ids else None,
            bool(head.tie_word_embeddings or layers.tie_word_embeddings),
        )

    def decoder(self, name: str) -> Qwen3Config:
        """Return the configuration of a Qwen3 with these layers.

        Raises:
            UnsupportedModelError: its rotary embedding depends on the length of the text.
        """
        layers, heads = self.layers, self.layers.num_attention_heads
        rope = layers.rope_parameters or layers.rope_scaling or {}
        rope = {**rope, "rope_theta": layers.rope_theta or rope.get("rope_theta") or THETA}
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if kind in LENGTH_DEPENDENT_ROPE:
            raise not_known(name, f"a rotary embedding scaled by the length of the text ({kind})")
        types = layers.windows()
        return Qwen3Config(
            hidden_size=layers.hidden_size,
            intermediate_size=layers.intermediate_size,
            num_attention_heads=heads,
            vocab_size=layers.vocab_size,
            num_hidden_layers=layers.num_hidden_layers,
            num_key_value_heads=layers.num_key_value_heads or heads,
            head_dim=layers.head_dim or layers.hidden_size // heads,
            rms_norm_eps=layers.rms_norm_eps,
            hidden_act=layers.hidden_act,
            max_position_embeddings=layers.max_position_embeddings or 2048,
            attention_bias=bool(layers.attention_bias),
            rope_parameters=rope,
            layer_types=types,
            sliding_window=layers.sliding_window,
            use_sliding_window="sliding_attention" in types,
            max_window_layers=0,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )


def not_known(name: str, what: str) -> UnsupportedModelError:
    """Return the error for what a head has and this package does not know."""
    return UnsupportedModelError(
        f"{name} has {what}, which outrider does not know in an EAGLE-3 head",
        "to ignore it would cost acceptance; report it, with the name of the checkpoint",
    )


def _convert(value: Mapping[str, Any], kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise SourceError(f"the configuration of {name} is not that of an EAGLE-3 head: {error}", AGAIN) from error


def _refuse_unknown(config: Mapping[str, Any], known: set[str], name: str) -> None:
    generic = PreTrainedConfig().to_dict()
    for key, value in config.items():
        if key not in known and key not in WITHOUT_EFFECT and key not in generic and value is not None:
            raise not_known(name, f"{key} = {json.dumps(value)[:80]}")
