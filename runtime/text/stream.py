"""Confirmed tokens as text that is never taken back."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from outrider.runtime.text.token_bytes import token_bytes

PROMPT_CONTEXT = 64  # last tokens of the prompt to decode: the answer may complete a character that they begin
TOKEN_MARK = "\ufdd0"  # a noncharacter: it precedes the text of a shown token, which other tokens may spell as well

Piece = tuple[str, bool]
"""Text, and whether the token that completed it came from the draft."""


NONE_SHOWN: Mapping[int, str] = MappingProxyType({})


class _Held(NamedTuple):
    """Text of a token that may still be part of a stop string."""

    text: str
    matched: str  # without marks and special tokens
    from_draft: bool


class TextStream:
    """Decodes confirmed tokens incrementally: whole characters only, and nothing that may still become a stop string."""

    def __init__(self, tokenizer: Any, prompt: list[int], stop: tuple[str, ...], shown: Mapping[int, str] = NONE_SHOWN):
        """Start after a prompt.

        Args:
            stop: the stop strings. A `TOKEN_MARK` and the text of a special token are not part of what they match.
            shown: the texts of tokens to show after a `TOKEN_MARK`, which no other text contains.
        """
        self._bytes, self._shown = token_bytes(tokenizer), shown
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun, self._echo = False, ""
        for token in prompt[-PROMPT_CONTEXT:]:  # it decides on a leading space, or begins a character
            self._step(token)
        self._echo = "\ufffd" if self._characters.getstate()[0] else ""  # shown for the prompt's incomplete character
        self.stop = stop
        self._overlaps = [0] * len(stop)  # for each, the length of its longest prefix that the text ends with
        self._held: list[_Held] = []
        self._from_draft = False
        self.stopped = False

    def extend(self, tokens: list[int], accepted: int) -> list[Piece]:
        """Return the text that can be shown after a round's tokens, if there are no stop strings. The first `accepted` tokens
        were drafted."""
        pieces: list[Piece] = []
        for index, token in enumerate(tokens):
            if text := self._step(token)[0]:
                pieces.append((text, index < accepted))
        self._from_draft = len(tokens) <= accepted
        return pieces

    def push(self, token: int, from_draft: bool, may_stop: bool = True) -> list[Piece]:
        """Return the text that can be shown after a token. If it `may_stop` and completes a stop string, set `stopped` and end
        the text before that string."""
        self._from_draft = from_draft
        text, matched = self._step(token)
        return self._add(text, matched, may_stop) if text else []

    def finish(self) -> list[Piece]:
        """Return the text still held back at the end, up to a stop string. An incomplete character becomes U+FFFD."""
        if self.stopped:
            return []
        rest = self._rest()
        pieces = self._add(rest, rest, may_stop=True)
        return pieces if self.stopped else pieces + self._release(sum(len(each.matched) for each in self._held))

    def _add(self, text: str, matched: str, may_stop: bool) -> list[Piece]:
        """Append text, and return the text that can be shown."""
        self._held.append(_Held(text, matched, self._from_draft))
        held = "".join(each.matched for each in self._held)
        if not may_stop:
            return self._release(len(held))
        matches = [start for start in (held.find(stop) for stop in self.stop) if start >= 0]
        if matches:
            self.stopped = True
            return self._release(min(matches))
        known = zip(self.stop, self._overlaps, strict=True)
        self._overlaps = [_overlap(held, stop, before + len(matched)) for stop, before in known]
        return self._release(len(held) - max(self._overlaps, default=0))

    def _step(self, token: int) -> tuple[str, str]:
        """Return the text that this token completes, and what stop strings match of it."""
        special = token in self._bytes.special
        if token in self._shown:
            rest, text = self._rest(), self._shown[token]
            return rest + TOKEN_MARK + text, rest + ("" if special else text)
        if special:
            return "", ""
        text = self._decode(self._bytes.of(token, begins=not self._begun))
        self._begun = True
        text = text.replace(TOKEN_MARK, "\ufffd") if self._shown else text
        return text, text

    def _rest(self) -> str:
        """Return U+FFFD for an incomplete character, if there is one."""
        return self._decode(b"", final=True)

    def _decode(self, added: bytes, final: bool = False) -> str:
        if text := self._characters.decode(added, final):
            text, self._echo = text.removeprefix(self._echo), ""
        return text

    def _release(self, length: int) -> list[Piece]:
        """Remove the first `length` characters of the matched text, and what is shown with them, and return them as pieces."""
        released: list[Piece] = []
        while self._held and (length > 0 or not self._held[0].matched):
            text, matched, from_draft = self._held.pop(0)
            if len(matched) > length:
                self._held.insert(0, _Held(matched[length:], matched[length:], from_draft))
                text = text[: len(text) - len(matched) + length]
            released.append((text, from_draft))
            length -= len(matched)
        return released


def _overlap(text: str, stop: str, limit: int) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`, at most `limit`."""
    return next((size for size in range(min(len(text), len(stop) - 1, limit), 0, -1) if text.endswith(stop[:size])), 0)
