"""Trace one layer of each kind, and write the other layers into the graph as copies of it.

A trace takes time for every node, and most decoders have dozens of layers that differ only in their weights. While a model runs
for a trace, `layers_once` leaves out each layer that has the same code, settings and arguments as an earlier one, and puts one
operator in its place. `export/graph/layer_copies.py` replaces these operators by copies of the earlier layer's nodes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.onnx.ops import symbolic_multi_out
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from outrider.export.graph.attention import AttentionPass
from outrider.export.graph.layer_copies import COPY, DOMAIN, ENTER, LAYER, LEAVE, TRACED

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
OWN = {"layer_idx", "training", "forward"}  # attributes that differ between layers of a kind


@dataclass(frozen=True)
class _Traced:
    """A layer that was traced."""

    name: str
    given: list[Any]  # its arguments, which stay alive so that their ids stay theirs
    returned: list[Any]
    structure: pytree.TreeSpec  # of what it returned
    results: list[torch.Tensor]  # among `returned`, and of its cache
    cache: Any
    calls: int  # of attention


class _Layers:
    """The layers of a model during one pass."""

    def __init__(self, model: PreTrainedModel, caches: Sequence[Any], attention: AttentionPass):
        self._config, self._caches, self._attention = model.config.get_text_config(), caches, attention
        self._traced: dict[str, _Traced] = {}
        self._began = set[str]()

    def run(self, name: str, layer: nn.Module, index: int, *arguments: Any, **options: Any) -> Any:
        """Run a layer, or leave it out. Its first tensor and its cache are its own; it shares the rest with its kind."""
        if name in self._began:  # in a recurrence over the layers (HRM), with the cache of another layer
            return type(layer).forward(layer, *arguments, **options)
        self._began.add(name)
        given, structure = pytree.tree_flatten((arguments, options))
        at = next(at for at, leaf in enumerate(given) if isinstance(leaf, torch.Tensor))
        cache = self._caches[index]
        inputs = [given[at], *cache.held]
        shared = (each if isinstance(each, PLAIN) else id(each) for each in [*given[:at], *given[at + 1 :]])
        sizes = [(each.dtype, each.dim()) for each in inputs]
        key = repr((structure, *shared, type(cache), sizes, _settings(layer), self._of_layer(index)))
        like = self._traced.get(key)
        if like is not None:
            results = _emit(COPY, inputs, {LAYER: name, TRACED: like.name}, like.results)
            self._attention.calls += like.calls
            return _returned(like, results, cache)
        given[at], *held = _emit(ENTER, inputs, {LAYER: name}, inputs)
        cache.hold(held, cache)
        others = [(each, [*each.held]) for each in self._caches if each is not cache]
        calls = self._attention.calls
        arguments, options = pytree.tree_unflatten(given, structure)
        returned, structure = pytree.tree_flatten(type(layer).forward(layer, *arguments, **options))
        if any(now is not then for each, held in others for now, then in zip(each.held, held, strict=True)):
            return pytree.tree_unflatten(returned, structure)  # it also writes to the cache of another layer
        results = [*(leaf for leaf in returned if isinstance(leaf, torch.Tensor)), *cache.held]
        like = _Traced(name, given, returned, structure, results, cache, self._attention.calls - calls)
        self._traced[key] = like
        return _returned(like, _emit(LEAVE, results, {LAYER: name}, results), cache)

    def _of_layer(self, index: int) -> list[Any]:
        """Return what the configuration says about one layer, in its lists over all layers."""
        lists = [each for each in vars(self._config).values() if isinstance(each, list)]
        return [each[index] for each in lists if len(each) == self._config.num_hidden_layers]


def _emit(
    operator: str, inputs: Sequence[torch.Tensor], attributes: dict[str, Any], like: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Emit an operator whose results have the shapes and dtypes of `like`."""
    dtypes, shapes = [each.dtype for each in like], [each.shape for each in like]
    return symbolic_multi_out(f"{DOMAIN}::{operator}", inputs, attributes, dtypes=dtypes, shapes=shapes, version=1)


def _returned(like: _Traced, results: Sequence[torch.Tensor], cache: Any) -> Any:
    """Give a cache its part of some results, and return the rest as the layer `like` returned them."""
    following = iter(results)
    returned = [next(following) if isinstance(leaf, torch.Tensor) else leaf for leaf in like.returned]
    cache.hold([*following], like.cache)
    return pytree.tree_unflatten(returned, like.structure)


def _settings(layer: nn.Module) -> list[Any]:
    """Return the classes, attributes and sizes of a layer's modules. An object is only equal to itself."""
    own = vars(nn.Module())
    found: list[Any] = []
    for name, module in layer.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key not in own.keys() | OWN}
        tensors = [*module._parameters.items(), *module._buffers.items()]
        sizes = [(key, None if each is None else (each.dtype, each.shape)) for key, each in tensors]
        found.append((name, type(module), {key: _plain(value) for key, value in attributes.items()}, sizes))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return [(key, _plain(each)) for key, each in value.items()]
    if isinstance(value, functools.partial):
        return [_plain(each) for each in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return id(value.__func__)  # of the module, whose settings are compared
    return value if isinstance(value, PLAIN) else id(value)


@contextmanager
def layers_once(model: PreTrainedModel, caches: Sequence[Any], attention: AttentionPass) -> Iterator[None]:
    """Leave out layers that are like earlier ones, in one pass of a model with these caches; see `write_layers`."""
    layers = _Layers(model, caches, attention)
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    wrapped = []
    for owner, modules in model.named_modules():
        if not isinstance(modules, nn.ModuleList) or any(step.isdecimal() for step in owner.split(".")):
            continue
        for name, layer in modules.named_children():
            indices = {each for module in layer.modules() if isinstance(each := getattr(module, "layer_idx", None), int)}
            is_tied = any(uses[id(each)] > 1 for each in layer.parameters())
            if len(indices) == 1 and (index := indices.pop()) < len(caches) and not is_tied:
                layer.forward = functools.partial(layers.run, f"{owner}.{name}", layer, index)
                wrapped.append(layer)
    try:
        yield
    finally:
        for layer in wrapped:
            del layer.forward  # the class still has it
