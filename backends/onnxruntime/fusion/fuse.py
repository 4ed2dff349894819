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
    """Write the graph at `path`, fused for caches of `capacity` positions and a spare one, as `output`, its weights beside it.

    For more than one sequence, `past_*` and `present_*` are of the first; those of sequence i of the pass are `past_*.i` and
    `present_*.i`.

    A `steady` one gives a row the same bits in any company, where it was exported to do so; see `CachedAttention`.

    Returns:
        how often each rewrite was made; and, where attention of a layer stays as exported, what was refused and why.
    """
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    model = ir.load(path)
    common.ClearMetadataAndDocStringPass()(model)  # which rewriting joins, twice as long with each layer
    model.opset_imports[MICROSOFT] = 1
    done = {
        "norms": rms_normalization_ruleset.apply_to_model(model),
        "norms of sums": skip_rms_normalization_ruleset.apply_to_model(model),
    }
    ids = next(each for each in model.graph.inputs if each.name == INPUT_IDS)
    caches = [each.name for each in model.graph.inputs if (each.name or "").startswith("past_")]
    for node in model.graph:  # the batch is read off the tokens: a slot's cache has one sequence, whatever the pass has
        sizes, of = [node.attributes.get_int(name, 0) for name in ("start", "end")], node.inputs[0] if node.inputs else None
        if node.op_type == "Shape" and sizes == [0, 1] and of is not None and (of.name or "").startswith("past_"):
            node.replace_input_with(0, ids)
    refusals: list[str] = []
    spared = RewriteRuleSet([SpareRow.rule()]).apply_to_model(model) > 0  # type: ignore[no-untyped-call]
    rules: list[Any] = [
        Products.rule(),  # type: ignore[no-untyped-call]
        Rotary.rule(capacity + 1),  # type: ignore[no-untyped-call]
        CachedAttention.rule(steady and spared, model.graph, batch, refusals),  # type: ignore[no-untyped-call]
        Unsplit.rule(),  # type: ignore[no-untyped-call]
        LastRows.rule(model.graph),  # type: ignore[no-untyped-call]
    ]
    for rewrite in rules:  # in this order: attention takes joined products and rotary embeddings in
        done[rewrite.name] = RewriteRuleSet([rewrite]).apply_to_model(model)
        common.RemoveUnusedNodesPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    ir.save(model, output, external_data=output.name + ".data", size_threshold_bytes=1024)
    layers = len(caches) // 2
    missed = layers - done["attention"]
    said = dict.fromkeys(refusals) or ["it is written out"]
    why = [f"attention of {missed} of {layers} layers", *said] if missed else []
    return {name: count for name, count in done.items() if count}, why
