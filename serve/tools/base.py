"""What a family of models has to say about its tool calls, and the buffer that its answers are read from."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from outrider.runtime.grammar.structured import SPACES
from outrider.runtime.text.stream import TOKEN_MARK

BEGINNING = '{"name": "'


class Part(NamedTuple):
    """A piece of an answer: what the model thinks or says, or a call, whose `name` comes before its `arguments`."""

    kind: Literal["reasoning_content", "content", "name", "arguments"]
    text: str


Parts = Generator[Part | None, None, None]  # None where more text is needed


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What a model may do in its answer.

    `tools` are the JSON schemas of the arguments of the tools that it may call, by name, and `never` the tokens that no text
    has: those that end an answer, and the one that opens what the model thinks, which comes before the answer. `required` says
    whether it must call a tool, `parallel` whether it may call several, and `said`, an expression, what its answer is if it
    calls none; None is any text. Nothing in the schemas of `strict` tools may be ignored.
    """

    tools: Mapping[str, dict[str, Any]]
    never: Sequence[int]
    required: bool = False
    parallel: bool = True
    said: str | None = None
    strict: Collection[str] = ()


class Family(ABC):
    """How the models of a family call tools."""

    tokens: ClassVar[tuple[str, ...]] = ()  # without these in its vocabulary, a model is of another family
    reads_every_answer: ClassVar[bool] = False  # also those of chats without tools

    def __init__(self, tokenizer: Any, template: str):
        """Take a tokenizer that has the family's tokens, and a chat template that `recognizes` accepts."""
        self._tokenizer, self._template = tokenizer, template

    @staticmethod
    @abstractmethod
    def recognizes(template: str) -> bool:
        """Return whether a chat template writes calls as this family does."""

    @classmethod
    def has_tokens(cls, tokenizer: Any) -> bool:
        """Return whether a tokenizer has the family's tokens."""
        return all(tokenizer.token_to_id(token) is not None for token in cls.tokens)

    @property
    def shown(self) -> dict[int, str]:
        """The tokens that `read` needs to see, with their texts; other special tokens are not part of the text. See `mark`."""
        return {self.token(text): text for text in self.tokens}

    @abstractmethod
    def grammar(self, offer: OfferedTools) -> str:
        """Return the grammar of an answer, in the syntax of llguidance's Lark."""

    @abstractmethod
    def read(self, reader: Reader, tools: Mapping[str, dict[str, Any]]) -> Parts:
        """Yield the parts of an answer that `grammar` accepts; `tools` are those of the offer."""

    def call_id(self) -> str:
        """Return a new id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def token(self, text: str) -> int:
        """Return the id of a token that the tokenizer has."""
        token: int = self._tokenizer.token_to_id(text)
        return token


class Reader:
    """Reads an answer as its text comes."""

    def __init__(self, read: Callable[[Reader], Parts]):
        """Begin an answer; `read` is what yields its parts, see `Family.read`."""
        self._held = ""
        self._ended = False
        self._parts = read(self)
        self.calling = False  # whether the arguments of a call are not complete

    def push(self, text: str, last: bool) -> list[Part]:
        """Return the parts that are known after more text; nothing is held back behind the `last`."""
        self._held += text
        self._ended = last
        known = []
        for part in self._parts:
            if part is None:
                break
            if part.text:
                known.append(part)
            if part.kind == "name":
                self.calling = True
        return known

    def starts(self, mark: str) -> Generator[None, None, bool]:
        """Return whether the text begins with a mark, which is dropped."""
        while len(self._held) < len(mark) and mark.startswith(self._held) and not self._ended:
            yield None
        found = self._held.startswith(mark)
        self._held = self._held[len(mark) :] if found else self._held
        return found

    def until(
        self, mark: str, kind: Literal["reasoning_content", "content", "arguments"] | None, strip: bool = True
    ) -> Generator[Part | None, None, bool]:
        """Yield the text before a mark, or drop it, if it has no kind; with `strip` without white space before the mark.

        Returns whether there was a mark before the answer's end. The mark is dropped.
        """
        while (at := self._held.find(mark)) < 0 and not self._ended:
            known = self._held[: len(self._held) - overlap(self._held, mark)]
            known = known.rstrip() if strip else known
            self._held = self._held[len(known) :]
            if kind is not None:
                yield Part(kind, known)
            yield None
        if at < 0:
            kept = overlap(self._held, mark) if kind == "arguments" else 0  # they may be cut, but have nothing else in them
            before, self._held = self._held[: len(self._held) - kept], ""
        else:
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            before = before.rstrip() if strip else before
        if kind is not None:
            yield Part(kind, before)
        return at >= 0

    def word(self, mark: str) -> Generator[None, None, str | None]:
        """Return the text before a mark as a whole, or None if there is no mark before the answer's end."""
        while (at := self._held.find(mark)) < 0:
            if self._ended:
                return None
            yield None
        word, self._held = self._held[:at], self._held[at + len(mark) :]
        return word

    def rest(self) -> Parts:
        """Yield all that comes as content."""
        while not self._ended:
            text, self._held = self._held, ""
            yield Part("content", text)
            yield None
        yield Part("content", self._held)

    def value(self) -> Generator[Part | None, None, bool]:
        """Yield an object of JSON as arguments, as it is; returns whether it is whole."""
        depth, in_text, escaped = 0, False, False
        while True:
            for at, character in enumerate(self._held):
                if in_text:
                    in_text = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                    continue
                in_text = character == '"'
                depth += (character in "{[") - (character in "}]")
                if depth == 0 and character == "}":
                    yield Part("arguments", self._held[: at + 1])
                    self._held = self._held[at + 1 :]
                    return True
            text, self._held = self._held, ""
            yield Part("arguments", text)
            if self._ended:
                return False
            yield None

    def text(self, mark: str) -> Generator[Part | None, None, bool]:
        """Yield the text before a mark as a string of JSON, and drop the mark; returns whether the text is whole."""
        yield Part("arguments", '"')
        parts = self.until(mark, "arguments", strip=False)
        while True:
            try:
                part = next(parts)
            except StopIteration as end:
                yield Part("arguments", '"' if end.value else "")
                return bool(end.value)
            yield part and Part("arguments", json.dumps(part.text, ensure_ascii=False)[1:-1])


