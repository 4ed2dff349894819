"""The calls of Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import UsageError
from outrider.serve.tools.base import BEGINNING, AnswerParts, Family, OfferedTools, Reader, mark, named_calls

TAG = "<|python_tag|>"


class Llama(Family):
    """An answer is text, or one call such as `{"name": "get_weather", "parameters": {"city": "Paris"}}`."""

    @staticmethod
    def recognizes(template: str) -> bool:
        """Return whether a template writes such calls, in one piece or in several."""
        return BEGINNING in template and '"parameters": ' in template

    @property
    def shown(self) -> dict[int, str]:
        """The token that a call may start with, if the tokenizer has it."""
        return {} if self._tokenizer.token_to_id(TAG) is None else {self.token(TAG): TAG}

    @property
    def opening(self) -> list[int]:
        """Tokens that start a call."""
        return [*self._tokenizer.encode(BEGINNING, add_special_tokens=False).ids]

    def grammar(self, offer: OfferedTools) -> str:
        """Return the grammar: a call, or any text that does not start like a call.

        Raises:
            UsageError: the request also asks for structured output, which may be JSON and then cannot be told from a call.
        """
        if offer.said is not None and not offer.required:
            raise UsageError("this model's calls cannot be told from structured output", "leave out one of them", param="tools")
        tag = "".join(f"<[{token}]>? " for token in self.shown)
        lines = [f"start: {'one' if offer.required else 'TEXT | one'}", f"one: {tag}call"]
        lines.append(r'TEXT: /(?s:.*)/ & ~/\{"name": "(?s:.*)/')
        return "\n".join([*lines, named_calls(offer, "parameters")])

    def read(self, reader: Reader, tools: Mapping[str, dict[str, Any]]) -> AnswerParts:
        """Yield the parts of an answer."""
        yield from reader.starts(mark(TAG))
        if (yield from reader.starts(BEGINNING)):
            yield from reader.named_call("parameters")
        else:
            yield from reader.rest()
