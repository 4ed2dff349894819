"""Stores weights that two graphs have in common, such as an embedding, only once."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo

from outrider.bundle.manifest import READS_FEATURES, WEIGHTS, model_file

SMALLEST = 1 << 16  # bytes; smaller weights are not worth sharing
BEGINNING = 4096  # bytes; weights are only compared as a whole if their beginnings are equal
ALIGNMENT = 4096  # of large weights in a file, so that they can be mapped into memory


def share_with_target(folder: Path, roles: Collection[str], target: Iterable[str] = (model_file("target"),)) -> None:
    """Let the graphs of the target, and the draft heads in a folder, use the weights of earlier ones wherever theirs are equal.

    Args:
        target: the paths of the target's graphs in the folder, one, or one for each stage.
    """
    first, *others = target
    done = [folder / first]
    for name in (*others, *(model_file(role) for role in READS_FEATURES if role in roles)):
        share_weights(folder / name, done)
        done.append(folder / name)


def share_weights(graph: Path, others: Iterable[Path]) -> None:
    """Let the graph at `graph` use the weights of the graphs at `others` wherever its own are equal.

    Each graph has its weights in a file beside it. The shared weights are removed from the file of `graph`. All graphs must be
    in one folder, because runtimes refuse graphs that name files elsewhere.
    """
    model = onnx.load(graph, load_external_data=False)
    known: dict[tuple[Any, ...], list[onnx.TensorProto]] = defaultdict(list)
    for other in others:
        assert graph.parent == other.parent
        for tensor in _external(onnx.load(other, load_external_data=False)):
            if _place(tensor)[2] >= SMALLEST:
                known[_kind(graph.parent, tensor)].append(tensor)
    own = []
    for tensor in _external(model):
        same = (each for each in known[_kind(graph.parent, tensor)] if _same(graph.parent, tensor, each))
        if (found := next(same, None)) is None:
            own.append(tensor)
        else:
            _refer(tensor, *_place(found))
    _write_own(graph, own)
    onnx.save(model, graph)


def keep_own_weights(source: Path, graph: Path) -> None:
    """Copy the graph at `source` to `graph`, with all weights in its own file."""
    onnx.save(onnx.load(source), graph, save_as_external_data=True, location=graph.name + WEIGHTS, size_threshold=1024)


def _external(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [each for each in model.graph.initializer if each.data_location == onnx.TensorProto.EXTERNAL]


def _place(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    info = ExternalDataInfo(tensor)
    return info.location, info.offset or 0, info.length or 0


def _kind(folder: Path, tensor: onnx.TensorProto) -> tuple[Any, ...]:
    """Return what equal weights have in common, and few others do."""
    location, offset, size = _place(tensor)
    with (folder / location).open("rb") as file:
        file.seek(offset)
        return tensor.data_type, *tensor.dims, size, file.read(min(size, BEGINNING))


def _same(folder: Path, tensor: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    ours, theirs = (np.memmap(folder / name, np.uint8, "r", at, (size,)) for name, at, size in map(_place, (tensor, other)))
    return bool(np.array_equal(ours, theirs))


def _refer(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def _write_own(graph: Path, tensors: list[onnx.TensorProto]) -> None:
    """Replace a graph's file of weights with one that has only those of `tensors`."""
    path, partial = graph.with_name(graph.name + WEIGHTS), graph.with_name(graph.name + ".partial")
    with partial.open("wb") as file:
        for tensor in tensors:
            location, offset, length = _place(tensor)
            file.write(bytes(-file.tell() % (ALIGNMENT if length >= ALIGNMENT else 8)))
            at = file.tell()
            with (graph.parent / location).open("rb") as source:
                source.seek(offset)
                while length and (block := source.read(min(length, 1 << 22))):
                    file.write(block)
                    length -= len(block)
            _refer(tensor, path.name, at, file.tell() - at)
    shutil.move(partial, path)
