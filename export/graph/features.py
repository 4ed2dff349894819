"""The features for a draft head: the inputs of some decoder layers of its target, and the module that mixes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModelError

FEATURE_MIXER = "feature_mixer"  # a submodule that a target gets for a draft head


def feature_mixer(model: nn.Module) -> Any:
    """Return the submodule of a target that makes the features for a draft head, or None."""
    return getattr(model, FEATURE_MIXER, None)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model's decoder.

    Raises:
        UnsupportedModelError: it has no list of them.
    """
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() or model  # a vision tower may have as many layers
    lists = (each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == count)
    layers = next(lists, None)
    if layers is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} layers that a draft head could read")
    return layers


@contextmanager
def entering(model: PreTrainedModel, ids: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Collect the inputs of the decoder layers `ids` in a pass, in that order; the number of layers means the last output.

    Raises:
        UnsupportedModelError: the model has no list of its layers.
    """
    found: list[torch.Tensor] = []
    if not ids:
        yield found
        return
    layers = decoder_layers(model)
    count = len(layers)
    hidden: dict[int, torch.Tensor] = {}

    def entered(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], options: dict[str, torch.Tensor]) -> None:
            hidden[index] = inputs[0] if inputs else options["hidden_states"]

        return hook

    def left(_: nn.Module, inputs: Any, output: Any) -> None:
        hidden[count] = output if isinstance(output, torch.Tensor) else output[0]

    hooks = [layers[index].register_forward_pre_hook(entered(index), with_kwargs=True) for index in {*ids} - {count}]
    if count in ids:
        hooks.append(layers[-1].register_forward_hook(left))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found += [hidden[index] for index in ids]
