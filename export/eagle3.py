"""EAGLE-3 draft heads: read a checkpoint in any of its formats, and build the head from the layers of transformers.

A head takes h = fc(features), where the features of a position are what enters some layers of the target, side by side, and the
embedding e of the next token. With every norm an RMSNorm:

    x = [input_layernorm(e), hidden_norm(h)]        r = h, or hidden_norm(h) with `norm_before_residual`
    h' = r + attention(x)                           h'' = h' + mlp(post_attention_layernorm(h'))
    logits = lm_head(norm(h''))                     the next draft step takes h'', or norm(h'') with `norm_output`, for its h

Further layers are ordinary ones. `norm_before_fc` is a norm over all features before fc, `fc_norm` one for each of them. What
takes part in fc belongs to the target's graph, where it is computed once for each token.

The formats are those of SafeAILab (Li et al. 2025, EAGLE-3), SpecForge, ModelOpt, and speculators. They differ in the names of
layer 0 and in how they count the layers that the features come from: speculators names the layer whose input it is, SpecForge
and ModelOpt the one whose output it is. What a format has and this module does not know is refused: to ignore it would cost
acceptance, silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoint import LENGTH_DEPENDENT_ROPE
from outrider.export.short_head import ShortHead
from outrider.export.source import Source

THETA = 10_000.0  # of a rotary embedding whose configuration has none
FILES = ("model.safetensors", "pytorch_model.bin")
MIDLAYER, LAYERS = "midlayer.", "layers.0."
IDS = "eagle_aux_hidden_state_layer_ids"

SHAPES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")  # without a default
OPTIONAL = ("num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_KEYS = {
    *SHAPES,
    *OPTIONAL,
    *("attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters"),
    *("model_type", "layer_types", "sliding_window", "tie_word_embeddings"),
}
HEAD_KEYS = {*FLAGS, "draft_vocab_size", "target_hidden_size"}
SPECULATORS_KEYS = {IDS, "speculators_model_type", "transformer_layer_config", "tie_word_embeddings"}
# These say how the head was trained, by what, or how long its texts may be; or they repeat others.
WITHOUT_EFFECT = {
    *("auto_map", "dtype", "torch_dtype", "attention_dropout", "initializer_range", "pretraining_tp", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "use_sliding_window", "transformers_version"),
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
NOT_OURS = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")  # of training; t2d repeats d2t


@dataclass(frozen=True, slots=True)
class Target:
    """What a head takes from its target, and must fit."""

    name: str
    layers: int
    hidden_size: int
    vocab_rows: int
    embedding: torch.Tensor  # [V, Ht]
    output_head: torch.Tensor  # [V, Ht]


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """The configuration and the tensors of a head, by the names of speculators."""

    name: str
    layer: Mapping[str, Any]  # the configuration of its decoder layers
    flags: Mapping[str, bool]
    hidden_size: int
    target_hidden_size: int
    draft_vocab: int
    ids: list[int] | None  # the features are what enters these layers of the target; None leaves it to the default
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, source: Source) -> Eagle3Checkpoint:
        """Read a checkpoint.

        Raises:
            SourceError: it cannot be read, or a tensor is missing.
            UnsupportedModelError: it has a key or a tensor that is not known here.
        """
        config = source.config()
        tensors = _renamed(_load(source))
        speculators = "transformer_layer_config" in config
        layer = config["transformer_layer_config"] if speculators else config
        eagle = config.get("eagle_config") or {}
        known = HEAD_KEYS | (SPECULATORS_KEYS if speculators else LAYER_KEYS | {"eagle_config"})
        _refuse_unknown(config, known, source.name)
        if speculators:
            _refuse_unknown(layer, LAYER_KEYS, source.name)
        for key, value in eagle.items():
            if key not in EAGLE_CONFIG or (EAGLE_CONFIG[key] is not None and value not in (EAGLE_CONFIG[key], None)):
                raise _unknown(source.name, f"eagle_config.{key} = {value!r}")
        missing = [key for key in SHAPES if not isinstance(layer.get(key), int)]
        if missing:
            raise SourceError(f"the configuration of {source.name} has no {missing[0]}", "download the checkpoint again")
        kind = layer.get("model_type", "llama")
        if kind not in ("llama", "qwen3"):
            raise _unknown(source.name, f"layers of the type {kind!r}")
        if layer.get("num_hidden_layers", 1) < 1:
            raise SourceError(f"the configuration of {source.name} has no decoder layers", "a head has one or more")
        if config.get("fc_norm") and config.get("norm_before_fc"):
            raise SourceError(
                f"the configuration of {source.name} has both fc_norm and norm_before_fc", "the features have one kind of norm"
            )
        if "fc.weight" not in tensors:
            raise SourceError(f"{source.name} has no tensor fc.weight", "download the checkpoint again")
        ids = config.get(IDS) if speculators else [each + 1 for each in eagle.get(IDS) or ()]
        hidden = layer["hidden_size"]
        return cls(
            source.name,
            layer,
            {flag: bool(config.get(flag)) for flag in FLAGS},
            hidden,
            config.get("target_hidden_size") or hidden,
            config.get("draft_vocab_size") or layer["vocab_size"],
            sorted(ids) if ids else None,
            tensors,
        )

    def features_of(self, target: Target) -> list[int]:
        """Return the layers of the target whose inputs are the features, ascending; the number of layers is its output.

        Raises:
            UnsupportedModelError: the head was made for another target.
        """
        layers = target.layers
        ids = self.ids or sorted([2, layers // 2, layers - 3])
        differs = {
            "hidden size": (self.target_hidden_size, target.hidden_size),
            "vocabulary": (self.layer["vocab_size"], target.vocab_rows),
            "inputs of fc": (self.tensors["fc.weight"].shape[1], len(ids) * target.hidden_size),
        }
        for what, (own, other) in differs.items():
            if own != other:
                raise self._other_target(target, f"its {what} is {own:,}, and the target's {other:,}")
        if not all(0 <= each <= layers for each in ids):
            raise self._other_target(target, f"it reads what enters layers {ids}, and the target has {layers}")
        return ids

    def _other_target(self, target: Target, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name} is a head for another target than {target.name}: {why}", OTHER_HEAD)

    def tokens(self, target: Target) -> torch.Tensor:
        """Return the target's ids of the tokens that the head proposes, int64 [Vd], ascending.

        Raises:
            SourceError: `d2t` has not one entry for each of them, leads to tokens that the target lacks, or is missing.
        """
        if "d2t" not in self.tensors and self.draft_vocab != target.vocab_rows:
            raise SourceError(
                f"{self.name} proposes {self.draft_vocab:,} of {target.vocab_rows:,} tokens, and has no tensor d2t that names them",
                "download the checkpoint again",
            )
        offsets = self.tensors.get("d2t", torch.zeros(self.draft_vocab, dtype=torch.int64))
        ids = torch.arange(len(offsets)) + offsets.long()
        if len(ids) != self.draft_vocab or (ids.diff() <= 0).any() or not 0 <= int(ids[0]) <= int(ids[-1]) < target.vocab_rows:
            raise SourceError(
                f"d2t of {self.name} is not a list of {self.draft_vocab:,} tokens in ascending order below"
                f" {target.vocab_rows:,}",
                "download the checkpoint again",
            )
        return ids

    def build(self, target: Target) -> tuple[FeatureMixer, Eagle3Head]:
        """Return what the target's graph computes, and the head, in fp32.

        Raises:
            SourceError: a tensor is missing or has another shape.
            UnsupportedModelError: a tensor is not known here, or the head was made for another target.
        """
        ids = self.features_of(target)
        tensors, tokens = dict(self.tensors), self.tokens(target)
        for name in NOT_OURS:
            tensors.pop(name, None)
        tensors.pop("d2t", None)
        own = self.target_hidden_size == self.hidden_size
        for name, rows in (("embed_tokens.weight", target.embedding), ("lm_head.weight", target.output_head[tokens])):
            if name not in tensors:
                if not own or (name == "lm_head.weight" and self.layer.get("tie_word_embeddings")):
                    raise SourceError(f"{self.name} has no {name}, and the target's does not fit", OTHER_HEAD)
                tensors[name] = rows
        mixer = FeatureMixer(
            ids, target.hidden_size, self.hidden_size, self.flags, self.layer.get("rms_norm_eps", 1e-6), "fc.bias" in tensors
        )
        head = Eagle3Head(self._decoder(), self.layer, self.flags, self.draft_vocab)
        places = {name: f"model.{name}" for name in tensors} | {"lm_head.weight": "lm_head.weight"}
        of_mixer = [name for name in tensors if name.startswith(("fc.", "fc_norm.", "input_norm."))]
        self._fill(mixer, {name: tensors[name] for name in of_mixer})
        self._fill(head, {places[name]: tensor for name, tensor in tensors.items() if name not in of_mixer})
        if len(tokens) < target.vocab_rows:
            head.set_output_embeddings(ShortHead(head.lm_head, tokens, target.vocab_rows))
        return mixer, head

    def _fill(self, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        wanted = module.state_dict()
        names = {name: name.removeprefix("model.") for name in {*wanted, *tensors}}
        if unknown := sorted(tensors.keys() - wanted.keys()):
            raise _unknown(self.name, f"the tensor {names[unknown[0]]}")
        for name, tensor in wanted.items():
            if name not in tensors:
                raise SourceError(f"{self.name} has no tensor {names[name]}", "download the checkpoint again")
            if tensors[name].shape != tensor.shape:
                shapes = " and not ".join("x".join(map(str, each.shape)) for each in (tensors[name], tensor))
                raise SourceError(f"{names[name]} of {self.name} has the shape {shapes}", "download the checkpoint again")
        module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        module.requires_grad_(False).eval()

    def _decoder(self) -> Qwen3Config:
        """Return the configuration of a Qwen3 of the head's size."""
        layer, heads = self.layer, self.layer["num_attention_heads"]
        count = layer.get("num_hidden_layers", 1)
        rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
        rope = {**rope, "rope_theta": layer.get("rope_theta") or rope.get("rope_theta") or THETA}
        kind = rope.setdefault("rope_type", rope.pop("type", "default"))
        if kind in LENGTH_DEPENDENT_ROPE:
            raise _unknown(self.name, f"a rotary embedding scaled by the length of the text ({kind})")
        types = layer.get("layer_types") or ["full_attention"] * count
        return Qwen3Config(
            **{key: layer[key] for key in SHAPES},
            num_hidden_layers=count,
            num_key_value_heads=layer.get("num_key_value_heads") or heads,
            head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
            hidden_act=layer.get("hidden_act", "silu"),
            max_position_embeddings=layer.get("max_position_embeddings") or 2048,
            attention_bias=bool(layer.get("attention_bias")),
            rope_parameters=rope,
            layer_types=types,
            sliding_window=layer.get("sliding_window"),
            use_sliding_window="sliding_attention" in types,
            max_window_layers=0,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads the embedding beside the hidden state."""

    def __init__(self, layer: Any, config: Any, norm_before_residual: bool):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, embedded_and_hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return [B, S, H] of the embeddings and the hidden states side by side, [B, S, 2H]."""
        embedded, hidden = embedded_and_hidden.chunk(2, -1)
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended, _ = self.self_attn(hidden_states=torch.cat([self.input_layernorm(embedded), normed], -1), **options)
        hidden = residual + attended
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class FeatureMixer(nn.Module):
    """What a head makes of the target's hidden states: norms and fc."""

    def __init__(self, ids: list[int], width: int, hidden_size: int, flags: Mapping[str, bool], epsilon: float, bias: bool):
        super().__init__()
        self.ids = ids
        self.hidden_size = hidden_size
        if flags["norm_before_fc"]:
            self.input_norm = Qwen3RMSNorm(len(ids) * width, epsilon)
        if flags["fc_norm"]:
            self.fc_norm = nn.ModuleList([Qwen3RMSNorm(width, epsilon) for _ in ids])
        self.fc = nn.Linear(len(ids) * width, hidden_size, bias=bias)

    def forward(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """Return features [B, S, H] of hidden states, [B, S, Ht] for each of `ids`."""
        if hasattr(self, "fc_norm"):
            hidden = [norm(each) for norm, each in zip(self.fc_norm, hidden, strict=True)]
        together = torch.cat(hidden, -1)
        if hasattr(self, "input_norm"):
            together = self.input_norm(together)
        mixed: torch.Tensor = self.fc(together)
        return mixed


class Eagle3Head(Qwen3ForCausalLM):  # type: ignore[misc]  # transformers is untyped here
    """A head over features. It is a Qwen3; a Llama is one without the norms of queries and keys."""

    def __init__(self, config: Qwen3Config, layer: Mapping[str, Any], flags: Mapping[str, bool], draft_vocab: int):
        super().__init__(config)
        for each in self.model.layers:
            if layer.get("model_type", "llama") == "llama":
                each.self_attn.q_norm, each.self_attn.k_norm = nn.Identity(), nn.Identity()
            if layer.get("mlp_bias"):
                sizes = {key: getattr(config, key) for key in ("hidden_size", "intermediate_size", "hidden_act")}
                each.mlp = LlamaMLP(LlamaConfig(**sizes, mlp_bias=True))
        self.model.layers[0] = FirstLayer(self.model.layers[0], config, flags["norm_before_residual"])
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.norm_output = flags["norm_output"]

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [B, S, V], and what the next draft step takes for its feature, [B, S, H].

        Args:
            input_ids: int64 [B, S], the token after each row's.
            features: [B, S, H].
            position_ids: int64 [B, S].
            past_key_values: transformers' cache, which is updated.
        """
        embedded = self.get_input_embeddings()(input_ids)
        before_norm: list[torch.Tensor] = []
        hook = self.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
        try:
            normed = self.model(
                inputs_embeds=torch.cat([embedded, features], -1),
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=True,
            ).last_hidden_state
        finally:
            hook.remove()
        logits: torch.Tensor = self.get_output_embeddings()(normed)
        return logits, normed if self.norm_output else before_norm[0]


OTHER_HEAD = "choose a head that was made for this target"


def _load(source: Source) -> dict[str, torch.Tensor]:
    path = next((found for name in FILES if (found := source.file(name)) is not None), None)
    if path is None:
        raise SourceError(f"{source.name} has no weights", f"a head has one of {' and '.join(FILES)}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors and torch raise errors of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(
            f"cannot read {path.name} of {source.name}: {reason[:300]}", "download the checkpoint again"
        ) from error
    return loaded


def _renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {LAYERS + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name: each for name, each in tensors.items()}


def _refuse_unknown(config: Mapping[str, Any], known: set[str], name: str) -> None:
    generic = PreTrainedConfig().to_dict()
    for key, value in config.items():
        if key not in known and key not in WITHOUT_EFFECT and key not in generic and value is not None:
            raise _unknown(name, f"{key} = {json.dumps(value)[:80]}")


def _unknown(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} has {what}, which outrider does not know in an EAGLE-3 head",
        "to ignore it would cost acceptance; report it, with the name of the checkpoint",
    )
