"""Load the tokenizer of a checkpoint, with its chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from transformers import AutoTokenizer

from outrider.errors import SourceError, UsageError
from outrider.export.checkpoints.gguf_file import gguf_file_of
from outrider.export.checkpoints.gguf_reader import metadata_read_once
from outrider.export.checkpoints.gguf_tokenizer import amend_tokenizer
from outrider.export.checkpoints.source import Source
from outrider.runtime.text.chat_template import CORRECT, ChatTemplate, with_tools

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
DEFAULT, TOOL_USE = "default", "tool_use"  # the names of the chat templates that transformers chooses
MOST_TOKENS = 2**24
CORRECT_TOKENIZER = "correct the checkpoint's tokenizer.json, or download it again"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parts of a tokenizer for a bundle."""

    json: str  # the contents of tokenizer.json
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_token_id: int | None

    def vocabulary(self) -> dict[int, str]:
        """Return the tokens by id, including added tokens."""
        data = json.loads(self.json)
        model = data["model"]["vocab"]
        tokens = model.items() if isinstance(model, dict) else ((entry[0], index) for index, entry in enumerate(model))
        vocabulary = {index: token for token, index in tokens}
        return vocabulary | {added["id"]: added["content"] for added in data["added_tokens"]}


def load_tokenizer(source: Source) -> TokenizerFiles:
    """Load the tokenizer of a checkpoint.

    Raises:
        SourceError: the checkpoint has no tokenizer, or only a slow one.
    """
    with metadata_read_once():
        tokenizer = source.read("tokenizer", AutoTokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SourceError(f"{source.name} has only a slow tokenizer, without a tokenizer.json", "convert it with transformers")
    if (file := gguf_file_of(source)) is not None:
        amend_tokenizer(file, tokenizer)
    token, largest = max(backend.get_vocab(with_added_tokens=True).items(), key=itemgetter(1), default=("", 0))
    if largest >= MOST_TOKENS:  # lists over all ids would use up the memory
        raise SourceError(f"{source.name} gives the token {token!r} the id {largest:,}", CORRECT_TOKENIZER)
    special = {name: str(getattr(tokenizer, name)) for name in SPECIAL_TOKENS if getattr(tokenizer, name, None)}
    template = _chat_template(source, tokenizer.chat_template)
    if template is not None:
        try:
            ChatTemplate(template, special).check()
        except UsageError as error:
            raise SourceError(f"{source.name}: {error}", error.hint) from error
    return TokenizerFiles(backend.to_str(), template, special, tokenizer.eos_token_id)


def _chat_template(source: Source, given: object) -> str | None:
    """Return the chat template of a tokenizer. If there is another one for tools, the result contains both.

    Raises:
        SourceError: a template is not text, or there are several without a default.
    """
    named: dict[Any, Any] = given if isinstance(given, dict) else {} if given is None else {DEFAULT: given}
    if (file := gguf_file_of(source)) is not None:
        of_tools = file.metadata.get(f"tokenizer.chat_template.{TOOL_USE}")
        named |= {} if of_tools is None else {TOOL_USE: of_tools}
    elif not named and _has(source, "chat_template.json") and (of_processor := source.object("chat_template.json")):
        named = {DEFAULT: of_processor.get("chat_template")}
    if wrong := [repr(each)[:50] for each in named.values() if not _is_text(each)]:
        raise SourceError(f"the chat template of {source.name} is {wrong[0]}, not text", CORRECT)
    if len(named) < 2:
        return next(iter(named.values()), None)
    if DEFAULT not in named:
        names = ", ".join(sorted(map(str, named)))
        raise SourceError(f"{source.name} has the chat templates {names}, and no {DEFAULT}", f"name one of them {DEFAULT}")
    return with_tools(named[DEFAULT], named[TOOL_USE]) if TOOL_USE in named else named[DEFAULT]


def _is_text(value: object) -> bool:
    """Return whether a JSON value is text that UTF-8 can encode, without half a surrogate pair."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode("utf-8")


def _has(source: Source, name: str) -> bool:
    """Return whether a checkpoint has a file, or without a connection, whether it was downloaded."""
    try:
        return source.file(name) is not None
    except SourceError:
        return False
