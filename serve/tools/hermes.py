"""The calls of Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3 and Granite 4."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outrider.serve.tools.base import (
    BEGINNING,
    AnswerParts,
    Family,
    OfferedTools,
    Reader,
    mark,
    named_calls,
    quoted,
    text_then_calls,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(Family):
    r"""Each call is `<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>`."""

    tokens = (OPENING, CLOSING)

    @staticmethod
    def recognizes(template: str) -> bool:
        """Return whether a template writes such calls. Its source may have line breaks or `\\n`."""
        return re.search(r'<tool_call>(\\n|\s)*\{\\?"(name|arguments)\\?":', template) is not None

    def grammar(self, offer: OfferedTools) -> str:
        """Return the grammar: any text, then calls."""
        opening, closing = map(self.token, self.tokens)
        line_end = quoted("\n")
        more = f"({line_end} one)*" if offer.parallel else ""
        lines = [text_then_calls(offer, opening), f"calls: one {more}"]
        lines.append(f"one: <[{opening}]> {line_end} call {line_end} <[{closing}]>")
        return "\n".join([*lines, named_calls(offer, "arguments")])

    def read(self, reader: Reader, tools: Mapping[str, dict[str, Any]]) -> AnswerParts:
        """Yield the parts of an answer."""
        while (yield from reader.call(mark(OPENING))):
            if not (yield from reader.until(BEGINNING, None)) or not (yield from reader.named_call("arguments")):
                return
            yield from reader.until(mark(CLOSING), None)
