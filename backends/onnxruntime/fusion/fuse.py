"""Applies every rewrite to a graph."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import RewriteRuleSet
from onnxscript.rewriter.ort_fusions.rms_normalization import rms_normalization_ruleset
from onnxscript.rewriter.ort_fusions.skip_normalization import SkipRmsNormFusion

from outrider.backends.onnxruntime.fusion.attention import GroupQueryAttention
from outrider.backends.onnxruntime.fusion.experts import experts
from outrider.backends.onnxruntime.fusion.products import BlockProducts
from outrider.backends.onnxruntime.fusion.recurrence import recurrences
from outrider.backends.onnxruntime.fusion.reshapes import Unsplit
from outrider.backends.onnxruntime.fusion.rotary import Rotary
from outrider.backends.rewriting.graphs import apply, read_batch_off_tokens, save
from outrider.backends.rewriting.joined_products import Products
from outrider.backends.rewriting.logits import LastRows
from outrider.backends.rewriting.matching import MICROSOFT
from outrider.backends.rewriting.spare_row import SpareRow

# Without a bias: the operator adds it last, and a stage that ends before the norm adds it before the residual stream.
NORMS_OF_SUMS = RewriteRuleSet([SkipRmsNormFusion.rule("SkipRmsNorm", has_bias=False)])  # type: ignore[no-untyped-call]


def fuse(model: ir.Model, output: Path, capacity: int, steady: bool, batch: int) -> tuple[dict[str, int], list[str]]:
    """Fuse a step model or a stage for caches of `capacity` positions and a spare one, and write it and its weights.

    The fused graph has the inputs and outputs of the exported graph. With more than one sequence, `past_*` and `present_*`
    belong to the first sequence of a pass, and `past_*.i` and `present_*.i` to sequence i. The window no longer matters,
    because `GroupQueryAttention` knows how much of the cache is filled.

    Args:
        steady: whether a row must have the same bits whatever the number of rows, if the export supports it; see
            `GroupQueryAttention`.

    Returns:
        How often each rewrite was applied; and if attention stays as exported, in how many layers and why.
    """
    model.opset_imports[MICROSOFT] = 1
    counts = {
        "norms": rms_normalization_ruleset.apply_to_model(model),
        "norms of sums": NORMS_OF_SUMS.apply_to_model(model),
        "recurrences": recurrences(model),
        "experts": experts(model, steady),
    }
    common.InlinePass()(model)  # so that common subexpressions of the calls are computed once
    read_batch_off_tokens(model.graph)
    layers = sum((each.name or "").startswith("past_key_") for each in model.graph.inputs)
    refusals: list[str] = []
    (spared,) = apply(model, SpareRow).values()
    counts |= apply(model, Products)
    counts |= apply(model, Rotary, capacity + 1)
    # After the other two: it absorbs merged products and rotary embeddings.
    counts |= apply(model, GroupQueryAttention, steady and spared > 0, model.graph, batch, refusals)
    counts |= apply(model, Unsplit)
    counts |= apply(model, LastRows, model.graph)
    counts |= apply(model, BlockProducts)
    save(model, output)
    left_out: list[str] = []
    if missed := layers - counts["attention"]:
        reasons = dict.fromkeys(f"it has {each}" for each in refusals) or ["it is written out"]
        left_out = [f"attention of {missed} of {layers} layers", *reasons]
    return {name: count for name, count in counts.items() if count}, left_out
