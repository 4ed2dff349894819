"""The models that adapters are merged into. They have the same weights everywhere, which no random numbers promise."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

TOKENS = torch.arange(2, 8)[None]
CORNER = slice(0, 4)  # the rows of merged weights that are compared


def filled(model: PreTrainedModel) -> PreTrainedModel:
    """Give each weight a multiple of 1/1024."""
    for at, parameter in enumerate(model.parameters()):
        numbers = torch.arange(parameter.numel()) * (2 * at + 7919) % 257 - 128
        parameter.data = (numbers / 1024).reshape(parameter.shape)
    return model.eval()


def base_llama() -> PreTrainedModel:
    """A Llama whose MLPs have large matrices, which stream."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 288, "num_hidden_layers": 2, "attention_bias": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return filled(LlamaForCausalLM(LlamaConfig(**sizes, **heads)))


def base_gpt2() -> PreTrainedModel:
    """A GPT-2, whose matrices are transposed; those of attention are large."""
    return filled(
        GPT2LMHeadModel(
            GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=None)
        )
    )


BASES = {"llama": base_llama, "gpt2": base_gpt2}
