"""Weights that a checkpoint stores as integers: w = scale (integer - zero) + offset, with one scale for a group of inputs.

Inputs may also have factors, by which w is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CONTENTS = ("groups", "integers", "zeros", "scales", "offsets", "factors")
"""What quantized weights consist of. A tensor of a checkpoint that has `contents` returns each as float32 in its own shape."""


@dataclass(frozen=True, slots=True)
class Integers:
    """The weights of a module with N outputs and K inputs, in G groups of inputs."""

    values: torch.Tensor  # integers [N, K]
    scales: torch.Tensor  # float32 [N, G]
    groups: torch.Tensor  # int64 [K], the group of each input
    zeros: torch.Tensor | None = None  # integers [N, G]; None if all are 0
    factors: torch.Tensor | None = None  # float32 [K]; None if all are 1

    def weight(self) -> torch.Tensor:
        """Return the weights, float32 [N, K]."""
        values = self.values if self.zeros is None else self.values - self.zeros[:, self.groups]
        weight = values * self.scales[:, self.groups]
        return weight if self.factors is None else weight * self.factors

    def content(self, name: str) -> torch.Tensor:
        """Return one of `CONTENTS` for each weight, float32 [N, K]."""
        if name == "integers":
            return self.values.float()
        if name == "groups":
            return self.groups.float().expand(self.values.shape).contiguous()
        if name == "factors":
            return torch.ones(self.values.shape) if self.factors is None else self.factors.repeat(len(self.values), 1)
        each = {"zeros": self.zeros, "scales": self.scales}.get(name)
        return torch.zeros(self.values.shape) if each is None else each[:, self.groups].float()


class Content:
    """Stands for a tensor of a checkpoint when a loader should read one of `CONTENTS` and not the weights."""

    def __init__(self, tensor: Any, name: str):
        self._tensor, self._name = tensor, name

    def __getitem__(self, _: Any) -> torch.Tensor:
        content: torch.Tensor = self._tensor.content(self._name)
        return content
