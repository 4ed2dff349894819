"""What can be wrong with a grammar."""

from __future__ import annotations

from outrider.errors import EngineError, UsageError


class GrammarError(EngineError):
    """The tokens that a grammar allows cannot be computed, or it allows none."""


def refused(message: str, hint: str) -> UsageError:
    """Return the error for structured outputs that are not valid or not supported."""
    return UsageError(message, hint, param="structured_outputs")


def first_line(error: object) -> str:
    """Return the first line of a message, shortened. If the message quotes an expression, add the quote and the reason."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or ["no reason is given"]
    reason = next((line for line in lines[2:] if line.startswith("error: ")), None)
    return lines[0][:200] if reason is None else f"{lines[0][:200]} {lines[1][:100]}: {reason[7:107]}"
