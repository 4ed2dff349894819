"""The decoder layers of a draft head, as a configuration describes them, and how unknown keys are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from transformers import PreTrainedConfig, Qwen3Config

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import LENGTH_DEPENDENT_ROPE
from outrider.export.checkpoints.source import AGAIN

THETA = 10_000.0  # of a rotary embedding whose configuration has none

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=1)]
LayerId = Annotated[int, msgspec.Meta(ge=-1)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]


# These say how the head was trained, by what, or how long its texts may be; or they repeat others.
WITHOUT_EFFECT = {
    *("auto_map", "dtype", "torch_dtype", "attention_dropout", "initializer_range", "pretraining_tp", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
    *("speculators_config", "speculators_version", "embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init"),
}
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


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

    def decoder(self, name: str) -> Qwen3Config:
        """Return the configuration of a Qwen3 with these layers, for the head of this name.

        Raises:
            UnsupportedModelError: its rotary embedding depends on the length of the text.
        """
        heads = self.num_attention_heads
        rope = self.rope_parameters or self.rope_scaling or {}
        rope = {**rope, "rope_theta": self.rope_theta or rope.get("rope_theta") or THETA}
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if kind in LENGTH_DEPENDENT_ROPE:
            raise not_known(name, f"a rotary embedding scaled by the length of the text ({kind})")
        types = self.windows()
        return Qwen3Config(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=heads,
            vocab_size=self.vocab_size,
            num_hidden_layers=self.num_hidden_layers,
            num_key_value_heads=self.num_key_value_heads or heads,
            head_dim=self.head_dim or self.hidden_size // heads,
            rms_norm_eps=self.rms_norm_eps,
            hidden_act=self.hidden_act,
            max_position_embeddings=self.max_position_embeddings or 2048,
            attention_bias=bool(self.attention_bias),
            rope_parameters=rope,
            layer_types=types,
            sliding_window=self.sliding_window,
            use_sliding_window="sliding_attention" in types,
            max_window_layers=0,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )


def not_known(name: str, what: str) -> UnsupportedModelError:
    """Return the error for what a head has and this package does not know."""
    return UnsupportedModelError(
        f"{name} has {what}, which outrider does not know in a draft head",
        "to ignore it would cost acceptance; report it, with the name of the checkpoint",
    )


def convert(value: Mapping[str, Any], kind: type[T], name: str) -> T:
    """Return the value of a configuration as a struct.

    Raises:
        SourceError: a field is missing or impossible.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise SourceError(f"the configuration of {name} is not that of a draft head: {error}", AGAIN) from error


def refuse_unknown(config: Mapping[str, Any], known: set[str], name: str) -> None:
    """Refuse a configuration with a key that is neither in `known` nor without effect on what a head computes.

    Raises:
        UnsupportedModelError: it has one.
    """
    generic = PreTrainedConfig().to_dict()
    for key, value in config.items():
        if key not in known and key not in WITHOUT_EFFECT and key not in generic and value is not None:
            raise not_known(name, f"{key} = {json.dumps(value)[:80]}")


def read_layers(config: Mapping[str, Any], own: Mapping[str, Any] | None, name: str, **changes: Any) -> Layers:
    """Read the decoder layers of a head.

    Args:
        config: its `config.json`.
        own: what that has for the layers alone, as speculators' have; None if their keys are among the others.
        name: of the checkpoint, for messages.
        changes: values to take instead of what it says.

    Raises:
        SourceError: a value is missing or impossible.
        UnsupportedModelError: they are neither Llama's nor Qwen3's, or there is an unknown key, or a rotary embedding with two
            configurations.
    """
    if own is not None:
        refuse_unknown(own, {*Layers.__struct_fields__}, name)
    found = {key: value for key, value in (config if own is None else own).items() if value is not None}
    layers = convert(found | changes, Layers, name)
    if layers.model_type not in ("llama", "qwen3"):
        raise not_known(name, f"layers of the type {layers.model_type!r}")
    if layers.rope_parameters and layers.rope_scaling and layers.rope_parameters != layers.rope_scaling:
        raise not_known(name, "both rope_parameters and rope_scaling")
    for key in {*(layers.rope_parameters or ()), *(layers.rope_scaling or ())} - ROPE_KEYS:
        raise not_known(name, f"the key {key} of a rotary embedding")
    return layers
