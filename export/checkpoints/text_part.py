"""The text model inside a multimodal checkpoint.

transformers' own class reads the checkpoint, so that old and new names of weights are its concern. Then everything that reads
images, video or sound is removed.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from outrider.errors import UnsupportedModelError


def has_text_part(config: Any) -> bool:
    """Return whether a configuration is of a multimodal model that is not itself a causal language model."""
    kind = type(config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def keep_text_part(model: PreTrainedModel) -> None:
    """Make a multimodal model compute the logits of texts, with its decoder and head and no other modules.

    Raises:
        UnsupportedModelError: it has no decoder of its own, or no output head, or its texts are not causal.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is None or decoder is model or not isinstance(head, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} has no text model that can be taken out")
    if "token_type_ids" in inspect.signature(type(model).forward).parameters:  # they tell prompts from answers
        raise UnsupportedModelError(f"{type(model).__name__} reads prompts in both directions, not as a causal language model")
    _remove_others(model, {decoder, head})
    model.forward = functools.partial(_logits_of_text, decoder, head)


def _remove_others(module: nn.Module, kept: set[nn.Module]) -> None:
    """Remove the parameters of `module`, and the modules in it that neither are among those kept nor contain one."""
    for name, _ in list(module.named_parameters(recurse=False)):
        delattr(module, name)
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept & {*child.modules()}:
            _remove_others(child, kept)
        else:
            delattr(module, name)


def _logits_of_text(decoder: nn.Module, head: nn.Module, input_ids: torch.Tensor, **options: Any) -> CausalLMOutputWithPast:
    """Return the logits of int64 [B, S] as float [B, S, V], and the cache."""
    output = decoder(input_ids=input_ids, **options)
    return CausalLMOutputWithPast(logits=head(output.last_hidden_state), past_key_values=output.past_key_values)
