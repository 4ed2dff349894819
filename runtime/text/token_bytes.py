"""The bytes that tokens stand for; a token may be part of a character."""

from __future__ import annotations

import functools
import re
from typing import Any

from tokenizers import Tokenizer

from outrider.errors import EngineError

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
"""The byte that each character of a byte-level token stands for."""


class TokenBytes:
    """The bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer):
        """Find out how the tokenizer encodes bytes."""
        self._tokenizer: Any = tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self.special: dict[int, str] = {token: each.content for token, each in added.items() if each.special}
        """The special tokens and their texts; they are not part of an answer's text."""
        decoder = b"" if self._tokenizer.decoder is None else self._tokenizer.decoder.__getstate__()
        self._byte_level, self._byte_fallback = b'"ByteLevel"' in decoder, b'"ByteFallback"' in decoder
        self._changed = not decoder.startswith(b'{"type":"ByteLevel"')  # perhaps: there may be other decoders
        self._whole = {token: each.content for token, each in added.items() if each.special or self._byte_level}

    def of(self, token: int, begins: bool = False) -> bytes:
        """Return the bytes of a token after others, or of one that `begins` a text, where some have no space.

        Raises:
            EngineError: the tokenizer fails.
        """
        if (text := self._whole.get(token)) is not None:
            return text.encode()
        if (piece := self._tokenizer.id_to_token(token)) is None:
            return b""
        if self._byte_level and BYTE_OF.keys() >= set(piece):
            made = bytes(BYTE_OF[each] for each in piece)
            if not self._changed or decode(self._tokenizer, [token]) == made.decode(errors="replace"):
                return made
        if self._byte_fallback and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(byte[1])
        once = decode(self._tokenizer, [token])
        return (once if begins else decode(self._tokenizer, [token, token]).removeprefix(once)).encode()


@functools.lru_cache(maxsize=4)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Return the cached bytes of a tokenizer's tokens, because reading its configuration takes long."""
    return TokenBytes(tokenizer)


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of tokens, special ones included.

    Raises:
        EngineError: the tokenizer fails.
    """
    try:
        text: str = tokenizer.decode(tokens, skip_special_tokens=False)
    except BaseException as error:
        if not panicked(error):
            raise
        raise EngineError(f"the tokenizer fails on the answer: {line(error)}", "export and build the bundle again") from error
    return text


def panicked(error: BaseException) -> bool:
    """Return whether Rust code has panicked. A PanicException is not an Exception, and no module exports it."""
    return type(error).__name__ == "PanicException"


def line(error: BaseException) -> str:
    """Return an error's message in one line."""
    return " ".join(str(error).split())
