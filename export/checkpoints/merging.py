"""Merge LoRA adapters into a model while its weights stream through."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import SourceError, UsageError
from outrider.export.checkpoints.adapters import Adapter
from outrider.export.checkpoints.outlines import FileTensor
from outrider.export.checkpoints.streamed import Streamed


class _Product(NamedTuple):
    """What an adapter adds to a weight."""

    a: FileTensor  # [rank, inputs]
    b: FileTensor  # [outputs, rank]
    scale: float
    is_transposed: bool  # whether the weight is [inputs, outputs]


def merge(adapters: Sequence[Adapter], modules: Mapping[str, nn.Module], weights: Streamed) -> None:
    """Have `weights` add adapters to the weights of a model whenever they are read, in fp32.

    One of two tied weights can change, as in the model that was trained. PEFT's merge changes both.

    Args:
        adapters: may also change modules that `weights` does not follow, such as a vision tower.
        modules: those of the whole model, by name.
        weights: those of the part that is exported.

    Raises:
        SourceError: an adapter cannot be read, or does not fit the model.
        UsageError: two adapters replace the same weights.
    """
    products: dict[str, list[_Product]] = defaultdict(list)
    replaced: dict[str, str] = {}
    for adapter in adapters:
        contents, name = adapter.contents(), adapter.source.name
        file: Any = safe_open(adapter.file(), framework="pt", backend="pread")
        for parameter, (key, shape) in contents.whole.items():
            path, _, own = parameter.rpartition(".")
            _check(adapter, parameter, getattr(modules.get(path), own, None), shape)
            if parameter in replaced:
                raise UsageError(f"{replaced[parameter]} and {name} both replace {parameter}", "leave one of them out")
            replaced[parameter] = name
            weights.change(modules[path], own, functools.partial(_replaced, FileTensor(file, key)))
        for path, factors in contents.factors.items():
            module = modules.get(path)
            kind = nn.Embedding if factors.is_table else nn.Linear | Conv1D
            if module is not None and not isinstance(module, kind):
                raise SourceError(f"{name} is for another {path} than the target's {type(module).__name__}", adapter.misfit)
            is_transposed = isinstance(module, nn.Embedding | Conv1D)
            shape = factors.shape[::-1] if is_transposed else factors.shape
            _check(adapter, f"{path}.weight", getattr(module, "weight", None), shape)
            a, b = (FileTensor(file, factors.names[matrix]) for matrix in "AB")
            products[path].append(_Product(a, b, factors.scale, is_transposed))
    for path, added in products.items():
        weights.change(modules[path], "weight", functools.partial(_added, added))


def _check(adapter: Adapter, parameter: str, found: Any, shape: tuple[int, ...]) -> None:
    """Refuse an adapter for a parameter that the model lacks, or that has another shape."""
    name = adapter.source.name
    if not isinstance(found, nn.Parameter):
        raise SourceError(f"{name} is for a model with {parameter}, which the target lacks", adapter.misfit)
    if tuple(found.shape) != shape:
        sizes = f"{list(shape)}, not the target's {list(found.shape)}"
        raise SourceError(f"{name} is for a {parameter} of the shape {sizes}", adapter.misfit)


def _replaced(tensor: FileTensor, weight: torch.Tensor) -> torch.Tensor:
    return tensor[...].to(weight.dtype)


def _added(products: Sequence[_Product], weight: torch.Tensor) -> torch.Tensor:
    """Return weight + scale B A, as PEFT computes it, but rounded only once."""
    total = weight.float()
    for each in products:
        product = each.b[...].float() @ each.a[...].float()
        total = (product.T if each.is_transposed else product).mul_(each.scale).add_(total)
    return total.to(weight.dtype).contiguous()
