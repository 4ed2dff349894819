"""Block heads (DFlash, Chen et al. 2026, arXiv 2602.06036): draft heads that fill a block of mask tokens in one pass.

The features of the target are the context: c = hidden_norm(fc(hidden states)) of each confirmed token but the last. The block
is that last token, the anchor, and masks behind it. A row of the block has the embedding of its token for its hidden state h.
In every layer, with every norm an RMSNorm, the keys and values of a position are made of

    c for the context, input_layernorm(h) for the block,

queries of the block alone attend to the whole context and the whole block, before and behind, and the rest is a Qwen3 layer.
The output at a mask gives the logits of the token in its own place; with `sample_from_anchor`, the output at every row of the
block gives the logits of the token after it.

Layers with a sliding window (speculators) see the context from the anchor's window on; within the block they are causal, unless
`sliding_window_non_causal` says otherwise.

The formats are those of z-lab, DeepSpec, and speculators, which differ in their keys, and in how they count the layers that the
features come from: speculators names the layer whose input it is, the others the one whose output it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from outrider.errors import SourceError
from outrider.export.checkpoints.source import AGAIN, BLOCKS, Source
from outrider.export.heads.draft_head import FeatureMixer, HeadCheckpoint, QwenHead, Target, load_tensors
from outrider.export.heads.draft_head_config import (
    Count,
    LayerId,
    Layers,
    TokenId,
    convert,
    not_known,
    read_layers,
    refuse_unknown,
)
from outrider.export.heads.short_head import ShortHead

WINDOW = "sliding_attention"
MARKOV_KINDS = ("vanilla", "gated")


class _Block(msgspec.Struct, frozen=True, kw_only=True):
    """What z-lab has in `dflash_config`, or beside the keys of the layers; DeepSpec and speculators have it beside them."""

    block_size: Count | None = None
    mask_token_id: TokenId | None = None
    target_layer_ids: list[LayerId] | None = None  # of z-lab and DeepSpec: outputs; -1 is the embedding


class _Head(_Block, frozen=True, kw_only=True):
    num_target_layers: Count | None = None
    dflash_config: _Block | None = None
    # Of speculators:
    transformer_layer_config: dict[str, Any] | None = None
    speculators_model_type: str | None = None
    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    aux_hidden_state_layer_ids: list[LayerId] | None = None
    sliding_window_non_causal: bool = False
    sample_from_anchor: bool | None = None
    tie_word_embeddings: bool | None = None
    # Of DSpark:
    markov_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    # Of training:
    num_anchors: int | None = None


class BlockConfig(msgspec.Struct, frozen=True):
    """What a block head's configuration says, however it says it."""

    layers: Layers
    target_hidden_size: int
    draft_vocab: int
    ids: list[int]  # the context is made of what enters these layers of the target
    tied: bool
    mask_token: int
    block_size: int  # rows of a block in training, the anchor among them
    target_layers: int | None  # of the target that it was made for
    from_anchor: bool
    windows_see_ahead: bool
    markov_rank: int  # 0 without a Markov head
    gated: bool  # whether the row has a part in the Markov head's bias
    confidence: bool  # whether there is a confidence head
    confidence_reads_token: bool  # whether it also reads the token before, as the Markov head does

    @classmethod
    def parse(cls, config: Mapping[str, Any], name: str) -> BlockConfig:
        """Read a `config.json`.

        Raises:
            SourceError: a value is missing or impossible.
            UnsupportedModelError: it has a key or a value that is not known here.
        """
        of_speculators = "transformer_layer_config" in config
        known = {*_Head.__struct_fields__} | (set() if of_speculators else {*Layers.__struct_fields__})
        refuse_unknown(config, known, name)
        head = convert(config, _Head, name)
        refuse_unknown(config.get("dflash_config") or {}, {*_Block.__struct_fields__}, name)
        if of_speculators:  # which makes layers of Qwen3 whatever it says
            layers = read_layers(config, head.transformer_layer_config or {}, name, model_type="qwen3")
        else:
            layers = read_layers(config, None, name)
        if layers.model_type != "qwen3":
            raise not_known(name, f"layers of the type {layers.model_type!r} in a block head")
        if head.speculators_model_type not in (None, *BLOCKS):
            raise not_known(name, f"speculators_model_type = {head.speculators_model_type!r}")
        if WINDOW in layers.windows() and not of_speculators:
            raise not_known(name, "sliding windows, which only speculators defines for block heads")
        nested = head.dflash_config or _Block()
        found = {
            "block_size": head.block_size or nested.block_size,
            "mask_token_id": head.mask_token_id if nested.mask_token_id is None else nested.mask_token_id,
        }
        if missing := [key for key, value in found.items() if value is None]:
            raise SourceError(f"the configuration of {name} has no {missing[0]}", AGAIN)
        outputs = nested.target_layer_ids or head.target_layer_ids
        ids = head.aux_hidden_state_layer_ids if of_speculators else [each + 1 for each in outputs or ()]
        if not ids and head.num_target_layers is not None:
            ids = [each + 1 for each in default_outputs(head.num_target_layers, layers.num_hidden_layers)]
        if not ids:
            raise SourceError(f"the configuration of {name} does not say which layers of the target it reads", AGAIN)
        dspark = head.speculators_model_type == "dspark" or "dspark" in str(config.get("architectures")).lower()
        kind = (head.markov_head_type or MARKOV_KINDS[0]).lower()
        rank = (256 if dspark else 0) if head.markov_rank is None else head.markov_rank
        if rank and kind not in MARKOV_KINDS:
            raise not_known(name, f"markov_head_type = {kind!r}")
        confidence = dspark if head.enable_confidence_head is None else head.enable_confidence_head
        reads_token = confidence and head.confidence_head_with_markov is not False
        if reads_token and not rank:
            raise SourceError(
                f"the configuration of {name} has a confidence head that reads what a Markov head makes of a token, and no"
                " Markov head",
                AGAIN,
            )
        return cls(
            layers=layers,
            target_hidden_size=head.target_hidden_size or layers.hidden_size,
            draft_vocab=head.draft_vocab_size or layers.vocab_size,
            ids=ids,
            tied=False,  # both are the target's, or the checkpoint's own
            mask_token=found["mask_token_id"] or 0,
            block_size=found["block_size"] or 0,
            target_layers=head.num_target_layers,
            from_anchor=dspark if head.sample_from_anchor is None else head.sample_from_anchor,
            windows_see_ahead=head.sliding_window_non_causal,
            markov_rank=rank,
            gated=bool(rank) and kind == "gated",
            confidence=confidence,
            confidence_reads_token=reads_token,
        )


