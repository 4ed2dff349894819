"""Tuned rounding to int4 by the AutoRound package (`--method auto-round`)."""

from __future__ import annotations

import logging

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from outrider.errors import UnsupportedModelError, UsageError
from outrider.export.checkpoints.source import reason_of
from outrider.export.checkpoints.tokenizer import TokenizerFiles
from outrider.export.graph.features import FEATURE_MIXER
from outrider.export.heads.short_head import output_head
from outrider.export.weights.rounding import Rounding

PIECE_TOKENS, MAX_PIECES = 512, 128  # of the calibration text
BATCH = 8  # pieces per step
ITERATIONS = 50  # AutoRound's own "light" recipe; its default of 200 gains little more


def tune(model: PreTrainedModel, rounding: Rounding, tokenizer: TokenizerFiles, positions: int | None) -> None:
    """Round all linear layers except the head to int4 with AutoRound (SignRound, arXiv:2309.05516), tuned on a text.

    The weights stay floating-point numbers. Each is an integer times the layer's new attribute `scale`, float32 [N, K / block].

    Raises:
        UsageError: the text is too short, or the package is not installed.
        UnsupportedModelError: AutoRound fails.
    """
    encoder = Tokenizer.from_str(tokenizer.json)
    pieces = _pieces(encoder, rounding.text, min(PIECE_TOKENS, positions or PIECE_TOKENS))
    try:
        from auto_round import AutoRound
    except ImportError as error:
        message = f"--method auto-round needs a package that is not installed: {error}"
        raise UsageError(message, "pip install 'outrider[quantize]'") from error
    logging.getLogger("autoround").setLevel(logging.WARNING)
    try:
        AutoRound(
            model,
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=encoder),
            bits=4,
            group_size=rounding.max_block(4),
            sym=True,
            data_type="int_sym_gptq",  # its other symmetric type has negative scales
            scale_dtype="fp32",
            amp=False,  # AMP would compute in bf16
            iters=ITERATIONS,
            dataset=[{"input_ids": piece, "attention_mask": torch.ones_like(piece)} for piece in pieces],
            nsamples=len(pieces),
            seqlen=pieces[0].shape[1],
            batch_size=BATCH,
            layer_config=_layer_config(model, rounding),
            device_map="cpu",
            enable_torch_compile=False,
        ).quantize()
    except Exception as error:  # AutoRound's errors share no base class
        message = f"AutoRound cannot round {type(model).__name__}: {reason_of(error)}"
        raise UnsupportedModelError(message, "export with --method rtn") from error
    model.requires_grad_(False)


def _pieces(encoder: Tokenizer, text: str, length: int) -> list[torch.Tensor]:
    """Return the text as int64 [1, length] pieces."""
    tokens = encoder.encode(text, add_special_tokens=False).ids
    starts = range(0, len(tokens) - length + 1, length)[:MAX_PIECES]
    pieces = [torch.tensor([tokens[start : start + length]]) for start in starts]
    if len(pieces) < BATCH:
        raise UsageError(
            f"the calibration text has {len(tokens):,} tokens, but needs at least {BATCH * length:,}",
            f"use a longer text, up to {MAX_PIECES * length:,} tokens",
        )
    return pieces


def _layer_config(model: PreTrainedModel, rounding: Rounding) -> dict[str, dict[str, int | str]]:
    """Return AutoRound's settings for layers that differ from the default. AutoRound skips the head by itself."""
    head = output_head(model)
    config: dict[str, dict[str, int | str]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or module is head or name.startswith(FEATURE_MIXER):
            continue
        block = None if isinstance(module, Conv1D) else rounding.block_for(module.in_features, 4)
        if block is None:
            config[name] = {"bits": 16, "data_type": "float"}
        elif block != rounding.max_block(4):
            config[name] = {"bits": 4, "group_size": block}
    return config
