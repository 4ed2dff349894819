"""Applies every rewrite to a graph."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.ort_fusions.rms_normalization import rms_normalization_ruleset
from onnxscript.rewriter.ort_fusions.skip_normalization import skip_rms_normalization_ruleset

from outrider.backends.onnxruntime.fusion.attention import CachedAttention, SpareRow
from outrider.backends.onnxruntime.fusion.logits import LastRows
from outrider.backends.onnxruntime.fusion.matching import MICROSOFT
from outrider.backends.onnxruntime.fusion.products import Products
from outrider.backends.onnxruntime.fusion.reshapes import Unsplit
from outrider.backends.onnxruntime.fusion.rotary import Rotary
from outrider.engines.contract import INPUT_IDS


def fuse(path: Path, output: Path, capacity: int, steady: bool, batch: int) -> tuple[dict[str, int], list[str]]:
    """Fuse the graph at `path`, for caches of `capacity` positions and a spare one, and write it and its weights to `output`.

    The fused graph has the inputs and outputs of the exported one. For more than one sequence, `past_*` and `present_*` belong
    to the first; those of sequence i of a pass are `past_*.i` and `present_*.i`. `GroupQueryAttention` knows how much of the
    cache is filled, so the window no longer matters.

    Args:
        steady: whether a row must have the same bits whatever the number of rows, in an export that supports it; see
            `CachedAttention`.

    Returns:
        How often each rewrite was applied; and, where attention of a layer stays as exported, which layers and why.
    """
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    model = ir.load(path)
    common.ClearMetadataAndDocStringPass()(model)  # rewriting concatenates them, which doubles them with each layer
    model.opset_imports[MICROSOFT] = 1
    counts = {
        "norms": rms_normalization_ruleset.apply_to_model(model),
        "norms of sums": skip_rms_normalization_ruleset.apply_to_model(model),
    }
    _read_batch_off_tokens(model.graph)
    layers = sum((each.name or "").startswith("past_key_") for each in model.graph.inputs)
    refusals: list[str] = []
    spared = RewriteRuleSet([SpareRow.rule()]).apply_to_model(model) > 0  # type: ignore[no-untyped-call]
    rules: list[Any] = [
        Products.rule(),  # type: ignore[no-untyped-call]
        Rotary.rule(capacity + 1),  # type: ignore[no-untyped-call]
        CachedAttention.rule(steady and spared, model.graph, batch, refusals),  # type: ignore[no-untyped-call]
        Unsplit.rule(),  # type: ignore[no-untyped-call]
        LastRows.rule(model.graph),  # type: ignore[no-untyped-call]
    ]
    for rewrite in rules:  # in this order: attention absorbs merged products and rotary embeddings
        counts[rewrite.name] = RewriteRuleSet([rewrite]).apply_to_model(model)
        common.RemoveUnusedNodesPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    ir.save(model, output, external_data=output.name + ".data", size_threshold_bytes=1024)
    left_out: list[str] = []
    if missed := layers - counts["attention"]:
        reasons = dict.fromkeys(refusals) or ["it is written out"]
        left_out = [f"attention of {missed} of {layers} layers", *reasons]
    return {name: count for name, count in counts.items() if count}, left_out


def _read_batch_off_tokens(graph: ir.Graph) -> None:
    """Take the batch from the tokens instead of the cache: a slot's cache has one sequence, whatever the pass has."""
    ids = next(each for each in graph.inputs if each.name == INPUT_IDS)
    for node in graph:
        span = [node.attributes.get_int(name, 0) for name in ("start", "end")]
        value = node.inputs[0] if node.inputs else None
        if node.op_type == "Shape" and span == [0, 1] and value is not None and (value.name or "").startswith("past_"):
            node.replace_input_with(0, ids)
