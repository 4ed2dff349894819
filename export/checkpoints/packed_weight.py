"""The weight of a quantized module, which is computed from the checkpoint's tensors when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from outrider.errors import SourceError
from outrider.export.checkpoints.source import AGAIN

GROUPED = frozenset({"integers", "scales"})  # of `integers.CONTENTS`
OTHERWISE = "export the checkpoint that it was made from, or a GGUF file of it"

Parts = Mapping[str, Any]
"""The tensors of a module, by the last part of their names."""


class PackedWeight:
    """The weight of one module, float32 [N, K]."""

    def __init__(self, name: str, shape: tuple[int, ...], read: Callable[[], Any], contents: frozenset[str] = frozenset()):
        """Make one.

        Args:
            name: the module's.
            shape: (N, K).
            read: returns `Integers` that have these contents; without contents, the weight.
            contents: those of `integers.CONTENTS` that matter.
        """
        self.empty, self.contents = torch.empty(shape, device="meta"), contents
        self._name, self._read = name, read

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._checked(lambda: self._read().weight() if self.contents else self._read())

    def content(self, name: str) -> torch.Tensor:
        """Return one of `integers.CONTENTS`, float32 [N, K]. There must be contents.

        Raises:
            SourceError: a tensor is missing, or does not fit the others.
        """
        return self._checked(lambda: self._read().content(name))

    def _checked(self, read: Callable[[], Any]) -> torch.Tensor:
        try:
            weight: torch.Tensor = read()
        except KeyError as error:
            raise SourceError(f"{self._name} has no tensor {error}", AGAIN) from error
        except (RuntimeError, ValueError, IndexError) as error:  # sizes that do not fit each other
            raise SourceError(f"the weights of {self._name} do not fit each other: {error}", AGAIN) from error
        if weight.shape != self.empty.shape:
            raise SourceError(f"{self._name} has {tuple(weight.shape)} weights, not {tuple(self.empty.shape)}", AGAIN)
        return weight.contiguous()


def groups_of(inputs: int, count: int) -> torch.Tensor:
    """Return the group of each input, int64 [K], of `count` groups of equal size."""
    if inputs % count:
        raise ValueError(f"{inputs} inputs in {count} groups")
    return torch.arange(inputs) // (inputs // count)
