"""Read the large weights of a model layer by layer, where a pass, a rounding or a graph needs them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn
from transformers import PreTrainedModel

from outrider.errors import SourceError
from outrider.export.checkpoints.outlines import Outlined, part_of
from outrider.export.checkpoints.source import AGAIN
from outrider.export.graph.untouched import TRANSPOSED, UNTOUCHED, Untouched
from outrider.progress import SILENT, Progress

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


class Streamed:
    """The large weights of a model, most of the time on the disk.

    They are in memory during the passes of their layer, within `part` and `of`, and after `keep`. Until then, parameters are
    on torch's meta device.
    """

    def __init__(self, scratch: Path | None = None, progress: Progress = SILENT) -> None:
        """Make one for a model whose weights are all in memory.

        Args:
            scratch: a folder for temporary files, for what `store` gets; None to keep that in memory.
            progress: advances by 1 for each of `parts` that is read.
        """
        self._scratch, self._progress = scratch, progress
        self._stored: list[mmap.mmap] = []
        self._model: PreTrainedModel | None = None
        self._checkpoint = Outlined()
        self._parts: dict[str, list[list[str]]] = defaultdict(list)  # large parameters, by part; a tied one has several names
        self._part_of: dict[str, str] = {}
        self._empty: dict[str, nn.Parameter] = {}
        self._changed: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = defaultdict(list)  # in this order
        self._uses: Counter[str] = Counter()
        self._last: str | None = None  # the part that `read` has loaded
        self._hooks: list[Any] = []

    def follow(self, model: PreTrainedModel, checkpoint: Outlined) -> None:
        """Read weights of this model from now on, which was loaded from this checkpoint."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_meta:
                names[id(parameter)].append(name)
                self._empty[name] = parameter.requires_grad_(False)
        self._model, self._checkpoint = model, checkpoint
        for tied in names.values():
            part = next((part for part in map(part_of, tied) if part in checkpoint.sources), part_of(tied[0]))
            self._parts[part].append(tied)
            self._part_of.update(dict.fromkeys(tied, part))
        self._follow_passes()

    def _follow_passes(self) -> None:
        """Have weights in memory during the passes of their part."""
        self._stop_following()
        assert self._model is not None
        for part, owner in {(part, part_of(name)) for name, part in self._part_of.items()}:
            module = self._model.get_submodule(owner)
            self._hooks.append(module.register_forward_pre_hook(lambda *_, part=part: self._enter(part)))
            self._hooks.append(module.register_forward_hook(lambda *_, part=part: self._leave(part), always_call=True))

    def _stop_following(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, part: str) -> None:
        self._uses[part] += 1
        if self._uses[part] == 1:
            self._load(part)

    def _leave(self, part: str) -> None:
        self._uses[part] -= 1
        if not self._uses[part]:
            self._drop(part)

    def _load(self, part: str) -> None:
        """Read the weights of a part.

        Raises:
            SourceError: a weight is not in the file any more.
        """
        if not self._parts.get(part):
            return
        assert self._model is not None
        self._checkpoint.read(self._model, part)
        for tied in self._parts[part]:
            holders = {name: module for name in tied if (module := self._holder(name)) is not None}
            found: list[nn.Parameter] = [getattr(module, _own(name)) for name, module in holders.items()]
            value = next((each for each in found if not each.is_meta), None)
            if value is None:
                if holders:
                    raise SourceError(f"the weight {tied[0]} cannot be read", AGAIN)
                continue
            for name, module in holders.items():
                changed: torch.Tensor = value
                for change in self._changed.get(name, ()):
                    changed = change(changed)
                changed = changed if changed is value else nn.Parameter(changed)
                setattr(module, _own(name), changed.requires_grad_(False))
        self._progress.advance(1)

    def _drop(self, part: str) -> None:
        for name in [name for tied in self._parts.get(part, ()) for name in tied]:
            if (module := self._holder(name)) is not None:
                setattr(module, _own(name), self._empty[name])
        self._drop_pages()

    def _drop_pages(self) -> None:
        for each in self._stored:
            each.madvise(mmap.MADV_DONTNEED)
        if _trim is not None:
            _trim(0)  # otherwise what many small pieces took stays with the process

    def _holder(self, name: str) -> nn.Module | None:
        """Return the module that still has this parameter, or None."""
        assert self._model is not None
        module: nn.Module = self._model
        for step in name.split(".")[:-1]:
            following = module._modules.get(step)
            if following is None:
                return None
            module = following
        return module if module._parameters.get(_own(name)) is not None else None

    @property
    def has_integers(self) -> bool:
        """Whether the checkpoint stores weights as integers; then `contents` returns them."""
        return self._checkpoint.has_integers

    @property
    def without_scales(self) -> bool:
        """Whether the checkpoint has scales of activations or caches, which are not read."""
        return self._checkpoint.without_scales

    def contents(self, part: str, content: str) -> dict[tuple[str, ...], torch.Tensor]:
        """Return one of `integers.CONTENTS` of the part's weights that have it, float32, by the names of tied parameters."""
        if self._model is None:
            return {}
        self._checkpoint.read_content(self._model, part, content)
        found = {}
        for tied in self._parts[part]:
            values = [getattr(module, _own(name)) for name in tied if (module := self._holder(name)) is not None]
            if (value := next((each for each in values if not each.is_meta), None)) is not None:
                found[tuple(tied)] = value.detach()
        self._drop(part)
        return found

    @property
    def parts(self) -> list[str]:
        """The names of the parts, in the model's order."""
        return list(self._parts)

    @contextmanager
    def part(self, *names: str) -> Iterator[None]:
        """Have the weights of some parts in memory."""
        with ExitStack() as entered:
            for name in names:
                entered.callback(self._leave, name)
                self._enter(name)
            yield

    def of(self, *modules: nn.Module) -> Any:
        """Have the weights of some modules in memory, in a `with` statement."""
        return self.part(*self._of(modules))

    def keep(self, *modules: nn.Module) -> None:
        """Read the weights of some modules, which then stay in memory."""
        self._keep(self._of(modules))

    def keep_all(self) -> None:
        """Read all weights, which then stay in memory."""
        self._keep(self.parts)

    def _keep(self, parts: Iterable[str]) -> None:
        for part in parts:
            if not self._uses[part]:
                self._load(part)
            for name in [name for tied in self._parts.pop(part) for name in tied]:
                del self._part_of[name], self._empty[name]
        if self._model is not None:
            self._follow_passes()

    def _of(self, modules: Iterable[nn.Module]) -> list[str]:
        wanted = {id(each) for module in modules for each in module.modules()}
        return list(dict.fromkeys(part for name, part in self._part_of.items() if id(self._holder(name)) in wanted))

    def change(self, module: nn.Module, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `change` to a module's parameter, after earlier ones, now or whenever it is read.

        One of another module that is tied stays.
        """
        places = [each for each in self._part_of if self._holder(each) is module and _own(each) == name]
        parameter = getattr(module, name)
        if not parameter.is_meta:
            setattr(module, name, nn.Parameter(change(parameter), requires_grad=False))
        for place in places:
            self._changed[place].append(change)
            self._empty[place] = nn.Parameter(torch.empty_like(self._empty[place]), requires_grad=False)

    def store(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in a temporary file, which is mapped.

        Raises:
            OSError: the disk is full.
        """
        if self._scratch is None or not tensor.numel():
            return tensor
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk would end the process at the first write
            self._stored.append(mmap.mmap(file.fileno(), tensor.nbytes))
        return torch.frombuffer(self._stored[-1], dtype=tensor.dtype).reshape(tensor.shape).copy_(tensor)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Give all parameters memory that nothing touches, so that the model can be traced without its weights.

        These parameters have the attribute `UNTOUCHED`.
        """
        real: dict[int, Any] = {
            id(each): nn.Parameter(torch.empty_like(each, device="cpu"), requires_grad=False) for each in self._empty.values()
        }
        for parameter in real.values():
            setattr(parameter, UNTOUCHED, True)
        self._stop_following()
        try:
            for name, empty in self._empty.items():
                if (module := self._holder(name)) is not None:
                    setattr(module, _own(name), real[id(empty)])
            yield
        finally:
            for name, empty in self._empty.items():
                if (module := self._holder(name)) is not None:
                    setattr(module, _own(name), empty)
            if self._model is not None:
                self._follow_passes()

    def attach(self, graph: ir.Graph) -> None:
        """Make a graph that was traced within `tracing` read its weights when they are used."""
        for own, value in graph.initializers.items():
            name, _, axes = own.removeprefix("model.").partition(TRANSPOSED)
            if name in self._empty:
                value.const_value = self.lazy(value, functools.partial(self._as_tensor, name, [*map(int, axes)]))
        assert not any(isinstance(value.const_value, Untouched) for value in graph.initializers.values())

    def _as_tensor(self, name: str, axes: list[int]) -> TorchTensor:
        tensor = self.read(name)
        return TorchTensor(tensor.permute(axes).contiguous() if axes else tensor)

    def is_changed(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Return whether this change is made whenever the parameter is read."""
        return change in self._changed.get(name, ())

    def lazy(self, value: ir.Value, make: Callable[[], ir.TensorProtocol], dtype: ir.DataType | None = None) -> ir.LazyTensor:
        """Return a tensor for an initializer. Whenever it is used, `make` makes it, and pages of `store` are dropped."""

        def made() -> ir.TensorProtocol:
            self._drop_pages()
            return make()

        dtype = value.dtype if dtype is None else dtype
        assert dtype is not None
        assert isinstance(value.shape, ir.Shape)
        return ir.LazyTensor(made, dtype, value.shape, name=value.name)

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter. The weights of its part stay in memory until one of another part is read, or until `close`."""
        part = self._part_of[name]
        if part != self._last:
            self.close()
            self._last = part
            self._enter(part)
        parameter: torch.Tensor = getattr(self._holder(name), _own(name))
        return parameter.detach()

    def close(self) -> None:
        """Drop what `read` has loaded."""
        if self._last is not None:
            part, self._last = self._last, None
            self._leave(part)


def _own(name: str) -> str:
    return name.rpartition(".")[2]
