"""Applies every rewrite to a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.ort_fusions.rms_normalization import rms_normalization_ruleset
from onnxscript.rewriter.ort_fusions.skip_normalization import skip_rms_normalization_ruleset

from outrider.backends.onnxruntime.fusion.attention import GroupQueryAttention
from outrider.backends.onnxruntime.fusion.experts import experts
from outrider.backends.onnxruntime.fusion.recurrence import recurrences
from outrider.backends.onnxruntime.fusion.reshapes import Unsplit
from outrider.backends.onnxruntime.fusion.rotary import Rotary
from outrider.backends.rewriting.graphs import load, read_batch_off_tokens
from outrider.backends.rewriting.logits import LastRows
from outrider.backends.rewriting.matching import MICROSOFT
from outrider.backends.rewriting.products import Products
from outrider.backends.rewriting.spare_row import SpareRow
from outrider.bundle.manifest import WEIGHTS


def fuse(path: Path, output: Path, capacity: int, steady: bool, batch: int) -> tuple[dict[str, int], list[str]]:
    """Fuse the graph at `path`, for caches of `capacity` positions and a spare one, and write it and its weights to `output`.

    The fused graph has the inputs and outputs of the exported one. For more than one sequence, `past_*` and `present_*` belong
    to the first; those of sequence i of a pass are `past_*.i` and `present_*.i`. `GroupQueryAttention` knows how much of the
    cache is filled, so the window no longer matters.

    Args:
        steady: whether a row must have the same bits whatever the number of rows, in an export that supports it; see
            `GroupQueryAttention`.

    Returns:
        How often each rewrite was applied; and, where attention of a layer stays as exported, which layers and why.
    """
    model = load(path)
    model.opset_imports[MICROSOFT] = 1
    counts = {
        "norms": rms_normalization_ruleset.apply_to_model(model),
        "norms of sums": skip_rms_normalization_ruleset.apply_to_model(model),
        "recurrences": recurrences(model),
        "experts": experts(model, steady),
    }
    common.InlinePass()(model)  # what is the same in the functions' calls is computed once
    read_batch_off_tokens(model.graph)
    layers = sum((each.name or "").startswith("past_key_") for each in model.graph.inputs)
    refusals: list[str] = []
    spared = RewriteRuleSet([SpareRow.rule()]).apply_to_model(model) > 0  # type: ignore[no-untyped-call]
    rules: list[Any] = [
        Products.rule(),  # type: ignore[no-untyped-call]
        Rotary.rule(capacity + 1),  # type: ignore[no-untyped-call]
        GroupQueryAttention.rule(steady and spared, model.graph, batch, refusals),  # type: ignore[no-untyped-call]
        Unsplit.rule(),  # type: ignore[no-untyped-call]
        LastRows.rule(model.graph),  # type: ignore[no-untyped-call]
    ]
    for rewrite in rules:  # in this order: attention absorbs merged products and rotary embeddings
        counts[rewrite.name] = RewriteRuleSet([rewrite]).apply_to_model(model)
        common.RemoveUnusedNodesPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    ir.save(model, output, external_data=output.name + WEIGHTS, size_threshold_bytes=1024)
    left_out: list[str] = []
    if missed := layers - counts["attention"]:
        reasons = dict.fromkeys(f"it has {each}" for each in refusals) or ["it is written out"]
        left_out = [f"attention of {missed} of {layers} layers", *reasons]
    return {name: count for name, count in counts.items() if count}, left_out
