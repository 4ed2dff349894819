"""Multi-token-prediction heads: an additional layer in a checkpoint that drafts like a draft head.

h is the target's last hidden state of a position, after the final norm; e is the embedding of the next token:

    x = eh_proj([enorm(e), hnorm(h)])       h' = norm(layer(x))       logits = lm_head(h')

`layer` is a layer of the target's kind, with full attention unless the configuration says otherwise. h' is the h of the next
draft step (DeepSeek-AI 2024, arXiv 2412.19437). transformers drops these tensors when it loads a model, so they are read from
the checkpoint's safetensors. The layer is then loaded as a one-layer model of the same family, so that the family's conversions
apply.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.errors import OutriderError, SourceError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import set_experts
from outrider.export.checkpoints.mimo import MiMoConfig
from outrider.export.checkpoints.source import AGAIN, Source, reason_of
from outrider.export.heads.draft_head import DraftHead, FeatureMixer, Target
from outrider.export.heads.head_tensors import read_tensors, tensor_files

COUNTS = (
    "mtp_num_hidden_layers",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)  # of layers; every draft step runs the same one
LAYER_TYPES, MLP_TYPES = "mtp_layer_types", "mtp_mlp_layer_types"
KNOWN_KEYS = (*COUNTS, "mtp_use_dedicated_embeddings", LAYER_TYPES, MLP_TYPES)
OF_HEAD = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
# From the checkpoint's tensor names to the names of a one-layer model, and to `OF_HEAD`; the first match counts.
QWEN = {  # Qwen3-Next, Qwen3.5 and Qwen3.6
    r"mtp\.fc\.": "eh_proj.",
    r"mtp\.pre_fc_norm_embedding\.": "enorm.",
    r"mtp\.pre_fc_norm_hidden\.": "hnorm.",
    r"mtp\.norm\.": "model.norm.",
    r"mtp\.layers\.0\.": "model.layers.0.",
    r"mtp\.embed_tokens\.": "model.embed_tokens.",
    r"mtp\.lm_head\.": "lm_head.",
}
MIMO = {  # MiMo-7B, which puts the hidden state first
    r"model\.mtp_layers\.0\.input_proj\.": "eh_proj.",
    r"model\.mtp_layers\.0\.token_layernorm\.": "enorm.",
    r"model\.mtp_layers\.0\.hidden_layernorm\.": "hnorm.",
    r"model\.mtp_layers\.0\.final_layernorm\.": "model.norm.",
    r"model\.mtp_layers\.0\.": "model.layers.0.",
}
DEEPSEEK = {  # DeepSeek-V3, GLM-4.5 and others: the layer after the last one
    r"model\.layers\.{layers}\.(enorm|hnorm|eh_proj)\.": r"\1.",
    r"model\.layers\.{layers}\.shared_head\.norm\.": "model.norm.",
    r"model\.layers\.{layers}\.shared_head\.head\.": "lm_head.",
    r"model\.layers\.{layers}\.embed_tokens\.": "model.embed_tokens.",
    r"model\.layers\.{layers}\.": "model.layers.0.",
}


def layout_of(names: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return patterns for a checkpoint's head, such as `QWEN`; an empty dictionary if there is no head.

    Args:
        names: the names of the checkpoint's tensors.
        config: its `config.json`.
    """
    layers = _of_text(config).get("num_hidden_layers")
    for layout in (QWEN, MIMO, DEEPSEEK):
        patterns = {pattern.replace("{layers}", str(layers)): name for pattern, name in layout.items()}
        if any(re.match(next(iter(patterns)), name) for name in names):
            return patterns
    return {}


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _not_known(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the MTP head of {name} has {what}, which outrider does not know; ignoring it would lower acceptance",
        "export without the head: --draft none",
    )


def _check_config(source: Source) -> bool:
    """Refuse unknown keys about the head, and return whether hidden states come before embeddings in `eh_proj`.

    Raises:
        UnsupportedModelError: there is an unknown key.
    """
    text = _of_text(source.config())
    for key, value in text.items():
        unknown = key.startswith("mtp_") and key not in KNOWN_KEYS and "loss" not in key and value not in (None, False)
        # False does not mean the same as no key for chain_hidden_post_norm.
        if unknown or key == "chain_hidden_post_norm" or (key in COUNTS and isinstance(value, int) and value > 1):
            raise _not_known(source.name, f"{key} = {value!r}")
    return text.get("model_type") == MiMoConfig.model_type


def has_mtp(source: Source) -> bool:
    """Return whether a checkpoint has an MTP head.

    Raises:
        SourceError: it cannot be read.
    """
    return bool(layout_of(tensor_files(source), source.config()))


