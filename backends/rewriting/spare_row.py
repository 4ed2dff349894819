"""Removes the row that 4-bit and 8-bit exports compute twice in attention."""

from __future__ import annotations

from typing import Any

from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.rewriting.matching import Op, refused, source


class SpareRow(RewriteRuleClassBase):
    """Removes the second copy of the last row in attention, which 4-bit and 8-bit exports have.

    For backends whose attention avoids one-row passes in another way. They apply this rule first.
    """

    def __init__(self) -> None:
        super().__init__("spare rows", remove_nodes=False)  # all layers share the extended mask

    def pattern(
        self, op: Op, query: Any, last: Any, keys: Any, values: Any, mask: Any, last_mask: Any, start: Any, end: Any, axes: Any
    ) -> Any:
        inputs = op.Concat(query, last, axis=2), keys, values, op.Concat(mask, last_mask, axis=2)
        attended = op.Attention(*inputs, _allow_other_attributes=True, _outputs=["attended"])
        return op.Slice(attended, start, end, axes, _allow_other_inputs=True)

    def check(self, context: Any, query: Any, last: Any, mask: Any, last_mask: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        for whole, part in ((query, last), (mask, last_mask)):
            if source(part, ("Slice",)) is not whole:
                return refused("attention over other rows than those of the query")
        return MatchResult()

    def rewrite(self, op: Op, query: Any, keys: Any, values: Any, mask: Any, attended: Any, **_: Any) -> Any:
        return op.Attention(query, keys, values, mask, **attended.producer().attributes)
