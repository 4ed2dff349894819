"""Replaces the mask of attention with the filled length of the cache: on CUDA, a mask prevents FlashAttention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.onnxruntime.package import MASK_FREE
from outrider.backends.rewriting.graphs import apply, save
from outrider.backends.rewriting.matching import Op, refused, sliding_window, source

LAST = 2**63 - 1  # as the end of a slice


class CausalAttention(RewriteRuleClassBase):
    """Replaces attention over a window of the cache under a causal mask with causal attention over the filled cache.

    `is_causal` aligns the last row with the last position that `nonpad_kv_seqlen` counts (ONNX's Attention-24, as corrected
    in June 2026, and ONNX Runtime since 1.28). This also saves the copy of the window.
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


def without_masks(model: ir.Model, output: Path) -> dict[str, int]:
    """Rewrite the attention of a model from `load`, and write the graph and its weights to `output`.

    Returns:
        The number of rewritten layers, by the name of the rewrite; empty if there are none.
    """
    counts = apply(model, CausalAttention)
    save(model, output)
    return {name: count for name, count in counts.items() if count}
