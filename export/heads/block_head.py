"""Block heads (DFlash, Chen et al. 2026, arXiv 2602.06036): draft heads that fill a block of mask tokens in one pass.

The features of the target are the context: c = hidden_norm(fc(hidden states)) of each confirmed token except the last. The last
token is the anchor. The block is the anchor and the masks after it. The hidden state h of a row of the block begins as the
embedding of its token. All norms are RMSNorms. In every layer, the keys and values of a position are made of

    c for the context, input_layernorm(h) for the block.

Only the block has queries. They attend to the whole context and to the whole block. The rest is a Qwen3 layer. The output at a
mask gives the logits of the token in its own place; with `sample_from_anchor`, the output at every row of the block gives the
logits of the next token.

Layers with a sliding window (speculators) see the context from the anchor's window on. Within the block they are causal, unless
`sliding_window_non_causal` says otherwise.

z-lab, DeepSpec and speculators have formats with different keys. To list the layers that the features come from,
speculators names the layers whose inputs they are, the others the layers whose outputs they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from outrider.export.checkpoints.source import Source
from outrider.export.heads.block_head_config import BlockConfig
from outrider.export.heads.draft_head import FeatureMixer, HeadCheckpoint, QwenHead, Target
from outrider.export.heads.draft_head_config import WINDOW, unknown
from outrider.export.heads.head_tensors import load_tensors
from outrider.export.heads.short_head import ShortHead


@dataclass(frozen=True, slots=True)
class BlockCheckpoint(HeadCheckpoint["BlockMixer", "BlockHead"]):
    """A block head."""

    of_mixer = ("fc.", "hidden_norm.")

    config: BlockConfig

    @classmethod
    def read(cls, source: Source) -> BlockCheckpoint:
        return cls(source.name, BlockConfig.parse(source.config(), source.name), load_tensors(source))

    def layer_ids(self, target: Target) -> list[int]:
        if self.config.target_layers not in (None, target.layers):
            raise self._other_target(target, f"it is for {self.config.target_layers} layers, not {target.layers}")
        if target.layers in self.config.ids:  # training reads them after the final norm, `FeatureMixer` before it
            raise unknown(self.name, f"features from the output of the target's last layer, {target.layers - 1}")
        return self.config.ids

    def modules(self, ids: list[int], target: Target) -> tuple[BlockMixer, BlockHead]:
        return BlockMixer(ids, target.hidden_size, self.config), BlockHead(self.config.layers.decoder(self.name), self.config)

    def finish(self, mixer: BlockMixer, head: BlockHead) -> None:
        output = head.get_output_embeddings()
        if self.config.markov_rank and isinstance(output, ShortHead):  # its bias is for the same tokens
            tokens = (output.place < output.rows.out_features).nonzero()[:, 0]
            rows = head.markov_head.markov_w2
            assert isinstance(rows, nn.Linear)
            head.markov_head.markov_w2 = ShortHead(rows, tokens, len(output.place))


class BlockMixer(FeatureMixer):
    """Makes the context from hidden states: fc and a norm."""

    def __init__(self, ids: list[int], width: int, config: BlockConfig):
        super().__init__()
        self.ids, self.hidden_size = ids, config.layers.hidden_size
        self.fc = nn.Linear(len(ids) * width, self.hidden_size, bias=False, device="meta")
        self.hidden_norm = Qwen3RMSNorm(self.hidden_size, config.layers.rms_norm_eps)

    def forward(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        context: torch.Tensor = self.hidden_norm(self.fc(torch.cat(hidden, -1)))
        return context


class RowAndToken(nn.Module):
    """A linear layer over a row's hidden state and the Markov head's embedding of the previous token, in two parts."""

    def __init__(self, hidden: int, token: int, outputs: int):
        super().__init__()
        self._hidden, self.reads_token = hidden, token > 0
        self.weight = nn.Parameter(torch.empty(outputs, hidden + token))
        self.bias = nn.Parameter(torch.empty(outputs))

    def of_row(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the part for hidden states [..., H], including the bias."""
        return nn.functional.linear(hidden, self.weight[:, : self._hidden], self.bias)

    def of_token(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the part for embedded tokens [..., r]."""
        return nn.functional.linear(embedded, self.weight[:, self._hidden :])


class MarkovHead(nn.Module):
    """A bias on a row's logits that depends on the previous token (DSpark, arXiv 2607.05147): W2 W1[token], perhaps gated."""

    def __init__(self, vocab_rows: int, draft_vocab: int, rank: int, gate: int | None):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_rows, rank)
        self.markov_w2: nn.Module = nn.Linear(rank, draft_vocab, bias=False)
        self.gate_proj = None if gate is None else RowAndToken(gate, rank, rank)


