"""The messages between the server and its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class TextSource(msgspec.Struct):
    """A bundle's tokenizer and chat template, and the parameters of grammars."""

    tokenizer: str  # in JSON
    template: str | None
    special_tokens: dict[str, str]
    vocab_rows: int
    end_ids: list[int]


class PromptJob(msgspec.Struct, tag=True):
    """The prompts of one request: either texts or the messages of a chat."""

    limit: int = 0  # maximum tokens of each
    texts: Sequence[str] = ()
    messages: Sequence[dict[str, Any]] = ()  # the arguments of tool calls are still text, as the client sends them
    tools: Sequence[dict[str, Any]] = ()
    allow_special_tokens: bool = False
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = {}


class Fork(msgspec.Struct, tag=True):
    """Forks another worker, which has the same compiled grammars and no answers. Its socket comes with the message."""

    file: int = -1  # the socket's number in the worker's process


class Compile(msgspec.Struct, tag=True):
    """A grammar to compile and to try."""

    structured: dict[str, Any]  # the arguments of `StructuredOutputs`
    opening: list[int]  # see `rehearse`
    last: bool  # whether it gets the lowest priority, because its owner's other grammars have taken much processor time


class Begin(msgspec.Struct, tag=True):
    """Starts an answer with a grammar, after its confirmed tokens. The reply is the same as to `Advance`."""

    answer: int  # its number in later messages
    structured: dict[str, Any]
    confirmed: list[int]


class Advance(msgspec.Struct, tag=True):
    """Tokens that a round confirmed. The reply has the mask of the next token, and the forced tokens."""

    answer: int
    tokens: Sequence[int]


class Masks(msgspec.Struct, tag=True):
    """Drafted tokens. The reply has the masks that are not known yet, and the number of valid rows."""

    answer: int
    drafted: Sequence[int]
    known: int  # masks that the server already has


class Valid(msgspec.Struct, tag=True):
    """Proposed tokens. The reply has the number of tokens that the grammar allows."""

    answer: int
    tokens: list[int]


class Drop(msgspec.Struct, tag=True):
    """An answer that has ended. There is no reply."""

    answer: int


WorkerRequest = PromptJob | Compile | Begin | Advance | Masks | Valid  # the messages that have replies, besides `Fork`


class Reply(msgspec.Struct, omit_defaults=True):
    """The result, or an error."""

    prompts: list[list[int]] = []
    masks: list[bytes] = []  # one bit per token, the lowest bit of a byte first
    forced: list[int] = []
    count: int = 0
    error: str = ""
    hint: str = ""
    param: str | None = None
    too_long: bool = False