def mark(token: str) -> str:
    """Return how a token that a family has `shown` comes in the text of an answer. The same characters as other tokens are
    only text: the grammar has not seen a call there, so what follows need not be one."""
    return TOKEN_MARK + token


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a proper beginning of a mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def quoted(text: str) -> str:
    """Return a grammar's expression for a text."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: dict[str, Any]) -> str:
    """Return a grammar's expression for a value of a JSON schema."""
    return f"%json {json.dumps({'x-guidance': SPACES} | schema)}"


def arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object, with none besides those that the tool's schema names, if it names
    any in one place."""
    elsewhere = {"anyOf", "allOf", "oneOf", "$ref"} & {*schema}
    closed = {"additionalProperties": False} if "properties" in schema and not elsewhere else {}
    return {"type": "object"} | closed | schema


def one_of(expressions: Iterable[str]) -> str:
    """Return a grammar's expression for any of several."""
    return f"({' | '.join(expressions)})"


def named_calls(offer: OfferedTools, key: str, more: str = "") -> str:
    """Return a rule `call` for calls such as `{"name": "get_weather", "arguments": {"city": "Paris"}}`, whose `key`
    is `arguments`; `more` is an expression for what may be behind these."""
    behind = f'", "{key}": '
    each = (f"{quoted(name + behind)} {json_value(arguments(schema))}" for name, schema in offer.tools.items())
    return f"call: {quoted(BEGINNING)} {one_of(each)} {more} {quoted('}')}"


def read_named_call(reader: Reader, key: str) -> Generator[Part | None, None, bool]:
    """Read what `named_calls` describes, behind its beginning; returns whether it is whole."""
    if (name := (yield from reader.word('"'))) is None:
        return False
    yield Part("name", name)
    if not (yield from reader.until(f'"{key}": ', None)) or not (yield from reader.value()):
        return False
    reader.calling = False
    return True


def text_without(offer: OfferedTools, *tokens: int) -> str:
    """Return an expression for a text of any tokens but these."""
    return f"<[^{','.join(map(str, sorted({*tokens, *offer.never})))}]>*"


def text_then_calls(offer: OfferedTools, opening: int) -> str:
    """Return the first rule of a grammar of `calls`, behind text where they are not required; a token opens the first call."""
    if offer.required:
        return "start: calls"
    return f"start: {text_without(offer, opening)} calls?" if offer.said is None else f"start: calls | {offer.said}"
