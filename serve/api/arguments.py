"""The arguments of earlier tool calls, as a client sends them back."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

from outrider.errors import UsageError

# An escape of JSON: a whole surrogate pair, half of one (the group), or another. A model may write half of one.
ESCAPE = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments; where they were cut, as by `max_tokens`, what there is of them.

    Raises:
        UsageError: they are not the beginning of an object in JSON.
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
            f"the arguments of the call {call['id']!r} are not an object in JSON", "send what the model wrote", param="chat"
        )
    return arguments
