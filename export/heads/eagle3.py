"""EAGLE-3 draft heads: read a checkpoint in any of its formats, and build the head from the layers of transformers.

A head reads h = fc(hidden states) and the embedding e of the next token. The hidden states of a position are the inputs of some
layers of the target, concatenated. All norms are RMSNorms:

    x = [input_layernorm(e), hidden_norm(h)]        r = h, or hidden_norm(h) with `norm_before_residual`
    h' = r + attention(x)                           h'' = h' + mlp(post_attention_layernorm(h'))
    logits = lm_head(norm(h''))                     h of the next draft step is h'', or norm(h'') with `norm_output`

Further layers are ordinary ones. `norm_before_fc` is one norm over all hidden states before fc, `fc_norm` one norm per layer.
fc and its norms are part of the target's graph, where they run once per token.

SafeAILab (Li et al. 2025, EAGLE-3), SpecForge, ModelOpt and speculators have their own formats. They name layer 0
differently. To list the layers that the features come from, speculators names the layers whose inputs they are, SpecForge and
ModelOpt the layers whose outputs they are. Unknown keys are refused, because ignoring one could lower acceptance without a
warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from outrider.export.checkpoints.source import Source
from outrider.export.heads.draft_head import LAYERS, FeatureMixer, HeadCheckpoint, QwenHead, Target
from outrider.export.heads.eagle3_config import Eagle3Config
from outrider.export.heads.head_tensors import load_tensors

MIDLAYER = "midlayer."
MASK_HIDDEN = "mask_hidden"  # of P-EAGLE


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint(HeadCheckpoint["Eagle3Mixer", "Eagle3Head"]):
    """A head of EAGLE-3 or P-EAGLE."""

    of_mixer = ("fc.", "fc_norm.", "input_norm.", MASK_HIDDEN)

    config: Eagle3Config
    first: str = LAYERS  # how the names of layer 0 begin in the checkpoint

    @classmethod
    def read(cls, source: Source) -> Eagle3Checkpoint:
        tensors = load_tensors(source)
        first = MIDLAYER if any(name.startswith(MIDLAYER) for name in tensors) else LAYERS
        renamed = {name.replace(first, LAYERS, 1): tensor for name, tensor in tensors.items()}
        return cls(source.name, Eagle3Config.parse(source.config(), source.name), renamed, first)

    def layer_ids(self, target: Target) -> list[int]:
        return self.config.ids or sorted([2, target.layers // 2, target.layers - 3])

    def modules(self, ids: list[int], target: Target) -> tuple[Eagle3Mixer, Eagle3Head]:
        config = self.config
        mixer = Eagle3Mixer(ids, target.hidden_size, config, "fc.bias" in self.tensors)
        return mixer, Eagle3Head(config.layers.decoder(self.name), config)

    def finish(self, mixer: Eagle3Mixer, head: Eagle3Head) -> None:
        if self.config.mask_token is not None:
            with torch.no_grad():
                head.mask_feature.copy_(mixer([*mixer.mask_hidden.chunk(len(mixer.ids), -1)])[0, 0])
            del mixer.mask_hidden  # nothing else reads it


class FirstLayer(nn.Module):
    """A decoder layer whose attention also reads the embedding."""

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
        """Return [B, S, H] from concatenated embeddings and hidden states, [B, S, 2H]."""
        embedded, hidden = embedded_and_hidden.chunk(2, -1)
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended, _ = self.self_attn(hidden_states=torch.cat([self.input_layernorm(embedded), normed], -1), **options)
        hidden = residual + attended
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Mixer(FeatureMixer):
    """Norms and fc; for P-EAGLE, also the hidden states of masks."""

    def __init__(self, ids: list[int], width: int, config: Eagle3Config, bias: bool):
        super().__init__()
        self.ids = ids
        self.hidden_size, epsilon = config.layers.hidden_size, config.layers.rms_norm_eps
        if config.fields.norm_before_fc:
            self.input_norm = Qwen3RMSNorm(len(ids) * width, epsilon)
        if config.fields.fc_norm:
            self.fc_norm = nn.ModuleList([Qwen3RMSNorm(width, epsilon) for _ in ids])
        self.fc = nn.Linear(len(ids) * width, self.hidden_size, bias=bias, device="meta")
        if config.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, len(ids) * width))

    def forward(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        if hasattr(self, "fc_norm"):
            hidden = [norm(each) for norm, each in zip(self.fc_norm, hidden, strict=True)]
        together = torch.cat(hidden, -1)
        if hasattr(self, "input_norm"):
            together = self.input_norm(together)
        mixed: torch.Tensor = self.fc(together)
        return mixed


class Eagle3Head(QwenHead):
    """A head that drafts one token per pass; a P-EAGLE head drafts several, with mask tokens."""

    mask_feature: torch.Tensor  # [H], the feature of a mask

    def __init__(self, decoder: Qwen3Config, config: Eagle3Config):
        """See `QwenHead`."""
        super().__init__(decoder, config.layers, config.draft_vocab)
        if config.layers.mlp_bias:
            for each in self.model.layers:
                sizes = {key: getattr(decoder, key) for key in ("hidden_size", "intermediate_size", "hidden_act")}
                each.mlp = LlamaMLP(LlamaConfig(**sizes, mlp_bias=True))
        self.model.layers[0] = FirstLayer(self.model.layers[0], decoder, bool(config.fields.norm_before_residual))
        self.norm_output = bool(config.fields.norm_output)
        self.mask_token = config.mask_token
        self.register_buffer("mask_feature", torch.zeros(decoder.hidden_size), persistent=False)

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.forward`. Each row's input id is its next token or a mask."""
        normed, following = self.hidden(input_ids, features, position_ids, past_key_values)
        logits: torch.Tensor = self.get_output_embeddings()(normed)
        return logits, following

    def hidden(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of the output head, and the features for the next step, both [B, S, H]; see `forward`."""
        embedded = self.get_input_embeddings()(input_ids)
        if self.mask_token is not None:
            masked = (input_ids == self.mask_token)[..., None]
            features = torch.where(masked, self.mask_feature, features)
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