@dataclass(frozen=True, slots=True)
class MtpCheckpoint:
    """The tensors of the head in a target's checkpoint, with the names of a one-layer model and of `OF_HEAD`."""

    name: str
    tensors: dict[str, torch.Tensor]
    hidden_first: bool  # whether hidden states come before embeddings in eh_proj

    @classmethod
    def read(cls, source: Source) -> MtpCheckpoint:
        """Read a head.

        Raises:
            SourceError: there is none, or it cannot be read.
            UnsupportedModelError: it has a key or a tensor that is unknown.
        """
        names = tensor_files(source)
        patterns = layout_of(names, source.config())
        if not patterns:
            raise SourceError(f"{source.name} has no MTP head", "pass a draft checkpoint to --draft, or leave --draft out")
        own = {name: file for name, file in names.items() if any(re.match(each, name) for each in patterns)}
        others = ("mtp.", "model.mtp_layers.")
        if other := sorted(name for name in names if name.startswith(others) and name not in own):
            raise _not_known(source.name, f"the tensor {other[0]}")  # such as a second layer
        tensors = {}
        for name, tensor in read_tensors(source, own).items():
            pattern = next(each for each in patterns if re.match(each, name))
            tensors[re.sub(pattern, patterns[pattern], name, count=1)] = tensor
        return cls(source.name, tensors, _check_config(source))

    def build(self, target: Target) -> tuple[MtpMixer, MtpHead]:
        """Return the mixer for the target's graph, and the head, in fp32.

        Raises:
            SourceError: a tensor is missing or has the wrong shape.
            UnsupportedModelError: a tensor is unknown.
        """
        model = target.model
        assert model is not None
        tensors = dict(self.tensors)
        tensors.setdefault("model.embed_tokens.weight", target.embedding)
        if "lm_head.weight" not in tensors:
            if target.output_head is None:
                raise UnsupportedModelError(f"the output head of {target.name} has a bias, and its MTP head shares it")
            tensors["lm_head.weight"] = target.output_head
        own = {name: tensors.pop(name, None) for name in OF_HEAD}
        decoder = model.get_decoder()
        norm = getattr(decoder, "norm", None)
        if not isinstance(norm, nn.Module):
            raise UnsupportedModelError(f"{type(model).__name__} has no final norm for its MTP head to read")
        layer = self._layer(model, tensors)
        width = target.hidden_size
        shapes = dict(zip(OF_HEAD, ((width,), (width,), (width, 2 * width)), strict=True))
        for name, shape in shapes.items():
            if (tensor := own[name]) is None or tensor.shape != shape:
                raise SourceError(f"the MTP head of {self.name} has no {name} of the shape {'x'.join(map(str, shape))}", AGAIN)
        tensors = {name: each.float() for name, each in own.items() if each is not None}
        head = MtpHead(layer, tensors, self.hidden_first)
        return MtpMixer(target.layers, width, norm), head

    def _layer(self, model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
        """Return a model of the target's family with only the head's layer."""
        config = copy.deepcopy(model.config.get_text_config())
        config.num_hidden_layers = 1
        config.tie_word_embeddings = False
        try:
            if getattr(config, "layer_types", None):
                config.layer_types = (getattr(config, LAYER_TYPES, None) or ["full_attention"])[:1]
            if getattr(config, "mlp_layer_types", None):
                config.mlp_layer_types = (getattr(config, MLP_TYPES, None) or config.mlp_layer_types)[-1:]
            if getattr(config, "first_k_dense_replace", None):
                config.first_k_dense_replace = 0
            with torch.device("meta"):
                kind = type(AutoModelForCausalLM.from_config(copy.deepcopy(config)))
            layer, report = kind.from_pretrained(
                None,
                config=config,
                state_dict={name: tensor.float() for name, tensor in tensors.items()},
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
        except (MemoryError, OutriderError):
            raise
        except Exception as error:  # transformers raises errors of any type where shapes contradict each other
            raise SourceError(f"the MTP head of {self.name} is impossible: {reason_of(error)}", AGAIN) from error
        if missing := sorted(report["missing_keys"]):
            raise SourceError(f"the MTP head of {self.name} lacks the tensor of {missing[0]}", AGAIN)
        zeros = {name for name, each in tensors.items() if name.endswith(".bias") and not each.any()}  # AutoGPTQ writes them
        if unknown := sorted(report["unexpected_keys"] - zeros):
            raise _not_known(self.name, f"the tensor of {unknown[0]}")
        set_experts(layer)
        made: PreTrainedModel = layer.eval().requires_grad_(False)
        return made


class MtpMixer(FeatureMixer):
    """The target's final norm: an MTP head reads the input of the output head."""

    def __init__(self, layers: int, width: int, norm: nn.Module):
        super().__init__()
        self.ids, self.hidden_size = [layers], width
        self.norm = norm

    def forward(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        normed: torch.Tensor = self.norm(hidden[0])
        return normed


class MtpHead(PreTrainedModel, DraftHead):  # type: ignore[misc]  # transformers is untyped here
    """A head with one layer of the target's kind."""

    _supports_sdpa = True

    def __init__(self, layer: PreTrainedModel, tensors: dict[str, torch.Tensor], hidden_first: bool = False):
        """Make a head from a one-layer causal model and the tensors `OF_HEAD`; see `MtpCheckpoint` for `hidden_first`."""
        super().__init__(layer.config)
        self.hidden_first = hidden_first
        self.model, self.lm_head = layer.get_decoder(), layer.get_output_embeddings()
        self.enorm, self.hnorm = copy.deepcopy(self.model.norm), copy.deepcopy(self.model.norm)
        width, both = tensors["eh_proj.weight"].shape
        self.eh_proj = nn.Linear(both, width, bias=False, device="meta")
        for name in OF_HEAD:
            self.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(tensors[name], requires_grad=False)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.model.get_input_embeddings()
        return embedding

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.lm_head
        return head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def set_attn_implementation(self, attn_implementation: Any, **_: Any) -> None:
        self.model.set_attn_implementation(attn_implementation)

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.forward`. Each row's input id is its next token."""
        both = [self.enorm(self.get_input_embeddings()(input_ids)), self.hnorm(features)]
        hidden = self.model(
            inputs_embeds=self.eh_proj(torch.cat(both[::-1] if self.hidden_first else both, -1)),
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=True,
        ).last_hidden_state
        logits: torch.Tensor = self.lm_head(hidden)
        return logits, hidden
