"""The grammar of the answers to a conversation, and their parsing into reasoning, content and tool calls."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import UsageError
from outrider.runtime.grammar.schemas import enforced
from outrider.runtime.grammar.structured import SAID, StructuredOutputs
from outrider.runtime.request import Event
from outrider.runtime.text.stream import NONE_SHOWN, TOKEN_MARK
from outrider.runtime.text.text import Text
from outrider.serve.api.chat_protocol import Function, NamedFunction
from outrider.serve.api.errors import ApiError
from outrider.serve.api.reasoning import ReasoningSplitter, marks_of, opened
from outrider.serve.api.usage import finish_reason
from outrider.serve.tools import family_of
from outrider.serve.tools.base import OfferedTools, Part, Reader, mark

END = 16  # tokens at the end of a prompt that may open the reasoning


class PlainFormat:
    """The format of answers that are not parsed."""

    def __init__(self, asked: StructuredOutputs | None):
        """Constrain the answers to the structured output that a request asks for, if it does."""
        self._asked = asked

    @property
    def constrained(self) -> bool:
        """Whether the answers have a grammar."""
        return self._asked is not None

    @property
    def shown(self) -> Mapping[int, str]:
        """The tokens whose text is part of the answers even if they are special; see `TextStream`."""
        return NONE_SHOWN

    def constraint(self, prompt: Sequence[int]) -> StructuredOutputs | None:
        """Return the grammar of the answer to a prompt."""
        return self._asked

    def before_grammar(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens before the part of an answer to a prompt that the request constrains; see `rehearse`."""
        return []


