"""The configuration of a block head, in any of the formats that `outrider.export.heads.block_head` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from outrider.errors import SourceError
from outrider.export.checkpoints.source import AGAIN, BLOCKS
from outrider.export.heads.draft_head_config import (
    WINDOW,
    Count,
    HeadConfig,
    HeadFields,
    LayerId,
    TokenId,
    read_fields,
    refuse_unknown,
    unknown,
)

MARKOV_KINDS = ("vanilla", "gated")


class _Block(msgspec.Struct, frozen=True, kw_only=True):
    """z-lab's `dflash_config`. Other formats have these keys at the top."""

    block_size: Count | None = None
    mask_token_id: TokenId | None = None
    target_layer_ids: list[LayerId] | None = None


class _Fields(HeadFields, frozen=True, kw_only=True):
    block_size: Count | None = None
    target_layer_ids: list[LayerId] | None = None  # of z-lab and DeepSpec: outputs; -1 is the embedding
    num_target_layers: Count | None = None
    dflash_config: _Block | None = None
    # Of speculators:
    aux_hidden_state_layer_ids: list[LayerId] | None = None
    sliding_window_non_causal: bool = False
    sample_from_anchor: bool | None = None
    # Of DSpark:
    markov_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    num_anchors: int | None = None  # of training


class BlockConfig(HeadConfig, frozen=True, kw_only=True):
    """The configuration of a block head."""

    block_size: int  # rows of a block in training, including the anchor
    target_layers: int | None  # of the target that the head was made for
    from_anchor: bool
    windows_see_ahead: bool
    markov_rank: int  # 0 without a Markov head
    gated: bool  # whether the Markov head's bias depends on the row too
    confidence: bool  # whether there is a confidence head
    confidence_reads_token: bool  # whether it also reads the previous token, as the Markov head does

    @classmethod
    def parse(cls, config: Mapping[str, Any], name: str) -> BlockConfig:
        """Read a `config.json`.

        Raises:
            SourceError: a value is missing or impossible.
            UnsupportedModelError: a key or a value is unknown.
        """
        head, layers = read_fields(config, _Fields, name, model_type="qwen3")  # speculators uses Qwen3's layers for any type
        of_speculators = head.transformer_layer_config is not None
        refuse_unknown(config.get("dflash_config") or {}, {*_Block.__struct_fields__}, name)
        if layers.model_type != "qwen3":
            raise unknown(name, f"layers of the type {layers.model_type!r} in a block head")
        if head.speculators_model_type not in (None, *BLOCKS):
            raise unknown(name, f"speculators_model_type = {head.speculators_model_type!r}")
        if WINDOW in layers.windows() and not of_speculators:
            raise unknown(name, "sliding windows, which only speculators defines for block heads")
        nested = head.dflash_config or _Block()
        block_size = head.block_size or nested.block_size
        mask_token = head.mask_token_id if nested.mask_token_id is None else nested.mask_token_id
        if block_size is None or mask_token is None:
            missing = "block_size" if block_size is None else "mask_token_id"
            raise SourceError(f"the configuration of {name} has no {missing}", AGAIN)
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
            raise unknown(name, f"markov_head_type = {kind!r}")
        confidence = dspark if head.enable_confidence_head is None else head.enable_confidence_head
        reads_token = confidence and head.confidence_head_with_markov is not False
        if reads_token and not rank:
            raise SourceError(f"{name} has a confidence head that reads the output of a Markov head, but no Markov head", AGAIN)
        return cls(
            layers=layers,
            target_hidden_size=head.target_hidden_size or layers.hidden_size,
            draft_vocab=head.draft_vocab_size or layers.vocab_size,
            ids=ids,
            mask_token=mask_token,
            block_size=block_size,
            target_layers=head.num_target_layers,
            from_anchor=dspark if head.sample_from_anchor is None else head.sample_from_anchor,
            windows_see_ahead=head.sliding_window_non_causal,
            markov_rank=rank,
            gated=bool(rank) and kind == "gated",
            confidence=confidence,
            confidence_reads_token=reads_token,
        )


def default_outputs(target_layers: int, layers: int) -> list[int]:
    """Return the layers whose outputs z-lab's heads read if their configuration lists none.

    They are spread evenly from the second layer to the third from last: `build_target_layer_ids` in z-lab/dflash.
    """
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + index * (target_layers - 4) / (layers - 1)) for index in range(layers)]
