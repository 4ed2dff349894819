"""The arguments of earlier tool calls, as a client sends them back."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

from outrider.errors import UsageError

# A JSON escape: a surrogate pair, a lone surrogate (the group), or any other escape. A model may write a lone surrogate.
ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments. If they were cut, for example by `max_tokens`, return the part that exists.

    Raises:
        UsageError: they are not the beginning of a JSON object.
    """
    text = ESCAPE.sub(lambda each: "\\ufffd" if each[1] else each[0], call["function"]["arguments"]) or "{}"
    try:
        try:
            arguments = json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg == "Extra data":
                raise
            arguments = from_json(text.encode(), allow_partial="trailing-strings")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(
            f"the arguments of the call {call['id']!r} are not a JSON object", "send what the model wrote", param="chat"
        )
    return arguments
