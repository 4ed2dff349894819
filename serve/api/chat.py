"""`POST /v1/chat/completions`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outrider.runtime.request import Event
from outrider.serve.api.answer import AnswerReader
from outrider.serve.api.bodies import JsonRoute
from outrider.serve.api.chat_protocol import ChatRequest
from outrider.serve.api.choices import ChoicesAssembler
from outrider.serve.api.conversation import ConversationAssembler
from outrider.serve.api.dependencies import EngineDep, ModelName, SettingsDep
from outrider.serve.api.errors import CHAT_PATH, ApiError
from outrider.serve.api.logprobs import chat_logprobs
from outrider.serve.tools.base import Part

router = APIRouter(route_class=JsonRoute)


class ChatAssembler(ConversationAssembler[ChatRequest], ChoicesAssembler[ChatRequest]):
    """Assembles the assistant's next message."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prompt_field = "messages"

    def opening(self) -> list[dict[str, Any]]:
        """Return a first chunk for each choice, with the role."""
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{"index": index, **first} for index in range(self.body.n)]

    @functools.cached_property
    def _readers(self) -> list[AnswerReader]:
        """The parser of each choice."""
        return [self.answers.reader(request.prompt) for request in self.requests]

    @functools.cached_property
    def _calls(self) -> list[int]:
        """The number of calls in each choice so far."""
        return [0] * len(self.requests)

    def _delta(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """Return parts as a delta of a choice's message. Counts the calls."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for kind, text in parts:
            if kind in ("content", "reasoning_content"):
                delta[kind] = delta.get(kind, "") + text
                continue
            if kind == "name":
                at, self._calls[index] = self._calls[index], self._calls[index] + 1
                function = {"name": text, "arguments": ""}
                calls[at] = {"index": at, "id": self.answers.call_id(), "type": "function", "function": function}
            else:
                at = self._calls[index] - 1
                call = calls.setdefault(at, {"index": at, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
        return delta | ({"tool_calls": [*calls.values()]} if calls else {})

    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """Return a choice with the whole message."""
        delta = self._delta(index, [part for event in events for part in self._readers[index].read(event)])
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in delta.get("tool_calls", ())]
        message = {"role": "assistant", "content": delta.get("content", None if calls else ""), "refusal": None}
        if self.answers.thinks:
            message["reasoning_content"] = delta.get("reasoning_content", "")
        return self._choice(index, events, message=message | ({"tool_calls": calls} if calls else {}))

    def chunk(self, index: int, event: Event) -> dict[str, Any] | None:
        """Return a choice with the delta that one event adds to the message."""
        delta = self._delta(index, self._readers[index].read(event))
        adds = delta or event.finish_reason is not None or event.logprobs or (event.pieces and self.body.return_origin)
        return self._choice(index, [event], delta=delta) if adds else None

    def _choice(self, index: int, events: Sequence[Event], **content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": index,
            **content,
            "finish_reason": self._readers[index].finish_reason(events[-1]),
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
    return await assembler.answer()
