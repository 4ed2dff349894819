"""Answers to the messages of a conversation, which may call tools: chats and responses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

from fastapi.responses import Response

from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.serve.api.answer import AnswerFormat
from outrider.serve.api.assembler import ResponseAssembler
from outrider.serve.api.chat_protocol import Conversation

ConversationBody = TypeVar("ConversationBody", bound=Conversation)


class ConversationAssembler(ResponseAssembler[ConversationBody]):
    """Reads a conversation, and assembles its answers."""

    @functools.cached_property
    def answers(self) -> AnswerFormat:
        """The format of the answers; raises `ApiError` if the tools cannot be used."""
        body = self.body
        return AnswerFormat(self.text, self.end_ids, body.functions, body.choice, body.parallel_tool_calls, self.structured)

    @property
    def constrained(self) -> bool:
        """See `ResponseAssembler.constrained`."""
        return self.answers.constrained

    def grammar(self, prompt: list[int]) -> StructuredOutputs | None:
        """See `ResponseAssembler.grammar`."""
        return self.answers.constraint(prompt)

    def before_grammar(self, prompt: list[int]) -> list[int]:
        """See `ResponseAssembler.before_grammar`."""
        return self.answers.before_grammar(prompt)

    @property
    def shown(self) -> Mapping[int, str]:
        """See `ResponseAssembler.shown`."""
        return self.answers.shown

    def grammar_parts(self) -> dict[str, StructuredOutputs]:
        """See `ResponseAssembler.grammar_parts`."""
        calls = self.answers.calls()
        return super().grammar_parts() | ({} if calls is None else {"tools": calls})

    def params(self, prompt: list[int], grammar: StructuredOutputs | None) -> SamplingParams:
        """See `ResponseAssembler.params`. Without a maximum length, an answer may fill the cache."""
        maximum = self.body.max_new_tokens
        maximum = max(self.capacity - len(prompt) + 1, 1) if maximum is None else maximum
        return self.body.params(maximum, self.body.candidates, grammar)

    async def answer(self) -> Response:
        """Return the response to the conversation; see `encode` and `respond`."""
        return await self.respond(
            await self.encode(
                messages=self.body.template_messages(),
                tools=self.answers.definitions,
                template_kwargs=self.body.template_kwargs(),
            )
        )
