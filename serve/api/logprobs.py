"""The logprobs of a response, in the forms of the completions API and the chat API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.runtime.request import Event
from outrider.runtime.rounds.logprobs import Logprobs
from outrider.runtime.text.stream import TextStream
from outrider.runtime.text.text import Text


class CompletionLogprobs:
    """The logprobs of a completion's choice, event by event."""

    def __init__(self, text: Text, prompt: list[int]):
        """Begin at the start of the answer."""
        self._text, self._stream = text, TextStream(text.tokenizer, prompt, ())
        self._offset = 0

    def append(self, events: Sequence[Event]) -> dict[str, list[Any]]:
        """Return the logprobs of the next events' tokens. If several tokens form a character, the last one has its text;
        special tokens have no text."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        pairs = [pair for event in events for pair in _with_logprobs(event)]
        for left, (token, logprobs) in enumerate(pairs, 1 - len(pairs)):
            pieces = self._stream.push(token, from_draft=False)
            if not left and events[-1].finish_reason is not None:
                pieces += self._stream.finish()
            text = "".join(piece for piece, _ in pieces)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(logprobs.logprob)
            columns["top_logprobs"].append(self._top(logprobs))
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
        return columns

    def _top(self, logprobs: Logprobs) -> dict[str, float]:
        """Return the logprobs of the most likely tokens, by unique names."""
        top: dict[str, float] = {}
        for token, value in logprobs.top:
            name = _whole_or_bytes(self._text.token_bytes(token))
            top[f"token_id:{token}" if name in top else name] = value
        return top


def chat_logprobs(text: Text, events: Sequence[Event]) -> dict[str, Any]:
    """Return the logprobs of a chat's events."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": text.token(token), "logprob": value, "bytes": list(text.token_bytes(token))}

    return {
        "content": [
            entry(token, logprobs.logprob) | {"top_logprobs": [entry(*pair) for pair in logprobs.top]}
            for event in events
            for token, logprobs in _with_logprobs(event)
        ]
    }


def _whole_or_bytes(token: bytes) -> str:
    """Return the text of a token; if it is not whole characters, its bytes in OpenAI's notation."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _with_logprobs(event: Event) -> list[tuple[int, Logprobs]]:
    return list(zip(event.token_ids, event.logprobs or (), strict=True))
