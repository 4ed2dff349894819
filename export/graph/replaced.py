"""Replaces functions of torch and transformers during a trace.

Some have no equivalent in ONNX. Others would give a row different bits depending on the number of rows. A model that calls
another such function only needs an entry in `FUNCTIONS`, `METHODS` or `TORCH`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any

import torch
from transformers import PreTrainedModel


class Complex:
    """Complex numbers as pairs of real ones, with the operations of rotary embeddings (DeepSeek-V2, Llama-4)."""

    def __init__(self, pairs: torch.Tensor):
        """Keep real and imaginary parts [..., 2]."""
        self._pairs = pairs

    def __mul__(self, other: Any) -> Complex:
        if not isinstance(other, Complex):
            return Complex(self._pairs * other)
        (a, b), (c, d) = self._pairs.unbind(-1), other._pairs.unbind(-1)
        return Complex(torch.stack((a * c - b * d, a * d + b * c), -1))

    def __getitem__(self, index: Any) -> Complex:
        return Complex(self._pairs[index])

    def unsqueeze(self, dim: int) -> Complex:
        return Complex(self._pairs.unsqueeze(dim if dim >= 0 else dim - 1))

    @property
    def device(self) -> torch.device:
        return self._pairs.device

    def to(self, *_: Any, **__: Any) -> Complex:
        return self

    @staticmethod
    def polar(radius: torch.Tensor, angle: torch.Tensor) -> Complex:
        """Replace `torch.polar`."""
        return Complex(torch.stack((radius * angle.cos(), radius * angle.sin()), -1))

    def as_real(self) -> torch.Tensor:
        """Replace `torch.view_as_real`."""
        return self._pairs


def _gaussian_topk(mlp: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Replace a method of Gemma-3n's MLP, which computes the inverse error function of a constant."""
    mean, deviation = inputs.mean(-1, keepdim=True), inputs.std(-1, keepdim=True, unbiased=False)
    return torch.relu(inputs - (mean + deviation * NormalDist().inv_cdf(mlp.activation_sparsity)))


FUNCTIONS: dict[str, Callable[..., Any]] = {}  # `export/graph/recurrent_layers.py` adds its own
"""Replacements for transformers' functions, by their names in the modules of the models."""

METHODS: dict[str, Callable[..., Any]] = {"_gaussian_topk": _gaussian_topk}
"""The same for methods, by their names in the classes of a model's layers."""

TORCH: dict[str, Callable[..., Any]] = {"polar": Complex.polar, "view_as_complex": Complex, "view_as_real": Complex.as_real}
"""The same for torch's own."""


@contextmanager
def replaced(model: PreTrainedModel) -> Iterator[None]:
    """Replace the functions that the model's layers call."""
    classes = {type(each) for each in model.modules()}
    modules = {sys.modules[kind.__module__] for kind in classes}
    places: list[tuple[Any, str, Callable[..., Any]]] = [(torch, name, ours) for name, ours in TORCH.items()]
    places += [(module, name, ours) for module in modules for name, ours in FUNCTIONS.items() if hasattr(module, name)]
    places += [(kind, name, ours) for kind in classes for name, ours in METHODS.items() if name in vars(kind)]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, ours in places:
            setattr(place, name, ours)
        yield
    finally:
        for place, name, theirs in before:
            setattr(place, name, theirs)
