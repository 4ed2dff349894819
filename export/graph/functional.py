"""Replaces the operators of a captured program that write to a tensor by operators that return a new one.

This is what torch's functionalization does in a second trace. A write to a view becomes a new tensor for what it is a view of:
`x[:, 1].add_(1)` becomes `x' = select_scatter(x, x[:, 1] + 1, 1, 1)`. Where other views of it are used later, they are taken
again from the new tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten


def _turned_back(view: Any, _: Any, content: Any) -> tuple[Any, ...]:
    order = view.args[1]
    return _aten.permute.default, content, sorted(range(len(order)), key=lambda at: order[at] % len(order))


def _unsqueezed(view: Any, tensor: Any, content: Any) -> tuple[Any, ...]:
    if len(view.meta["val"].shape) == len(tensor.meta["val"].shape):  # a longer dimension stays
        return _aten.alias.default, content
    return _aten.unsqueeze.default, content, view.args[1]


# Operators that always return a view. From a view, its tensor and the view's new content, the functions make the operator that
# returns the tensor's new content, and its arguments. None if there is no such operator.
_VIEWS: dict[Any, Callable[[Any, Any, Any], tuple[Any, ...]] | None] = {
    _aten.slice.Tensor: lambda view, tensor, content: (_aten.slice_scatter.default, tensor, content, *view.args[1:]),
    _aten.select.int: lambda view, tensor, content: (_aten.select_scatter.default, tensor, content, *view.args[1:]),
    _aten.transpose.int: lambda view, _, content: (_aten.transpose.int, content, *view.args[1:]),
    _aten.permute.default: _turned_back,
    _aten.unsqueeze.default: lambda view, _, content: (_aten.squeeze.dim, content, view.args[1]),
    _aten.squeeze.dim: _unsqueezed,
    _aten.view.default: None,
    _aten.expand.default: None,
    _aten.alias.default: None,
    _aten.detach.default: None,
    _aten.detach_.default: None,
}


class WriteError(Exception):
    """A write cannot be replaced."""


def is_operator(node: Any) -> bool:
    """Return whether a node calls an operator of torch."""
    return isinstance(node.target, torch._ops.OpOverload)


def functionalize(program: torch.export.ExportedProgram, harmless: set[Any]) -> None:
    """Replace each operator that writes to a tensor.

    Args:
        harmless: operators that write to no tensor, whatever their schemas say.

    Raises:
        WriteError: an operator cannot be replaced. The program is then changed in part, and not to be used.
    """
    _Functionalization(program, harmless).run()


class _Functionalization:
    def __init__(self, program: torch.export.ExportedProgram, harmless: set[Any]):
        self._graph, self._signature, self._harmless = program.graph_module.graph, program.graph_signature, harmless
        self._written: dict[Any, Any] = {}  # by operators that write: what they write to, and return
        self._now: dict[Any, Any] = {}  # what has a tensor's content since it was written
        self._parents: dict[Any, Any] = {}  # of views
        self._stale: set[Any] = set()  # views that have to be taken again, because their tensor was written

    def run(self) -> None:
        for node in [*self._graph.nodes]:
            viewed = _viewed(node)
            for used in node.all_input_nodes:
                if (current := self._current(used, node)) is not used:
                    node.replace_input_with(used, current)
                    if node.op == "output":
                        self._signature.replace_all_uses(used.name, current.name)
            if is_operator(node) and node.target._schema.is_mutable and node.target.overloadpacket not in self._harmless:
                if viewed is None:
                    raise WriteError(f"{node} does not return what it writes to")
                self._replace(node, self._written.get(viewed, viewed))
            elif viewed is not None:
                self._parents[node] = self._written.get(viewed, viewed)
        for node in reversed(self._written):
            if not node.users:  # a copy, whose source stands for it
                self._graph.erase_node(node)

    def _current(self, node: Any, user: Any) -> Any:
        """Return what has a node's content now; a view is taken again before its user, if it has to be."""
        node = self._written.get(node, node)
        if node not in self._stale:
            return self._now.get(node, node)
        parent = self._current(self._parents[node], user)
        if node.target not in _VIEWS:
            raise WriteError(f"{node} may be a view or a copy")
        with self._graph.inserting_before(user):
            taken = self._graph.call_function(node.target, (parent, *node.args[1:]), node.kwargs)
        taken.meta = dict(node.meta)
        self._now[node] = taken
        self._stale.remove(node)
        return taken

    def _replace(self, node: Any, written: Any) -> None:
        *views, base = self._chain(written)
        if not (is_operator(base) or base.target is operator.getitem):
            raise WriteError(f"{node} writes to an input")
        value = self._value(node, written)
        self._written[node] = written
        self._now[written] = value
        last = node
        for view in views:
            tensor = self._parents[view]
            put_back = _VIEWS.get(view.target)
            if put_back is None or view.kwargs:
                raise WriteError(f"what is written to {view} cannot be put back")
            target, *arguments = put_back(view, self._now.get(tensor, tensor), value)
            with self._graph.inserting_after(last):
                last = self._graph.call_function(target, tuple(arguments))
            last.meta = dict(tensor.meta)
            self._now[tensor] = value = last
        self._stale |= {view for view in self._parents if self._chain(view)[-1] is base} - {*views}

    @staticmethod
    def _value(node: Any, written: Any) -> Any:
        """Return the new content of what a node writes to; the node itself, without the write, unless it copies."""
        packet = node.target.overloadpacket
        if packet is _aten.copy_:
            source, target = node.args[1].meta["val"], written.meta["val"]
            if source.dtype != target.dtype or [*map(str, source.shape)] != [*map(str, target.shape)]:
                raise WriteError(f"{node} converts or repeats what it copies")
            return node.args[1]
        name = packet.__name__
        functional = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
        if not hasattr(functional, node.target._overloadname):
            raise WriteError(f"{node} has no functional twin")
        node.target = getattr(functional, node.target._overloadname)
        return node

    def _chain(self, node: Any) -> list[Any]:
        """Return a node, what it is a view of, what that is a view of, and so on."""
        chain = [node]
        while chain[-1] in self._parents:
            chain.append(self._parents[chain[-1]])
        return chain


def _viewed(node: Any) -> Any:
    """Return what a node may be a view of; None if it is a tensor of its own."""
    if node.target is operator.getitem:
        return _viewed(node.args[0])
    aliases = is_operator(node) and any(value.alias_info for value in node.target._schema.returns)
    return node.args[0] if aliases and isinstance(node.args[0], fx.Node) else None