class ConfidenceHead(nn.Module):
    """The logit of the probability that a row's token is accepted."""

    def __init__(self, proj: RowAndToken):
        super().__init__()
        self.proj = proj


class BlockHead(QwenHead):
    """A head that drafts a block of tokens in one pass. The rows of the context come first; their token is -1."""

    def __init__(self, decoder: Qwen3Config, config: BlockConfig):
        """See `QwenHead`."""
        super().__init__(decoder, config.layers, config.draft_vocab)
        self.mask_token, self.trained_k = config.mask_token, config.block_size - (not config.from_anchor)
        self.from_anchor, self._window = config.from_anchor, config.layers.sliding_window
        self._sees_ahead = config.windows_see_ahead
        width, rank = decoder.hidden_size, config.markov_rank
        if rank:
            self.markov_head = MarkovHead(decoder.vocab_size, config.draft_vocab, rank, width if config.gated else None)
        if config.confidence:
            read = rank if config.confidence_reads_token else 0
            self.confidence_head = ConfidenceHead(RowAndToken(width, read, 1))
        gate = rank if config.gated else 0
        self.block_state = 1 + gate if rank or config.confidence else None

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, ...]:
        """See `DraftHead.forward`. The logits of context rows have no meaning.

        With a Markov or a confidence head, the third result is their input from each row, float32 [B, S, A]: one number for the
        confidence head, and the gate's numbers for the Markov head.
        """
        is_context = (input_ids < 0)[..., None]
        embedded = self.get_input_embeddings()(input_ids.clamp(min=0))
        hidden, rotary = embedded, self.model.rotary_emb(embedded, position_ids)
        masks = self._masks(is_context[..., 0], position_ids, past_key_values, embedded.dtype)
        for layer, kind in zip(self.model.layers, self.config.layer_types, strict=True):
            attended, _ = layer.self_attn(
                hidden_states=torch.where(is_context, features, layer.input_layernorm(hidden)),
                attention_mask=masks[kind],
                position_ids=position_ids,
                position_embeddings=rotary,
                past_key_values=past_key_values,
            )
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = self.model.norm(hidden)
        logits: torch.Tensor = self.get_output_embeddings()(normed)
        if self.block_state is None:
            return logits, normed
        heads = dict(self.named_children())
        confidence, markov = heads.get("confidence_head"), heads.get("markov_head")
        state = [torch.zeros_like(normed[..., :1]) if confidence is None else confidence.proj.of_row(normed)]
        if markov is not None and markov.gate_proj is not None:
            state.append(markov.gate_proj.of_row(normed))
        return logits, normed, torch.cat(state, -1).float()

    def _masks(self, is_context: torch.Tensor, rows: torch.Tensor, cache: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return each kind of attention's mask [B, 1, S, L]: bool, or floats to add to the scores of eager attention."""
        keys = getattr(cache.layers[0], "key_positions", None) if cache.layers else None
        if keys is None:
            keys = torch.arange(cache.get_seq_length() + rows.shape[1])
        keys, rows = keys[None, None, None], rows[:, None, :, None]
        whole = (keys <= rows[:, :, -1:]).expand(-1, -1, rows.shape[2], -1)
        masks = {"full_attention": whole, WINDOW: whole}
        if self._window is not None:
            anchor = rows[:, :, :1] + is_context.sum(1)[:, None, None, None]
            masks[WINDOW] = (whole if self._sees_ahead else keys <= rows) & (keys >= anchor - self._window)
        if self.config._attn_implementation == "eager":
            lowest = torch.finfo(dtype).min
            return {kind: torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, lowest) for kind, mask in masks.items()}
        return masks
