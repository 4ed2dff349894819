"""Read tensors of a checkpoint by name, without a model around them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outrider.errors import OutriderError, SourceError
from outrider.export.checkpoints.outlines import FileTensor, opened
from outrider.export.checkpoints.packed import packing_of, unpacked
from outrider.export.checkpoints.source import AGAIN, Source, reason_of

SAFETENSORS, INDEX, PYTORCH = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    try:
        yield
    except (OutriderError, MemoryError):
        raise
    except Exception as error:  # safetensors, json and torch raise errors of many types
        raise SourceError(f"cannot read the weights of {source.name}: {reason_of(error)}", AGAIN) from error


def tensor_files(source: Source) -> dict[str, str]:
    """Return the names of the tensors in a checkpoint's safetensors, each with its file; nothing for other formats.

    Raises:
        SourceError: the checkpoint cannot be read.
    """
    if source.options:
        return {}
    with _reading(source):
        if (index := source.file(INDEX)) is not None:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if (path := source.file(SAFETENSORS)) is None:
            return {}
        return dict.fromkeys(opened(path).keys(), SAFETENSORS)


def read_tensors(source: Source, files: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Read some of the tensors that `tensor_files` lists, with one weight for each module that is quantized; see `unpacked`.

    Raises:
        SourceError: they cannot be read, or do not fit each other.
        UnsupportedModelError: they are in a layout that is not read.
    """
    packing = packing_of(source.quantization(), source.name)
    with _reading(source):
        shards = {each: opened(source.file(each) or Path(source.location, each)) for each in sorted({*files.values()})}
        tensors: dict[str, Any] = {name: FileTensor(shards[file], name) for name, file in files.items()}
        if packing is not None:
            tensors = unpacked(tensors, packing)
        return {name: tensor[...] for name, tensor in tensors.items()}


def load_tensors(source: Source) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint, from safetensors or from PyTorch's format.

    Raises:
        SourceError: they cannot be read.
    """
    if files := tensor_files(source):
        return read_tensors(source, files)
    path = source.file(PYTORCH)
    if path is None:
        raise SourceError(f"{source.name} has no weights", f"a head needs {SAFETENSORS}, {INDEX} or {PYTORCH}")
    with _reading(source):
        loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(each, torch.Tensor) for each in loaded.values()):
            raise ValueError(f"{PYTORCH} contains more than tensors")
    return loaded
