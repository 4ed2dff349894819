"""The configuration of an EAGLE-3 head, in any of the formats that `outrider.export.heads.eagle3` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.errors import SourceError
from outrider.export.checkpoints.source import EAGLE3, PEAGLE
from outrider.export.heads.draft_head_config import HeadConfig, HeadFields, LayerId, read_fields, unknown

IDS = "eagle_aux_hidden_state_layer_ids"


class _EagleConfig(msgspec.Struct, frozen=True):
    """ModelOpt's `eagle_config`."""

    eagle_aux_hidden_state_layer_ids: list[LayerId] | None = None


class Eagle3Fields(HeadFields, frozen=True, kw_only=True):
    """The keys of an EAGLE-3 head's `config.json`."""

    # Norms that not every head has:
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    eagle_config: _EagleConfig | None = None
    eagle_aux_hidden_state_layer_ids: list[LayerId] | None = None  # of speculators


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


class Eagle3Config(HeadConfig, frozen=True, kw_only=True):
    """The configuration of an EAGLE-3 head."""

    fields: Eagle3Fields

    @classmethod
    def parse(cls, config: Mapping[str, Any], name: str) -> Eagle3Config:
        """Read a `config.json`.

        Raises:
            SourceError: a value is missing or impossible.
            UnsupportedModelError: a key or a value is unknown.
        """
        head, layers = read_fields(config, Eagle3Fields, name)
        of_speculators = head.transformer_layer_config is not None
        if not of_speculators and head.eagle_aux_hidden_state_layer_ids is not None:
            raise unknown(name, f"{IDS} = {head.eagle_aux_hidden_state_layer_ids}")
        for key, value in (config.get("eagle_config") or {}).items():
            if key not in EAGLE_CONFIG or (EAGLE_CONFIG[key] is not None and value not in (EAGLE_CONFIG[key], None)):
                raise unknown(name, f"eagle_config.{key} = {value!r}")
        if head.speculators_model_type not in (None, EAGLE3, PEAGLE):
            raise unknown(name, f"speculators_model_type = {head.speculators_model_type!r}")
        if (head.speculators_model_type == PEAGLE) != (head.mask_token_id is not None):
            raise SourceError(
                f"the configuration of {name} has the speculators_model_type {head.speculators_model_type!r} and the"
                f" mask_token_id {head.mask_token_id}",
                "a parallel head must have a mask token, and other heads must not",
            )
        if head.fc_norm and head.norm_before_fc:
            raise SourceError(f"the configuration of {name} has both fc_norm and norm_before_fc", "remove one of them")
        ids = head.eagle_aux_hidden_state_layer_ids or []
        if head.eagle_config is not None and not of_speculators:
            ids = [each + 1 for each in head.eagle_config.eagle_aux_hidden_state_layer_ids or ()]
        return cls(
            layers=layers,
            target_hidden_size=head.target_hidden_size or layers.hidden_size,
            draft_vocab=head.draft_vocab_size or layers.vocab_size,
            ids=sorted(ids),
            tied=bool(head.tie_word_embeddings or layers.tie_word_embeddings),
            mask_token=head.mask_token_id,
            fields=head,
        )
