"""A lower bound on the tokens of a prompt, by its length alone: tokenizing a long text takes seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

# The most characters that a normalizer turns into one. No Unicode character decomposes into more than four, so composing
# (NFC, NFKC) leaves at least a quarter. Decomposing and changing case never yield fewer characters.
SHRINKING = {"NFC": 4.0, "NFKC": 4.0, "NFD": 1.0, "NFKD": 1.0, "Lowercase": 1.0, "Prepend": 1.0, "ByteLevel": 1.0}
KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")  # pre-tokenizers that drop nothing
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


class Bound(NamedTuple):
    """The most characters that a token stands for."""

    characters: float
    absorbing: tuple[str, ...]  # added tokens that also absorb any amount of adjacent white space

    def tokens(self, text: str) -> int:
        """Return the least number of tokens of a text."""
        absorbed = any(token in text for token in self.absorbing)
        length = sum(map(len, text.split())) if absorbed else len(text)
        return int(-(-length // self.characters))


def bound(tokenizer: Tokenizer) -> Bound | None:
    """Return a bound that holds for every text, or None if none is known.

    The bound counts characters before normalization. A token stands for at most as many normalized characters as its own text
    has: in a byte-level vocabulary, each character of a token is one byte, and each character of a text has at least one byte.
    Every character belongs to a token if the vocabulary has every byte, and if neither normalizer nor pre-tokenizer removes
    text. Normalizers and pre-tokenizers that are not known to keep text have no bound.
    """
    normalizers, pre_tokenizers = list(_parts(tokenizer.normalizer)), list(_parts(tokenizer.pre_tokenizer))
    shrinking = 1.0
    for part in normalizers:
        pattern = part.get("pattern", {}).get("String", "")
        if part["type"] == "Replace" and pattern and part["content"]:
            shrinking *= max(1.0, len(pattern) / len(part["content"]))
        elif part["type"] in SHRINKING:
            shrinking *= SHRINKING[part["type"]]
        else:
            return None
    for part in pre_tokenizers:
        splits = part["type"] in ("Split", "Punctuation") and part["behavior"] != "Removed"
        if not splits and part["type"] not in KEEPING:
            return None
    vocabulary = tokenizer.get_vocab()
    model: Any = tokenizer.model
    byte_level = any(part["type"] == "ByteLevel" for part in normalizers + pre_tokenizers)
    affixes = getattr(model, "continuing_subword_prefix", None) or getattr(model, "end_of_word_suffix", None)
    by_bytes = byte_level and not affixes and vocabulary.keys() >= set(ByteLevel.alphabet())
    if not by_bytes and not (getattr(model, "byte_fallback", False) and vocabulary.keys() >= BYTES):
        return None
    absorbing = [token for token in tokenizer.get_added_tokens_decoder().values() if token.lstrip or token.rstrip]
    # A token that is matched in normalized text may occur in any text, as "" does.
    texts = tuple("" if token.normalized and normalizers else token.content for token in absorbing)
    return Bound(shrinking * max(map(len, vocabulary)), texts)


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normalizer or pre-tokenizer, and of each part of a sequence."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        part = pending.pop(0)
        children = part.get("normalizers") or part.get("pretokenizers")
        if children is not None:
            pending = [*children, *pending]
        elif part["type"] != "Sequence":
            yield part
