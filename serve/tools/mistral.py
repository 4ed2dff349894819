"""The calls of Mistral's models, in both of their forms."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any

from outrider.serve.tools.base import (
    BEGINNING,
    AnswerParts,
    Family,
    OfferedTools,
    Part,
    Reader,
    arguments,
    json_value,
    mark,
    named_calls,
    one_of,
    quoted,
    text_then_calls,
)

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID = "/[a-zA-Z0-9]{9}/"  # chosen by the model; the server replaces it


class Mistral(Family):
    """Calls are `[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]`. Since the tokenizers of 2025 each
    call is `[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}`; some models write `[CALL_ID]` and an id after the name."""

    tokens = (CALLS,)

    def __init__(self, tokenizer: Any, template: str):
        """Take a tokenizer and a chat template. The form depends on the tokens that the template writes."""
        super().__init__(tokenizer, template)
        self._optional = [
            token for token in (CALL_ID, ARGUMENTS) if token in template and tokenizer.token_to_id(token) is not None
        ]

    @staticmethod
    def recognizes(template: str) -> bool:
        """Return whether a template writes such calls."""
        return CALLS in template

    @property
    def shown(self) -> dict[int, str]:
        """Those of the three tokens that the template uses."""
        return {self.token(text): text for text in (CALLS, *self._optional)}

    def grammar(self, offer: OfferedTools) -> str:
        """Return the grammar: any text, then calls."""
        calls = self.token(CALLS)
        lines = [text_then_calls(offer, calls)]
        if ARGUMENTS in self._optional:
            of_call = f"<[{self.token(CALL_ID)}]> {ID} " if CALL_ID in self._optional else ""
            head = f"{of_call}<[{self.token(ARGUMENTS)}]>"
            each = (f"{quoted(name)} {head} {json_value(arguments(schema))}" for name, schema in offer.tools.items())
            return "\n".join([*lines, f"calls: one{'+' if offer.parallel else ''}", f"one: <[{calls}]> {one_of(each)}"])
        more = '(", " call)*' if offer.parallel else ""
        lines.append(f'calls: <[{calls}]> " "? "[" call {more} "]"')
        of_call = rf'(", \"id\": \"" {ID} "\"")?'
        return "\n".join([*lines, named_calls(offer, "arguments", of_call)])

    def read(self, reader: Reader, tools: Mapping[str, dict[str, Any]]) -> AnswerParts:
        """Yield the parts of an answer."""
        if ARGUMENTS not in self._optional:
            more = yield from reader.call(mark(CALLS))
            while more and (yield from reader.until(BEGINNING, None)):
                more = yield from reader.named_call("arguments")
            return
        while (yield from reader.call(mark(CALLS))):
            if (head := (yield from reader.word(mark(ARGUMENTS)))) is None:
                return
            yield Part("name", head.partition(mark(CALL_ID))[0])
            if not (yield from reader.value()):
                return

    def call_id(self) -> str:
        """Return a new id. The templates accept only ids of nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
