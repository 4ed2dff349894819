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
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from outrider.errors import OutriderError, SourceError, UnsupportedModelError
from outrider.export.eagle3_config import AGAIN, HeadConfig, not_known
from outrider.export.short_head import ShortHead
from outrider.export.source import Source

FILES, INDEX = ("model.safetensors", "pytorch_model.bin"), "model.safetensors.index.json"
MIDLAYER, LAYERS = "midlayer.", "layers.0."
NOT_OURS = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")  # of training; t2d repeats d2t


@dataclass(frozen=True, slots=True)
class Target:
    """What a head takes from its target, and must fit."""

    name: str
    layers: int
    hidden_size: int
    vocab_rows: int
    embedding: torch.Tensor  # [V, Ht]
    output_head: torch.Tensor | None  # [V, Ht]; None if it is more than a matrix

    @classmethod
    def of(cls, model: PreTrainedModel, name: str = "the target") -> Target:
        """Return what a head takes from a model."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        output_head = head.weight if getattr(head, "bias", None) is None else None
        embedding, rows = model.get_input_embeddings().weight, int(head.weight.shape[0])
        return cls(name, config.num_hidden_layers, config.hidden_size, rows, embedding, output_head)


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """The configuration and the tensors of a head, by the names of speculators."""

    name: str
    config: HeadConfig
    tensors: dict[str, torch.Tensor]
    first: str = LAYERS  # what the names of layer 0 begin with in the checkpoint

    @classmethod
    def read(cls, source: Source) -> Eagle3Checkpoint:
        """Read a checkpoint.

        Raises:
            SourceError: it cannot be read, or its configuration is impossible.
            UnsupportedModelError: its configuration has a key or a value that is not known here.
        """
        tensors = _load(source)
        first = MIDLAYER if any(name.startswith(MIDLAYER) for name in tensors) else LAYERS
        return cls(source.name, HeadConfig.parse(source.config(), source.name), _renamed(tensors), first)

    def features_of(self, target: Target) -> list[int]:
        """Return the layers of the target whose inputs are the features, ascending; the number of layers is its output.

        Raises:
            UnsupportedModelError: the head was made for another target.
        """
        layers, config = target.layers, self.config
        ids = config.ids or sorted([2, layers // 2, layers - 3])
        fc = self.tensors.get("fc.weight")
        if fc is None or fc.dim() != 2:
            raise SourceError(f"{self.name} has no matrix fc.weight", AGAIN)
        differs = {
            "hidden size": (config.target_hidden_size, target.hidden_size),
            "vocabulary": (config.layers.vocab_size, target.vocab_rows),
            "inputs of fc": (fc.shape[1], len(ids) * target.hidden_size),
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
        count, offsets = self.config.draft_vocab, self.tensors.get("d2t")
        if offsets is None:
            if count != target.vocab_rows:
                raise SourceError(
                    f"{self.name} proposes {count:,} of {target.vocab_rows:,} tokens, and has no tensor d2t that names them",
                    AGAIN,
                )
            return torch.arange(count)
        listed = offsets.shape == (count,) and not offsets.is_floating_point()
        ids = torch.arange(count) + (offsets.long() if listed else 0)
        if not listed or (ids.diff() <= 0).any() or not 0 <= int(ids[0]) <= int(ids[-1]) < target.vocab_rows:
            raise SourceError(
                f"d2t of {self.name} is not a list of {count:,} tokens in ascending order below {target.vocab_rows:,}", AGAIN
            )
        return ids

    def build(self, target: Target) -> tuple[FeatureMixer, Eagle3Head]:
        """Return what the target's graph computes, and the head, in fp32.

        Raises:
            SourceError: a tensor is missing or has another shape, or the sizes contradict each other.
            UnsupportedModelError: a tensor is not known here, or the head was made for another target.
        """
        ids, config = self.features_of(target), self.config
        tensors, tokens = dict(self.tensors), self.tokens(target)
        for name in (*NOT_OURS, "d2t"):
            tensors.pop(name, None)
        own = config.target_hidden_size == config.layers.hidden_size
        lent = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.output_head}
        for name in sorted(lent.keys() - tensors.keys()):
            weight = lent[name]
            if not own or weight is None or (name == "lm_head.weight" and config.tied):
                raise SourceError(f"{self.name} has no {name}, and the target's does not fit", OTHER_HEAD)
            tensors[name] = weight[tokens] if name == "lm_head.weight" else weight
        try:
            mixer = FeatureMixer(ids, target.hidden_size, config, "fc.bias" in tensors)
            head = Eagle3Head(config.decoder(self.name), config)
        except (MemoryError, OutriderError):
            raise
        except Exception as error:  # transformers raises errors of any type where sizes contradict each other
            raise SourceError(
                f"the configuration of {self.name} is impossible: {' '.join(str(error).split())[:300]}", AGAIN
            ) from error
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
            raise not_known(self.name, f"the tensor {names[unknown[0]]}")
        for name, tensor in wanted.items():
            if name not in tensors:
                raise SourceError(f"{self.name} has no tensor {names[name]}", AGAIN)
            if tensors[name].shape != tensor.shape:
                shapes = " and not ".join("x".join(map(str, each.shape)) for each in (tensors[name], tensor))
                raise SourceError(f"{names[name]} of {self.name} has the shape {shapes}", AGAIN)
        module.load_state_dict({name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}, assign=True)
        module.requires_grad_(False).eval()


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

    def __init__(self, ids: list[int], width: int, config: HeadConfig, bias: bool):
        super().__init__()
        self.ids = ids
        self.hidden_size, epsilon = config.layers.hidden_size, config.layers.rms_norm_eps
        if config.flags.norm_before_fc:
            self.input_norm = Qwen3RMSNorm(len(ids) * width, epsilon)
        if config.flags.fc_norm:
            self.fc_norm = nn.ModuleList([Qwen3RMSNorm(width, epsilon) for _ in ids])
        self.fc = nn.Linear(len(ids) * width, self.hidden_size, bias=bias, device="meta")

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

    def __init__(self, decoder: Qwen3Config, config: HeadConfig):
        """Make a head without weights for its embedding and its output head, which are as large as the target's."""
        layers, vocab_rows = config.layers, decoder.vocab_size
        decoder.vocab_size = 1
        super().__init__(decoder)
        decoder.vocab_size = vocab_rows
        for each in self.model.layers:
            if layers.model_type == "llama":
                each.self_attn.q_norm, each.self_attn.k_norm = nn.Identity(), nn.Identity()
            if layers.mlp_bias:
                sizes = {key: getattr(decoder, key) for key in ("hidden_size", "intermediate_size", "hidden_act")}
                each.mlp = LlamaMLP(LlamaConfig(**sizes, mlp_bias=True))
        self.model.layers[0] = FirstLayer(self.model.layers[0], decoder, bool(config.flags.norm_before_residual))
        self.model.embed_tokens = nn.Embedding(vocab_rows, decoder.hidden_size, device="meta")
        self.lm_head = nn.Linear(decoder.hidden_size, config.draft_vocab, bias=False, device="meta")
        self.norm_output = bool(config.flags.norm_output)

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
        normed, following = self.hidden(input_ids, features, position_ids, past_key_values)
        logits: torch.Tensor = self.get_output_embeddings()(normed)
        return logits, following

    def hidden(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the output head reads, and what the next step takes for its feature, both [B, S, H]; see `forward`."""
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
        return normed, normed if self.norm_output else before_norm[0]


OTHER_HEAD = "choose a head that was made for this target"


def _load(source: Source) -> dict[str, torch.Tensor]:
    index = source.file(INDEX)
    path = index or next((found for name in FILES if (found := source.file(name)) is not None), None)
    if path is None:
        raise SourceError(f"{source.name} has no weights", f"a head has one of {', '.join((*FILES, INDEX))}")
    try:
        if path == index:
            names = sorted({*json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
            return {key: tensor for name in names for key, tensor in load_file(str(source.file(name))).items()}
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(each, torch.Tensor) for each in loaded.values()):
            raise ValueError("it has more than tensors")
    except Exception as error:  # safetensors and torch raise errors of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"cannot read {path.name} of {source.name}: {reason[:300]}", AGAIN) from error
    return loaded


def _renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {LAYERS + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name: each for name, each in tensors.items()}
