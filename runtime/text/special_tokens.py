"""Keep text of chat messages from becoming control tokens, such as those that begin a turn."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer

from outrider.runtime.text.prompt_length import BYTES


def control_tokens(added: Iterable[AddedToken], written: str) -> list[str]:
    """Return the texts of the tokens that only a chat template may write.

    These are the special tokens, and other added tokens in `written`, sample chats in the template: some tokenizers do not mark
    the tokens that begin a turn as special. White space, words and single bytes remain text.
    """
    special, others = [], []
    for token in added:
        text = token.content
        if text in BYTES:
            continue
        if token.special:
            special.append(text)
        elif text.strip() and not text.strip().isalnum() and text in written:
            others.append(text)
    return [text for text in special + others if text]


class Aliases:
    """Aliases of control tokens, which no message can contain, and a tokenizer that knows the tokens only by their aliases.

    A chat is rendered with placeholders for the control tokens in its messages. The remaining control tokens are the template's
    own, and are replaced by their aliases. Then the placeholders become the messages' text again, and one call encodes the
    whole text. So no other token changes, not even at the seams.
    """

    def __init__(self, tokenizer: Tokenizer, control: list[str]):
        """Make the tokenizer, a second one in memory.

        Raises:
            ValueError: the tokens cannot be renamed in this tokenizer.
        """
        nonce = secrets.token_hex(8)  # guessable aliases could be forged
        # Private-use characters at both ends: normalizers keep them, and they are not part of a word.
        self._aliases = {text: f"\ue000{nonce}{index}\ue001" for index, text in enumerate(control)}
        self._placeholders = {text: f"\ue002{nonce}{index}\ue003" for index, text in enumerate(control)}
        self.tokenizer = _renamed(tokenizer, self._aliases)

    def hide(self, text: str) -> str:
        """Return a message's text with placeholders for its control tokens."""
        return _replace(text, self._placeholders)

    def show(self, rendered: str) -> str:
        """Replace placeholders by the messages' text."""
        return _replace(rendered, {placeholder: text for text, placeholder in self._placeholders.items()})

    def protect(self, rendered: str) -> str:
        """Return a chat rendered with placeholders in the form that `tokenizer` encodes."""
        return self.show(_replace(rendered, self._aliases))


def unspelled(tokenizer: Tokenizer, is_special: Callable[[int], bool]) -> str:
    """Return a tokenizer, in JSON, that encodes the texts of its special tokens as ordinary tokens, with unchanged ids.

    llguidance follows a grammar's text by bytes, and does not accept a single special token that spells it.
    """
    special = [token.content for index, token in tokenizer.get_added_tokens_decoder().items() if is_special(index)]
    description = json.loads(Aliases(tokenizer, special).tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = is_special(token["id"])
    return json.dumps(description)


def _replace(text: str, names: dict[str, str]) -> str:
    """Replace names by others. At each position the longest name wins, as in tokenizers."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(pattern, lambda match: names[match.group()], text)


def _renamed(tokenizer: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """Return a tokenizer in which tokens have new texts and the same ids."""
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = description["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): index for text, index in model["vocab"].items()}
        model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if "merges" in model:  # drop those that would form such a token from ordinary text
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    try:
        renamed = Tokenizer.from_str(json.dumps(description))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"the tokenizer's control tokens cannot be renamed: {error}") from error
    if any(renamed.token_to_id(name) != tokenizer.token_to_id(text) for text, name in names.items()):
        raise ValueError("the tokenizer's control tokens cannot be renamed")
    return renamed
