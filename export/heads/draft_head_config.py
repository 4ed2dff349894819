"""Read what the configurations of all kinds of draft heads have in common, and refuse unknown keys."""

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

WINDOW = "sliding_attention"  # the type of a layer
Count = Annotated[int, msgspec.Meta(ge=1)]
LayerId = Annotated[int, msgspec.Meta(ge=-1)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]


# These keys describe the training, limit the length of a text, or repeat other keys.
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
    """The decoder layers of a draft head."""

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
        """Return each layer's type of attention. Without a list, only Qwen3 has windows, as in transformers."""
        if self.layer_types is not None:
            return self.layer_types
        full = self.num_hidden_layers
        if self.model_type == "qwen3" and self.use_sliding_window and self.sliding_window is not None:
            full = 28 if self.max_window_layers is None else self.max_window_layers
        return [WINDOW if index >= full else "full_attention" for index in range(self.num_hidden_layers)]

    def decoder(self, name: str) -> Qwen3Config:
        """Return the configuration of a Qwen3 model with these layers; messages call the head `name`.

        Raises:
            UnsupportedModelError: the rotary embedding depends on the length of the text.
        """
        heads = self.num_attention_heads
        rope = self.rope_parameters or self.rope_scaling or {}
        rope = {**rope, "rope_theta": self.rope_theta or rope.get("rope_theta") or THETA}
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if kind in LENGTH_DEPENDENT_ROPE:
            raise unknown(name, f"a rotary embedding scaled by the length of the text ({kind})")
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
            use_sliding_window=WINDOW in types,
            max_window_layers=0,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )


class HeadFields(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a head's `config.json` that do not depend on its kind, without the keys of its layers."""

    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    tie_word_embeddings: bool | None = None
    mask_token_id: TokenId | None = None
    # Only in the format of speculators:
    transformer_layer_config: dict[str, Any] | None = None
    speculators_model_type: str | None = None


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a draft head, independent of its format."""

    layers: Layers
    target_hidden_size: int  # of the target that the head was made for
    draft_vocab: int  # the number of tokens that the head can propose
    ids: list[int]  # the features are the inputs of these layers of the target; the default layers if empty
    tied: bool = False  # whether the output head is the embedding
    mask_token: int | None = None  # stands for unknown tokens in a head that drafts several tokens in one pass


F = TypeVar("F", bound=HeadFields)
T = TypeVar("T")


def unknown(name: str, what: str) -> UnsupportedModelError:
    """Return the error for a part of a head that this package does not know."""
    return UnsupportedModelError(
        f"{name} has {what}, which outrider does not know in a draft head",
        "ignoring it would lower acceptance; report it, with the name of the checkpoint",
    )


def refuse_unknown(config: Mapping[str, Any], known: set[str], name: str) -> None:
    """Refuse a key that is neither in `known` nor without effect on what a head computes.

    Raises:
        UnsupportedModelError: the configuration has such a key.
    """
    generic = PreTrainedConfig().to_dict()
    for key, value in config.items():
        if key not in known and key not in WITHOUT_EFFECT and key not in generic and value is not None:
            raise unknown(name, f"{key} = {json.dumps(value)[:80]}")


def _convert(value: Mapping[str, Any], kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise SourceError(f"the configuration of {name} does not fit a draft head: {error}", AGAIN) from error


def read_fields(config: Mapping[str, Any], kind: type[F], name: str, model_type: str | None = None) -> tuple[F, Layers]:
    """Read a head's `config.json`.

    Args:
        config: the contents of the file.
        kind: the keys of this kind of head.
        name: the checkpoint's name, for messages.
        model_type: overrides the type of the layers in speculators' format, unless it is None.

    Raises:
        SourceError: a value is missing or impossible.
        UnsupportedModelError: a key is unknown, the layers are neither Llama's nor Qwen3's, or the rotary embedding has two
            configurations.
    """
    fields = _convert(config, kind, name)
    known, own = {*kind.__struct_fields__}, {*Layers.__struct_fields__}
    described: Mapping[str, Any] = config
    if fields.transformer_layer_config is None:
        refuse_unknown(config, known | own, name)
    else:
        refuse_unknown(config, known, name)
        described = fields.transformer_layer_config
        refuse_unknown(described, own, name)
        described = described if model_type is None else {**described, "model_type": model_type}
    layers = _convert({key: value for key, value in described.items() if value is not None}, Layers, name)
    if layers.model_type not in ("llama", "qwen3"):
        raise unknown(name, f"layers of the type {layers.model_type!r}")
    if layers.rope_parameters and layers.rope_scaling and layers.rope_parameters != layers.rope_scaling:
        raise unknown(name, "both rope_parameters and rope_scaling")
    for key in {*(layers.rope_parameters or ()), *(layers.rope_scaling or ())} - ROPE_KEYS:
        raise unknown(name, f"the key {key} of a rotary embedding")
    return fields, layers
