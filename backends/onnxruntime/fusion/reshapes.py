"""Removes reshapes that cancel out."""

from __future__ import annotations

from typing import Any

from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.rewriting.matching import Op, refused


class Unsplit(RewriteRuleClassBase):
    """Removes two reshapes that split heads and merge them again."""

    def __init__(self) -> None:
        super().__init__("heads joined")

    def pattern(self, op: Op, x: Any, split: Any, whole: Any) -> Any:
        return op.Reshape(op.Reshape(x, split), whole, _outputs=["merged"])

    def check(self, context: Any, x: Any, merged: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        shapes = [each.shape for each in (x, merged)]
        if any(shape is None or len(shape) != 3 or not isinstance(shape[2], int) for shape in shapes):
            return refused("a reshape to an unknown shape")
        return MatchResult() if shapes[0][2] == shapes[1][2] else refused("a reshape to another width")

    def rewrite(self, op: Op, x: Any, **_: Any) -> Any:
        return op.Identity(x)