def default_outputs(target_layers: int, layers: int) -> list[int]:
    """Return the layers of the target whose outputs z-lab's heads read where their configuration lists none.

    They are spread evenly from the second layer to the third from last: `build_target_layer_ids` in z-lab/dflash.
    """
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + index * (target_layers - 4) / (layers - 1)) for index in range(layers)]


@dataclass(frozen=True, slots=True)
class BlockCheckpoint(HeadCheckpoint["BlockMixer", "BlockHead"]):
    """A block head."""

    config: BlockConfig

    @classmethod
    def read(cls, source: Source) -> BlockCheckpoint:
        config = BlockConfig.parse(source.config(), source.name)
        return cls(source.name, config, load_tensors(source))

    def layer_ids(self, target: Target) -> list[int]:
        if self.config.target_layers not in (None, target.layers):
            raise self._other_target(target, f"that has {self.config.target_layers} layers, and this one {target.layers}")
        if target.layers in self.config.ids:  # hidden states there are normed in training, and here they are not
            raise not_known(self.name, f"features from the output of the target's last layer, {target.layers - 1}")
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

    def of_mixer(self, name: str) -> bool:
        return name.startswith(("fc.", "hidden_norm."))


class BlockMixer(FeatureMixer):
    """What the context is made of hidden states by: fc, and a norm."""

    def __init__(self, ids: list[int], width: int, config: BlockConfig):
        super().__init__()
        self.ids, self.hidden_size = ids, config.layers.hidden_size
        self.fc = nn.Linear(len(ids) * width, self.hidden_size, bias=False, device="meta")
        self.hidden_norm = Qwen3RMSNorm(self.hidden_size, config.layers.rms_norm_eps)

    def forward(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        context: torch.Tensor = self.hidden_norm(self.fc(torch.cat(hidden, -1)))
        return context


class RowAndToken(nn.Module):
    """A linear layer over a row's hidden state and what a Markov head makes of the token before, in two parts."""

    def __init__(self, hidden: int, token: int, outputs: int):
        super().__init__()
        self._hidden, self.reads_token = hidden, token > 0
        self.weight = nn.Parameter(torch.empty(outputs, hidden + token))
        self.bias = nn.Parameter(torch.empty(outputs))

    def of_row(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the part of hidden states [..., H], with the bias."""
        return nn.functional.linear(hidden, self.weight[:, : self._hidden], self.bias)

    def of_token(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the part of tokens [..., r]."""
        return nn.functional.linear(embedded, self.weight[:, self._hidden :])


class MarkovHead(nn.Module):
    """A bias on the logits of a row by the token before (DSpark, arXiv 2607.05147): W2 W1[token], perhaps with a gate."""

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
    """A head that drafts a block of tokens in one pass. Rows of the context, -1 for their token, come first."""

    def __init__(self, decoder: Qwen3Config, config: BlockConfig):
        """Make a head without weights for its embedding and its output head, which are as large as the target's."""
        super().__init__(decoder, config.layers, config.draft_vocab)
        self.trained_k = config.block_size - (not config.from_anchor)
        self.from_anchor, self._window = config.from_anchor, config.layers.sliding_window
        self._sees_ahead = config.windows_see_ahead
        width, rank = decoder.hidden_size, config.markov_rank
        if rank:
            self.markov_head = MarkovHead(decoder.vocab_size, config.draft_vocab, rank, width if config.gated else None)
        if config.confidence:
            read = rank if config.confidence_reads_token else 0
            self.confidence_head = ConfidenceHead(RowAndToken(width, read, 1))
        gate = rank if config.gated else 0
        self._block_state = 1 + gate if rank or config.confidence else None

    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, ...]:
        """See `DraftHead.forward`. The rows of the context have logits without meaning.

        With a Markov or a confidence head, the third result is what they read of each row, float32 [B, S, A]: a number for the
        confidence head, and the gate's for the Markov head.
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

    @property
    def block_state(self) -> int | None:
        """The width of what Markov and confidence heads read of each row; None if there are none."""
        return self._block_state

    def _masks(self, is_context: torch.Tensor, rows: torch.Tensor, cache: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return which keys the rows see, [B, 1, S, L] for each kind of attention: bool, or added to scores if eager."""
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
