"""`POST /v1/responses`."""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outrider.runtime.request import Event
from outrider.serve.api import usage
from outrider.serve.api.answer import AnswerFormat, AnswerReader
from outrider.serve.api.assembler import sse
from outrider.serve.api.bodies import JsonRoute
from outrider.serve.api.conversation import ConversationAssembler
from outrider.serve.api.dependencies import EngineDep, ModelName, SettingsDep
from outrider.serve.api.errors import RESPONSES_PATH
from outrider.serve.api.responses_protocol import NamedFunctionTool, ResponsesRequest
from outrider.serve.tools.base import Part

router = APIRouter(route_class=JsonRoute)
ITEMS = {"reasoning_content": "reasoning", "content": "message", "name": "function_call"}
PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


class Output:
    """The items of an answer as they grow, and the events that report this to the client."""

    def __init__(self, answers: AnswerFormat):
        """Start an answer."""
        self.items: list[dict[str, Any]] = []
        self._answers = answers
        self._open = False

    def take(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        """Add parts, and yield their events."""
        for kind, text in parts:
            if kind == "arguments":
                yield self._grown("arguments", text)
                continue
            item = ITEMS[kind]
            if item == "function_call" or not self._open or self.items[-1]["type"] != item:
                yield from self.close()
                yield from self._begin(item, text)
            if item != "function_call":
                yield self._grown("text", text)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Yield the events that end the open item, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **_logprobs(part))
            yield self._event("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _begin(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {"id": PREFIXES[kind] + uuid.uuid4().hex, "type": kind, "status": "in_progress"}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "function_call":
            item |= {"call_id": self._answers.call_id(), "name": name, "arguments": ""}
        elif kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**item}}
        if kind != "function_call":
            item["content"] = [part]
            yield self._event("content_part.added", content_index=0, part={**part})

    def _grown(self, key: str, text: str) -> dict[str, Any]:
        item = self.items[-1]
        if key == "arguments":
            item["arguments"] += text
            return self._event("function_call_arguments.delta", delta=text)
        (part,) = item["content"]
        part["text"] += text
        return self._event(f"{part['type']}.delta", content_index=0, delta=text, **_logprobs(part))

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if part["type"] == "output_text" else {}


class ResponsesAssembler(ConversationAssembler[ResponsesRequest]):
    """Assembles a response, whose output is a list of items."""

    id_prefix = "resp_"
    prompt_field = "input"
    grammar_field = "text"

    def whole(self, answers: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return the response."""
        (events,) = answers
        output = Output(self.answers)
        for event in events:
            for _ in self._more(output, event):
                pass
        return self._response(output, events[-1].finish_reason)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the events, each with its number."""
        output = Output(self.answers)
        number = 0

        def frame(event: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return sse(event | {"sequence_number": number - 1}, event["type"])

        for name in ("created", "in_progress"):
            yield frame({"type": f"response.{name}", "response": self._response(output)})
        reason = None
        async for _, event in self.events():
            for each in self._more(output, event):
                yield frame(each)
            reason = event.finish_reason
        response = self._response(output, reason)
        yield frame({"type": f"response.{response['status']}", "response": response})

    @functools.cached_property
    def _reader(self) -> AnswerReader:
        (request,) = self.requests
        return self.answers.reader(request.prompt)

    def _more(self, output: Output, event: Event) -> Iterator[dict[str, Any]]:
        yield from output.take(self._reader.read(event))
        if event.finish_reason is not None:
            whole = event.finish_reason == "stop" and not self._reader.cut
            yield from output.close("completed" if whole else "incomplete")

    def _response(self, output: Output, reason: str | None = None) -> dict[str, Any]:
        """Return the response; without a finish reason it is in progress."""
        body = self.body
        status = "in_progress" if reason is None else "completed" if reason == "stop" else "incomplete"
        choice = body.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model,
            "output": [*output.items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.format()},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunctionTool) else choice,
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if reason is None else self._usage(output),
            "user": body.user,
        }

    def _usage(self, output: Output) -> dict[str, Any]:
        thought = "".join(item["content"][0]["text"] for item in output.items if item["type"] == "reasoning")
        tokens = len(self.text.tokenizer.encode(thought, add_special_tokens=False).ids)
        counted = usage.usage([request.stats for request in self.requests], [*map(len, self.prompts)])
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            # A text that was cut within a character or a token may have more tokens than were generated.
            "output_tokens_details": {"reasoning_tokens": min(tokens, counted["completion_tokens"])},
            "total_tokens": counted["total_tokens"],
        }


@router.post(RESPONSES_PATH, response_model=None)
async def responses(
    body: ResponsesRequest, http: Request, engine: EngineDep, settings: SettingsDep, model: ModelName
) -> Response:
    """Answer the input."""
    return await ResponsesAssembler(http, body, engine, settings, model).answer()
