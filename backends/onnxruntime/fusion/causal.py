"""Attention that is told how much of the cache is filled instead of a mask, which on CUDA keeps it off FlashAttention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase, RewriteRuleSet

from outrider.backends.onnxruntime.package import MASK_FREE
from outrider.backends.rewriting.graphs import load
from outrider.backends.rewriting.matching import Op, refused, sliding_window, source
from outrider.bundle.manifest import WEIGHTS

LAST = 2**63 - 1  # as the end of a slice


class CausalAttention(RewriteRuleClassBase):
    """Attention over a window of the cache with a causal mask, as causal attention over the filled part of the whole cache.

    `is_causal` lines up the last row with the last position that `nonpad_kv_seqlen` counts (ONNX's Attention-24, as corrected
    in June 2026; ONNX Runtime computes it so from 1.28 on). It does without the copy of the window, too.
    """

    def __init__(self) -> None:
        super().__init__(MASK_FREE)

    def pattern(
        self, op: Op, query: Any, present_key: Any, present_value: Any, mask: Any, start: Any, end: Any, axes: Any
    ) -> Any:
        keys, values = (op.Slice(each, start, end, axes) for each in (present_key, present_value))
        return op.Attention(query, keys, values, mask, _allow_other_attributes=True, _outputs=["attended"])

    def check(  # type: ignore[override]  # the names are the pattern's
        self, context: Any, present_key: Any, present_value: Any, mask: Any, attended: Any, **_: Any
    ) -> MatchResult:
        written = [each.producer() for each in (present_key, present_value)]
        if any(each is None or each.op_type != "TensorScatter" for each in written):
            return refused("its keys and values are not a cache")
        if attended.producer().attributes.keys() - {"scale"}:
            return refused("it has attributes besides a scale")
        if mask.producer().op_type != "LessOrEqual" or sliding_window(mask) != -1:
            return refused("its mask is not just causal")
        return MatchResult()

    def rewrite(self, op: Op, query: Any, present_key: Any, present_value: Any, mask: Any, attended: Any, **_: Any) -> Any:
        rows = source(mask.producer().inputs[1], ("Unsqueeze",))  # positions of the rows, [B, S]
        last, one = op.Constant(value_ints=[-1]), op.Constant(value_ints=[1])
        filled = op.Add(op.Squeeze(op.Slice(rows, last, op.Constant(value_ints=[LAST]), one), one), one)
        scale = attended.producer().attributes["scale"].as_float()
        return op.Attention(query, present_key, present_value, None, None, None, filled, is_causal=1, scale=scale)


def without_masks(path: Path, output: Path) -> dict[str, int]:
    """Rewrite the attention of the graph at `path`, and write the graph and its weights to `output`.

    Returns:
        How many layers were rewritten, by the name of the rewrite; empty if none was.
    """
    model = load(path)
    rewrite = CausalAttention.rule()  # type: ignore[no-untyped-call]
    count = RewriteRuleSet([rewrite]).apply_to_model(model)
    common.RemoveUnusedNodesPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    ir.save(model, output, external_data=output.name + WEIGHTS, size_threshold_bytes=1024)
    return {rewrite.name: count} if count else {}
