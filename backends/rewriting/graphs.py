"""Loading, rewriting and saving exported graphs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import RewriteRuleSet

from outrider.bundle.manifest import WEIGHTS
from outrider.engines.contract import INPUT_IDS
from outrider.engines.threads import thread_count

IN_GRAPH = 256  # bytes; larger tensors are in the file of weights, as in exports


def load(path: Path) -> ir.Model:
    """Return the graph at `path`, ready to be rewritten."""
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    model = ir.load(path)
    common.ClearMetadataAndDocStringPass()(model)  # rewriting concatenates them, which doubles them with each layer
    return model


def apply(model: ir.Model, kind: Any, *arguments: Any) -> dict[str, int]:
    """Apply the rule `kind(*arguments)`, and remove the nodes that are then unused.

    Returns:
        How often the rule was applied, by its name.
    """
    rule = kind.rule(*arguments)
    count = RewriteRuleSet([rule]).apply_to_model(model)
    common.RemoveUnusedNodesPass()(model)
    return {rule.name: count}


def save(model: ir.Model, output: Path) -> None:
    """Merge common subexpressions, and write the graph and its weights, which every core computes a part of.

    What an export has in its file of weights stays in one: onnx-ir would close the file of what moves into the graph, and fail
    when it is read.
    """
    common.CommonSubexpressionEliminationPass()(model)
    weights = output.name + WEIGHTS
    ir.save(model, output, external_data=weights, size_threshold_bytes=IN_GRAPH, max_workers=thread_count())


def input_named(graph: ir.Graph, name: str) -> ir.Value:
    """Return the input of that name."""
    return next(each for each in graph.inputs if each.name == name)


def read_batch_off_tokens(graph: ir.Graph) -> None:
    """Compute the batch from the tokens instead of the cache: a slot's cache has one sequence, whatever the pass has."""
    ids = next((each for each in graph.inputs if each.name == INPUT_IDS), None)
    for node in graph:
        span = [node.attributes.get_int(name, 0) for name in ("start", "end")]
        value = node.inputs[0] if node.inputs else None
        if node.op_type == "Shape" and span == [0, 1] and value is not None and (value.name or "").startswith("past_"):
            node.replace_input_with(0, ids)
