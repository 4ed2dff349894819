"""Responses with choices: chats and completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from fastapi.sse import format_sse_event

from outrider.runtime.request import Event
from outrider.runtime.text.stream import TOKEN_MARK
from outrider.serve.api import usage
from outrider.serve.api.assembler import Body, ResponseAssembler, sse


class ChoicesAssembler(ResponseAssembler[Body]):
    """Assembles responses with choices."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    @abstractmethod
    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """Return a choice of a whole response."""

    @abstractmethod
    def chunk(self, index: int, event: Event) -> dict[str, Any] | None:
        """Return a choice of a stream's chunk; None if the event adds nothing."""

    def opening(self) -> list[dict[str, Any]]:
        """Return the choices of a stream's first chunks."""
        return []

    def whole(self, answers: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return all choices."""
        choices = [self.choice(index, events) for index, events in enumerate(answers)]
        return self._envelope(self.object_name, choices=choices, **self._totals())

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the chunks, each with a choice."""
        options = self.body.stream_options
        empty = {"usage": None} if options is not None and options.include_usage else {}
        for choice in self.opening():
            yield sse(self._envelope(self.chunk_name, choices=[choice], **empty))
        async for index, event in self.events():
            if (more := self.chunk(index, event)) is not None:
                yield sse(self._envelope(self.chunk_name, choices=[more], **empty))
        if empty:
            yield sse(self._envelope(self.chunk_name, choices=[], **self._totals()))
        yield format_sse_event(data_str="[DONE]")

    def _envelope(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model, "object": name, **fields}

    def _totals(self) -> dict[str, Any]:
        stats = [request.stats for request in self.requests]
        prompts = [len(prompt) for prompt in self.prompts]
        return {"usage": usage.usage(stats, prompts), "metrics": usage.speculation_metrics(stats)}

    def origin(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return each piece of text with whether it was drafted, if the request asks for them."""
        if not self.body.return_origin:
            return {}
        pieces = ((text.replace(TOKEN_MARK, ""), from_draft) for event in events for text, from_draft in event.pieces)
        return {"origin": [[text, from_draft] for text, from_draft in pieces if text]}
