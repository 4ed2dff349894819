"""Graphs in a folder store the weights that they have in common once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from outrider.backends.rewriting.sharing import share_weights
from outrider.bundle.manifest import WEIGHTS

SHAPE = (256, 128)  # 128 KiB in fp32


def write(path: Path, weights: dict[str, Any]) -> None:
    """Write a graph that only has weights, in a file beside it."""
    tensors = [onnx.numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = onnx.helper.make_graph([], path.stem, [], [], tensors)
    onnx.save(onnx.helper.make_model(graph), path, save_as_external_data=True, location=path.name + WEIGHTS, size_threshold=0)


def test_only_weights_that_begin_alike_are_compared_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer has matrices of the same shapes, and those of a large target have hundreds of GB in pairs."""
    random = np.random.default_rng(0)
    earlier = {f"first.{layer}": random.standard_normal(SHAPE, dtype=np.float32) for layer in range(5)}
    later = {f"second.{layer}": random.standard_normal(SHAPE, dtype=np.float32) for layer in range(5)}
    later["equal"] = earlier["first.3"].copy()
    later["other at the end"] = earlier["first.2"].copy()
    later["other at the end"][-1, -1] += 1
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    write(first, earlier)
    write(second, later)
    whole, compare = list[int](), np.array_equal

    def counted(ours: Any, theirs: Any) -> bool:
        whole.append(ours.nbytes)
        return compare(ours, theirs)

    monkeypatch.setattr(np, "array_equal", counted)
    share_weights(second, [first])
    monkeypatch.undo()
    assert whole == [earlier["first.3"].nbytes] * 2
    tensors = {each.name: each for each in onnx.load(second, load_external_data=False).graph.initializer}
    places = {
        name: next(entry.value for entry in each.external_data if entry.key == "location") for name, each in tensors.items()
    }
    assert [name for name, place in places.items() if place == first.name + WEIGHTS] == ["equal"]
    for tensor in onnx.load(second).graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), later[tensor.name])
