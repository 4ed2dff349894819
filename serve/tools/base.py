"""The interface of families of models that call tools, and the parser for their answers."""

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
    """A piece of an answer: reasoning, content, or part of a call. The `name` of a call comes before its `arguments`."""

    kind: Literal["reasoning_content", "content", "name", "arguments"]
    text: str


AnswerParts = Generator[Part | None, None, None]  # None where more text is needed


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools that a model may call in its answer, and the rules for the answer."""

    tools: Mapping[str, dict[str, Any]]  # JSON schemas of the arguments, by name
    never: Sequence[int]  # tokens that no text may have: those that end an answer, and the one that opens the reasoning
    required: bool = False  # whether the model must call a tool
    parallel: bool = True  # whether it may call several
    said: str | None = None  # a grammar's expression for an answer without calls; None allows any text
    strict: Collection[str] = ()  # tools whose schemas must be enforced completely


class Family(ABC):
    """How the models of a family call tools."""

    tokens: ClassVar[tuple[str, ...]] = ()  # tokens that every model of the family has in its vocabulary
    reads_every_answer: ClassVar[bool] = False  # including the answers of chats without tools

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
        """The special tokens that `read` needs to see, with their texts. The text has no other special tokens. See `mark`."""
        return {self.token(text): text for text in self.tokens}

    @property
    def opening(self) -> list[int]:
        """Tokens that start a call."""
        return [self.token(self.tokens[0])]

    @abstractmethod
    def grammar(self, offer: OfferedTools) -> str:
        """Return the grammar of an answer, in the syntax of llguidance's Lark."""

    @abstractmethod
    def read(self, reader: Reader, tools: Mapping[str, dict[str, Any]]) -> AnswerParts:
        """Yield the parts of an answer that `grammar` accepts; `tools` are the offered tools."""

    def call_id(self) -> str:
        """Return a new id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def token(self, text: str) -> int:
        """Return the id of a token that the tokenizer has."""
        token: int = self._tokenizer.token_to_id(text)
        return token


class Reader:
    """Parses an answer as its text arrives."""

    def __init__(self, read: Callable[[Reader], AnswerParts]):
        """Start an answer; `read` yields its parts, see `Family.read`."""
        self._held = ""
        self._ended = False
        self._parts = read(self)
        self._calling = self._called = False

    @property
    def calling(self) -> bool:
        """Whether a call has started and is not complete."""
        return self._calling

    def push(self, text: str, last: bool) -> list[Part]:
        """Return the new parts that are known after more text. After the `last` text nothing is held back."""
        self._held += text
        self._ended = last
        known = []
        for part in self._parts:
            if part is None:
                break
            if part.text:
                known.append(part)
            if part.kind == "name":
                self._calling = True
        return known

    def starts(self, mark: str) -> Generator[None, None, bool]:
        """Return whether the text starts with a mark, and drop the mark."""
        while len(self._held) < len(mark) and mark.startswith(self._held) and not self._ended:
            yield None
        found = self._held.startswith(mark)
        self._held = self._held[len(mark) :] if found else self._held
        return found

    def until(
        self, mark: str, kind: Literal["reasoning_content", "content", "arguments"] | None, strip: bool = True
    ) -> Generator[Part | None, None, bool]:
        """Yield the text before a mark as parts of a kind, and drop the mark. Returns whether the answer had the mark.

        Args:
            kind: the kind of the parts; None drops the text.
            strip: whether to drop the white space before the mark.
        """
        while (at := self._held.find(mark)) < 0 and not self._ended:
            known = self._held[: len(self._held) - overlap(self._held, mark)]
            known = known.rstrip() if strip else known
            self._held = self._held[len(known) :]
            if kind is not None:
                yield Part(kind, known)
            yield None
        if at < 0:
            kept = overlap(self._held, mark) if kind == "arguments" else 0  # drop a cut mark, which is not part of them
            before, self._held = self._held[: len(self._held) - kept], ""
        else:
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            before = before.rstrip() if strip else before
        if kind is not None:
            yield Part(kind, before)
        return at >= 0

    def call(self, mark: str) -> Generator[Part | None, None, bool]:
        """Yield the text before a mark that starts a call, as content; between calls, drop what is only white space. Returns
        whether a call starts."""
        found = yield from self.until(mark, None if self._called else "content")
        if found:
            self._called = self._calling = True
        return found

    def named_call(self, key: str) -> Generator[Part | None, None, bool]:
        """Yield a call as in `named_calls`, after its `BEGINNING`. Returns whether it is complete."""
        self._calling = True
        if (name := (yield from self.word('"'))) is None:
            return False
        yield Part("name", name)
        return (yield from self.until(f'"{key}": ', None)) and (yield from self.value())

    def complete(self) -> None:
        """Record that the arguments of the call are complete, unless `value` read them."""
        self._calling = False

    def word(self, mark: str) -> Generator[None, None, str | None]:
        """Return the whole text before a mark, and drop the mark; None if the answer ends without the mark."""
        while (at := self._held.find(mark)) < 0:
            if self._ended:
                return None
            yield None
        word, self._held = self._held[:at], self._held[at + len(mark) :]
        return word

    def rest(self) -> AnswerParts:
        """Yield all remaining text as content."""
        while not self._ended:
            text, self._held = self._held, ""
            yield Part("content", text)
            yield None
        text, self._held = self._held, ""
        yield Part("content", text)

    def value(self) -> Generator[Part | None, None, bool]:
        """Yield a JSON object as the arguments of a call, unchanged. Returns whether it is complete."""
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
                    self.complete()
                    return True
            text, self._held = self._held, ""
            yield Part("arguments", text)
            if self._ended:
                return False
            yield None

    def text(self, mark: str) -> Generator[Part | None, None, bool]:
        """Yield the text before a mark as a JSON string, and drop the mark. Returns whether the text is complete."""
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
    """Return the form of a `shown` token in the text of an answer. The mark distinguishes it from ordinary tokens with the same
    characters: the grammar does not start a call at those, so no call may follow."""
    return TOKEN_MARK + token


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def quoted(text: str) -> str:
    """Return a grammar's expression for a text."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: dict[str, Any]) -> str:
    """Return a grammar's expression for a value of a JSON schema."""
    return f"%json {json.dumps({'x-guidance': SPACES} | schema)}"


def arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object. If the tool's schema lists all its properties in one place, it may
    have no others."""
    elsewhere = {"anyOf", "allOf", "oneOf", "$ref"} & {*schema}
    closed = {"additionalProperties": False} if "properties" in schema and not elsewhere else {}
    return {"type": "object"} | closed | schema


def one_of(expressions: Iterable[str]) -> str:
    """Return a grammar's expression for any of several."""
    return f"({' | '.join(expressions)})"


def named_calls(offer: OfferedTools, key: str, more: str = "") -> str:
    """Return a rule `call` for calls such as `{"name": "get_weather", "arguments": {"city": "Paris"}}`. The `key` of this
    example is `arguments`; `more` is an expression for text after the arguments."""
    behind = f'", "{key}": '
    each = (f"{quoted(name + behind)} {json_value(arguments(schema))}" for name, schema in offer.tools.items())
    return f"call: {quoted(BEGINNING)} {one_of(each)} {more} {quoted('}')}"


def text_without(offer: OfferedTools, *tokens: int) -> str:
    """Return an expression for a text without these tokens."""
    return f"<[^{','.join(map(str, sorted({*tokens, *offer.never})))}]>*"


def text_then_calls(offer: OfferedTools, opening: int) -> str:
    """Return the first rule of a grammar: `calls`, after text if they are not required. The token `opening` starts a call."""
    if offer.required:
        return "start: calls"
    return f"start: {text_without(offer, opening)} calls?" if offer.said is None else f"start: calls | {offer.said}"
