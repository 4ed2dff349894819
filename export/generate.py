"""Greedy answers of transformers' `generate`, for `outrider verify --against`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source


def greedy(source: Source, eos_token_ids: list[int]) -> Callable[[list[int], int], list[int]]:
    """Load a checkpoint in fp32, and return a function from a prompt and the largest number of new tokens to the new tokens.

    Raises:
        SourceError: the checkpoint cannot be read.
    """
    model = load_model(source, "fp32")
    model.set_attn_implementation("sdpa")
    model.generation_config = type(model.generation_config)()  # penalties of the checkpoint's own would change its choices

    def generate(prompt: list[int], tokens: int) -> list[int]:
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=eos_token_ids or None,
            pad_token_id=0,  # of shorter sequences in a batch: there are none
        )
        return [int(token) for token in made[0, len(prompt) :]]

    return generate
