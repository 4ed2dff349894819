"""`POST /v1/chat/completions`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event
from outrider.serve.assembler import ResponseAssembler
from outrider.serve.bodies import JsonRoute
from outrider.serve.dependencies import EngineDep, ModelName, SettingsDep
from outrider.serve.errors import CHAT_PATH, ApiError
from outrider.serve.protocol import ChatRequest, chat_logprobs, finish_reason, template_messages
from outrider.serve.reasoning import ReasoningSplitter, marks_of, opened

router = APIRouter(route_class=JsonRoute)
END = 16  # tokens at the end of a prompt that may open the reasoning


class ChatAssembler(ResponseAssembler[ChatRequest]):
    """Assembles the assistant's next message."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_field = "messages"

    def params(self, prompt: list[int]) -> SamplingParams:
        """Return the request's parameters; without a maximum length, the answer may fill the cache."""
        chat = self.body
        max_tokens = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
        if max_tokens is None:
            max_tokens = max(self.capacity - len(prompt) + 1, 1)
        params = chat.params(max_tokens, (chat.top_logprobs or 0) if chat.logprobs else None)
        if params.structured_outputs is None or (marks := marks_of(self.text.tokenizer)) is None:
            return params
        thinks = opened(marks[0], self.text.decode(prompt[-END:]))
        opening, closing = (self.text.tokenizer.token_to_id(mark) for mark in marks)
        return replace(params, structured_outputs=params.structured_outputs.after_reasoning(opening, closing, thinks))

    def opening(self) -> list[dict[str, Any]]:
        """Return a chunk with the role for each choice."""
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{"index": index, **first} for index in range(self.body.n)]

    @functools.cached_property
    def _splitters(self) -> list[ReasoningSplitter]:
        """One for each choice of a model that thinks between marks; none for other models."""
        marks, (prompt,) = marks_of(self.text.tokenizer), self._prompts
        if marks is None:
            return []
        end = self.text.decode(prompt[-END:])
        return [ReasoningSplitter(marks, end) for _ in range(self.body.n)]

    def _parts(self, index: int, text: str, last: bool) -> dict[str, str]:
        if not self._splitters:
            return {"content": text}
        return self._splitters[index].push(text, last)._asdict()

    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """Return a choice with the whole message."""
        parts = self._parts(index, "".join(event.text for event in events), True)
        return self._choice(index, events, message={"role": "assistant", **parts, "refusal": None})

    def chunk(self, index: int, event: Event) -> dict[str, Any]:
        """Return a choice with the text of one event."""
        parts = self._parts(index, event.text, event.finish_reason is not None)
        return self._choice(index, [event], delta={name: part for name, part in parts.items() if part or len(parts) == 1})

    def _choice(self, index: int, events: Sequence[Event], **content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": index,
            **content,
            "finish_reason": finish_reason(events[-1].finish_reason),
            "logprobs": chat_logprobs(self.text, events) if self.body.logprobs else None,
            **self.origin(events),
        }


@router.post(CHAT_PATH, response_model=None)
async def chat_completions(
    body: ChatRequest, http: Request, engine: EngineDep, settings: SettingsDep, model: ModelName
) -> Response:
    """Answer the messages of a chat."""
    assembler = ChatAssembler(http, body, engine, settings, model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    return await assembler.respond(
        await assembler.encode(messages=template_messages(body.messages), template_kwargs=body.chat_template_kwargs)
    )
