"""What the tests of fused graphs share: the capacity of their caches, and the operators of a graph."""

from __future__ import annotations

from pathlib import Path

import onnx

CAPACITY = 160


def operators(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in onnx.load(path, load_external_data=False).graph.node:
        found[node.op_type] = found.get(node.op_type, 0) + 1
    return found