class AnswerFormat(PlainFormat):
    """The format of the answers to one conversation, which depends on the model's family."""

    def __init__(
        self,
        text: Text,
        end_ids: Sequence[int],
        functions: Sequence[Function],
        choice: str | NamedFunction,
        parallel: bool,
        asked: StructuredOutputs | None = None,
    ):
        """Decide which functions the model may call.

        Args:
            end_ids: the tokens that end an answer.
            functions: the request's functions.
            choice: "none", "auto" or "required", or the function that must be called.
            parallel: whether an answer may have several calls.
            asked: the structured output that the request asks for; it applies to answers without calls.

        Raises:
            ApiError: a function is defined twice or not at all, its schema cannot be enforced, or the server cannot parse the
                model's calls.
        """
        super().__init__(asked)
        self._text, self._end_ids = text, end_ids
        self._family, self._marks = family_of(text), marks_of(text.tokenizer)
        self._reads_itself = self._family is not None and self._family.reads_every_answer
        self._tools = {} if choice == "none" else {function.name: function for function in functions}
        if len({function.name for function in functions}) < len(functions):
            raise ApiError(400, "two tools have the same name", "tools")
        if self._tools and self._family is None:
            raise ApiError(
                400, "this server does not support the tool calls of this model, or its chat template has none", "tools"
            )
        self._required, self._parallel = choice not in ("none", "auto"), parallel
        self._strict = {name for name, function in self._tools.items() if function.strict}
        self._schemas = {name: self._enforced(function) for name, function in self._tools.items()}
        if isinstance(choice, NamedFunction):
            self._schemas = {name: schema for name, schema in self._schemas.items() if name == choice.name}
            self._parallel = False
        if self._required and not self._schemas:
            raise ApiError(400, "tool_choice requires a tool that is not in tools", "tool_choice")

    @staticmethod
    def _enforced(function: Function) -> dict[str, Any]:
        try:
            schema: dict[str, Any] = enforced(function.parameters, function.strict)
        except UsageError as error:
            raise ApiError(400, f"{function.name}: {error}; {error.hint}", "tools") from error
        return schema

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools for the chat template; empty if the model may not call any."""
        return [function.definition() for function in self._tools.values()]

    @property
    def thinks(self) -> bool:
        """Whether the model marks its reasoning."""
        return self._marks is not None or self._reads_itself

    @functools.cached_property
    def grammar(self) -> StructuredOutputs | None:
        """The grammar of an answer after its reasoning: the requested structured output or, with tools, also calls.

        Raises:
            ApiError: the tools' schemas cannot be enforced.
        """
        return self.calls(self._required, self._asked) or self._asked

    @property
    def constrained(self) -> bool:
        """See `PlainFormat.constrained`."""
        return bool(self._schemas) or super().constrained

    def calls(self, required: bool = True, said: StructuredOutputs | None = None) -> StructuredOutputs | None:
        """Return the grammar of answers that must or may have calls; None if the model may not call tools.

        Args:
            required: whether an answer must have a call.
            said: the grammar of an answer without calls; None allows any text.

        Raises:
            ApiError: the tools' schemas cannot be enforced.
        """
        if not self._schemas or self._family is None:
            return None
        thought = () if self._marks is None else (self._text.tokenizer.token_to_id(self._marks[0]),)
        expression = None if said is None or required else f"@{SAID}"
        offer = OfferedTools(self._schemas, (*self._end_ids, *thought), required, self._parallel, expression, self._strict)
        try:
            grammar = self._family.grammar(offer)
            calls = StructuredOutputs(grammar=grammar)
        except UsageError as error:
            raise ApiError(400, f"{error}; {error.hint}", "tools") from error
        return calls if expression is None or said is None else said.within(grammar, SAID)

    def constraint(self, prompt: Sequence[int]) -> StructuredOutputs | None:
        """Return the grammar of the answer to a prompt, including the reasoning before it; raises as `grammar` does."""
        if self.grammar is None or self._marks is None or self._reads_itself:
            return self.grammar
        opening, closing = map(self._text.tokenizer.token_to_id, self._marks)
        return self.grammar.after_reasoning(opening, closing, opened(self._marks[0], self._end_of(prompt)))

    def before_grammar(self, prompt: Sequence[int]) -> list[int]:
        """See `PlainFormat.before_grammar`. They end the free text of the answer."""
        tokens: list[int] = []
        if self._marks is not None and not self._reads_itself:
            marks = self._marks[opened(self._marks[0], self._end_of(prompt)) :]
            tokens += map(self._text.tokenizer.token_to_id, marks)
        if self._family is not None and self._schemas and self._asked is None:
            tokens += self._family.opening
        return tokens

    def _end_of(self, prompt: Sequence[int]) -> str:
        return self._text.decode([*prompt[-END:]])

    def call_id(self) -> str:
        """Return a new id for a call."""
        assert self._family is not None
        return self._family.call_id()

    @functools.cached_property
    def shown(self) -> dict[int, str]:
        """The tokens that are parsed as tokens, with their texts. In the answer's text, each has a mark before it."""
        shown: dict[int, str] = {}
        if self._marks is not None and not self._reads_itself and self.grammar is not None:
            # The grammar ends the reasoning at the token, not at the same text.
            shown |= {self._text.tokenizer.token_to_id(text): text for text in self._marks}
        if self._family is not None and (self._schemas or self._reads_itself):
            shown |= self._family.shown
        return shown

    def reader(self, prompt: list[int]) -> AnswerReader:
        """Return a parser for one answer, whose text contains the tokens in `shown`."""
        splitter, reader = None, None
        if self._marks is not None and not self._reads_itself:
            opening, closing = self._marks if self.grammar is None else map(mark, self._marks)
            splitter = ReasoningSplitter((opening, closing), self._end_of(prompt))
        if (family := self._family) is not None and (self._schemas or self._reads_itself):
            reader = Reader(lambda reader: family.read(reader, self._schemas))
        return AnswerReader(splitter, reader)


class AnswerReader:
    """Parses one answer as it arrives."""

    def __init__(self, splitter: ReasoningSplitter | None, reader: Reader | None = None):
        """Begin an answer."""
        self._splitter, self._reader = splitter, reader
        self._called = False

    def read(self, event: Event) -> list[Part]:
        """Return the new parts that are known after an event, none of them empty."""
        last = event.finish_reason is not None
        text, parts = event.text, []
        if self._splitter is not None:
            thought, text = self._splitter.push(text, last)
            parts.append(Part("reasoning_content", thought))
        parts += [Part("content", text)] if self._reader is None else self._reader.push(text, last)
        self._called = self._called or any(part.kind == "name" for part in parts)
        parts = [part._replace(text=part.text.replace(TOKEN_MARK, "")) for part in parts]
        return [part for part in parts if part.text]

    @property
    def cut(self) -> bool:
        """Whether a call has started and its arguments are not complete."""
        return self._reader is not None and self._reader.calling

    def finish_reason(self, event: Event) -> str | None:
        """Return why the answer ends after an event, in OpenAI's terms."""
        if event.finish_reason == "stop" and self._called and not self.cut:
            return "tool_calls"
        return finish_reason(event.finish_reason)
