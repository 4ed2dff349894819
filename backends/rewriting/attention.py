"""Finds attention and its cache in exported step models."""

from __future__ import annotations

from typing import Any

from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.rewriting.matching import Op, refused, sliding_window


class CachedAttention(RewriteRuleClassBase):
    """Finds the nodes that write the cache, slice its window and attend. Each backend replaces them with its own operator.

    When `rewrite` runs, `_window` is the number of keys that a row attends to, including its own; -1 for all.
    """

    WRITES_CACHE = True  # whether the replacement also outputs the written caches

    def __init__(self, refusals: list[str]) -> None:
        """Find attention. The reasons for leaving some out are appended to `refusals`."""
        super().__init__("attention")
        self._refusals = refusals

    def pattern(
        self,
        op: Op,
        query: Any,
        key: Any,
        value: Any,
        past_key: Any,
        past_value: Any,
        positions: Any,
        mask: Any,
        start: Any,
        end: Any,
        axes: Any,
        value_start: Any,
        value_end: Any,
        value_axes: Any,
    ) -> Any:
        present_key = op.TensorScatter(past_key, key, positions, axis=-2)
        present_value = op.TensorScatter(past_value, value, positions, axis=-2)
        keys = op.Slice(present_key, start, end, axes)
        values = op.Slice(present_value, value_start, value_end, value_axes)
        attended = op.Attention(query, keys, values, mask, _allow_other_attributes=True, _outputs=["attended"])
        merged = op.Transpose(attended, perm=[0, 2, 1, 3])
        return (merged, present_key, present_value) if self.WRITES_CACHE else merged

    def check(  # type: ignore[override]  # the names are the pattern's
        self, context: Any, query: Any, key: Any, value: Any, mask: Any, attended: Any, **_: Any
    ) -> MatchResult:
        if any(each.shape is None or len(each.shape) != 4 for each in (query, key, value)):
            return self.refuse("unknown shapes")
        if attended.producer().attributes.keys() != {"scale"}:
            return self.refuse("attributes besides a scale")
        self._window = sliding_window(mask)
        return self.refuse("a mask that is not causal") if self._window is None else MatchResult()

    def refuse(self, reason: str) -> MatchResult:
        """Refuse a match. `reason` names what the replacement lacks; it continues a sentence that begins with "it has"."""
        self._refusals.append(reason)
        return refused(reason)
