"""Exported graphs as the rewrites need them."""

from __future__ import annotations

import logging
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from outrider.engines.contract import INPUT_IDS


def load(path: Path) -> ir.Model:
    """Return the graph at `path`, ready to be rewritten."""
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    model = ir.load(path)
    common.ClearMetadataAndDocStringPass()(model)  # rewriting concatenates them, which doubles them with each layer
    return model


def read_batch_off_tokens(graph: ir.Graph) -> None:
    """Take the batch from the tokens instead of the cache: a slot's cache has one sequence, whatever the pass has."""
    ids = next(each for each in graph.inputs if each.name == INPUT_IDS)
    for node in graph:
        span = [node.attributes.get_int(name, 0) for name in ("start", "end")]
        value = node.inputs[0] if node.inputs else None
        if node.op_type == "Shape" and span == [0, 1] and value is not None and (value.name or "").startswith("past_"):
            node.replace_input_with(0, ids)
