"""The configuration of an EAGLE-3 head, in any of the formats that `outrider.export.heads.eagle3` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.errors import SourceError
from outrider.export.checkpoints.source import EAGLE3, PEAGLE
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

IDS = "eagle_aux_hidden_state_layer_ids"


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
    mask_token_id: TokenId | None = None  # of P-EAGLE
    tie_word_embeddings: bool | None = None


class _EagleConfig(msgspec.Struct, frozen=True):
    """ModelOpt's `eagle_config`."""

    eagle_aux_hidden_state_layer_ids: list[LayerId] | None = None


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


class HeadConfig(msgspec.Struct, frozen=True):
    """What a head's configuration says, however it says it."""

    layers: Layers
    flags: Flags
    target_hidden_size: int
    draft_vocab: int
    ids: list[int] | None  # the features are what enters these layers of the target; None leaves it to the default
    tied: bool
    mask_token: int | None = None  # of a head that drafts several tokens in one pass (P-EAGLE)

    @classmethod
    def parse(cls, config: Mapping[str, Any], name: str) -> HeadConfig:
        """Read a `config.json`.

        Raises:
            SourceError: a value is missing or impossible.
            UnsupportedModelError: it has a key or a value that is not known here.
        """
        of_speculators = "transformer_layer_config" in config
        known = {*_Head.__struct_fields__} if of_speculators else {*_Head.__struct_fields__, *Layers.__struct_fields__} - {IDS}
        refuse_unknown(config, known, name)
        head = convert(config, _Head, name)
        layers = read_layers(config, (head.transformer_layer_config or {}) if of_speculators else None, name)
        eagle = head.eagle_config or {}
        for key, value in eagle.items():
            if key not in EAGLE_CONFIG or (EAGLE_CONFIG[key] is not None and value not in (EAGLE_CONFIG[key], None)):
                raise not_known(name, f"eagle_config.{key} = {value!r}")
        if head.speculators_model_type not in (None, EAGLE3, PEAGLE):
            raise not_known(name, f"speculators_model_type = {head.speculators_model_type!r}")
        if (head.speculators_model_type == PEAGLE) != (head.mask_token_id is not None):
            raise SourceError(
                f"the configuration of {name} has the speculators_model_type {head.speculators_model_type!r} and the"
                f" mask_token_id {head.mask_token_id}",
                "a parallel head has a mask token, and no other has",
            )
        if head.fc_norm and head.norm_before_fc:
            raise SourceError(
                f"the configuration of {name} has both fc_norm and norm_before_fc", "the features have one kind of norm"
            )
        ids = head.eagle_aux_hidden_state_layer_ids
        if not of_speculators:
            ids = [each + 1 for each in convert(eagle, _EagleConfig, name).eagle_aux_hidden_state_layer_ids or ()]
        return cls(
            layers,
            head,
            head.target_hidden_size or layers.hidden_size,
            head.draft_vocab_size or layers.vocab_size,
            sorted(ids) if ids else None,
            bool(head.tie_word_embeddings or layers.tie_word_embeddings),
            head.mask_token_id,
        )
