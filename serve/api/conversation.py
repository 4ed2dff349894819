"""Answers to the messages of a conversation, which may call tools: chats and responses."""

from __future__ import annotations

import functools
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
        """See `ResponseAssembler.answers`."""
        body = self.body
        return AnswerFormat(self.text, self.end_ids, body.functions, body.choice, body.parallel_tool_calls, self.structured)

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
