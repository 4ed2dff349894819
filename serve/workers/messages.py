"""What the server and its workers send each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class TextSource(msgspec.Struct):
    """A bundle's tokenizer and chat template, and what grammars need to know."""

    tokenizer: str  # in JSON
    template: str | None
    special_tokens: dict[str, str]
    vocab_rows: int
    end_ids: list[int]


class PromptJob(msgspec.Struct, tag=True):
    """The prompts of one request: texts, or else the messages of a chat."""

    limit: int = 0  # tokens of each
    texts: Sequence[str] = ()
    messages: Sequence[dict[str, Any]] = ()  # the arguments of tool calls are text, as a client sends them
    tools: Sequence[dict[str, Any]] = ()
    allow_special_tokens: bool = False
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = {}


class Compile(msgspec.Struct, tag=True):
    """A grammar to compile and to rehearse."""

    structured: dict[str, Any]  # the arguments of `StructuredOutputs`
    last: bool  # whether its owner's other grammars have taken much of the processor


class Begin(msgspec.Struct, tag=True):
    """An answer by a grammar, after tokens that it has already. The reply is that to `Advance`."""

    answer: int  # its number, for what follows
    structured: dict[str, Any]
    confirmed: list[int]


class Advance(msgspec.Struct, tag=True):
    """Tokens that a round confirmed. The reply has the mask of what may follow, and what is forced."""

    answer: int
    tokens: Sequence[int]


class Masks(msgspec.Struct, tag=True):
    """Drafted tokens. The reply has the masks after so many of them and more, and how many rows count."""

    answer: int
    drafted: Sequence[int]
    known: int


class Valid(msgspec.Struct, tag=True):
    """Proposed tokens. The reply says how many the grammar allows."""

    answer: int
    tokens: list[int]


class Drop(msgspec.Struct, tag=True):
    """An answer that has ended. There is no reply."""

    answer: int


Message = PromptJob | Compile | Begin | Advance | Masks | Valid  # which have replies


class Reply(msgspec.Struct, omit_defaults=True):
    """What was asked for, or the error."""

    prompts: list[list[int]] = []
    masks: list[bytes] = []  # bits in the order of the tokens, the lowest of a byte first
    forced: list[int] = []
    count: int = 0
    error: str = ""
    hint: str = ""
    param: str | None = None
    too_long: bool = False
