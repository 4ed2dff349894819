"""`POST /v1/completions`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event
from outrider.serve.api.bodies import JsonRoute
from outrider.serve.api.choices import ChoicesAssembler
from outrider.serve.api.completions_protocol import CompletionRequest
from outrider.serve.api.dependencies import EngineDep, ModelName, SettingsDep
from outrider.serve.api.logprobs import CompletionLogprobs
from outrider.serve.api.usage import finish_reason

router = APIRouter(route_class=JsonRoute)


class CompletionAssembler(ChoicesAssembler[CompletionRequest]):
    """Assembles text completions."""

    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"
    prompt_field = "prompt"

    @functools.cached_property
    def _logprobs(self) -> list[CompletionLogprobs]:
        return [CompletionLogprobs(self.text, request.prompt) for request in self.requests]

    def params(self, prompt: list[int], grammar: StructuredOutputs | None) -> SamplingParams:
        """Return the request's parameters, which are the same for each prompt."""
        return self.body.params(self.body.max_tokens, self.body.logprobs, grammar)

    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """Return a choice with the text of the events."""
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self._logprobs[index].append(events)
        return {
            "index": index,
            "text": "".join(event.text for event in events),
            "logprobs": logprobs,
            "finish_reason": finish_reason(events[-1].finish_reason),
            **self.origin(events),
        }

    def chunk(self, index: int, event: Event) -> dict[str, Any] | None:
        """Return a choice with the text of one event."""
        adds = event.pieces or event.finish_reason is not None or event.logprobs
        return self.choice(index, [event]) if adds else None


@router.post("/v1/completions", response_model=None)
async def completions(
    body: CompletionRequest, http: Request, engine: EngineDep, settings: SettingsDep, model: ModelName
) -> Response:
    """Continue one or several prompts."""
    assembler = CompletionAssembler(http, body, engine, settings, model)
    body.check_best_of()
    return await assembler.respond(body.token_ids() or await assembler.encode(texts=body.texts()))
