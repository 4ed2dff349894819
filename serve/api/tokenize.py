"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from outrider.serve.api.assembler import encode
from outrider.serve.api.bodies import JsonRoute
from outrider.serve.api.chat_protocol import MessageList, ToolList, template_messages
from outrider.serve.api.dependencies import EngineDep, ModelName, SettingsDep
from outrider.serve.api.errors import ApiError, unknown_model
from outrider.serve.api.protocol import Strict
from outrider.serve.workers.messages import PromptJob

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(Strict):
    """The body of `POST /tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: MessageList | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=64)
    tools: ToolList = Field(default=[])
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and (self.add_generation_prompt is not None or self.chat_template_kwargs or self.tools):
            raise ValueError("add_generation_prompt, chat_template_kwargs and tools need messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens needs prompt: a chat template writes its own")
        return self


class DetokenizeRequest(Strict):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


@router.post("/tokenize", response_model=None)
async def tokenize(
    body: TokenizeRequest, http: Request, engine: EngineDep, settings: SettingsDep, model: ModelName
) -> Response:
    """Return the tokens of a prompt or of messages, up to the limit that requests for answers have."""
    if body.model not in (None, model):
        raise unknown_model(body.model or "", model)
    capacity = engine.outrider.build.capacity
    job = PromptJob(
        settings.max_prompt or capacity,
        [] if body.prompt is None else [body.prompt],
        [] if body.messages is None else template_messages(body.messages),
        [tool.function.definition() for tool in body.tools],
        settings.allow_special_tokens,
        add_special_tokens=body.add_special_tokens is not False,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=body.chat_template_kwargs,
    )
    field = "messages" if body.prompt is None else "prompt"
    (tokens,) = await encode(engine, job, http.state.owner, field, settings.timeout)
    text = engine.outrider.text
    strings = await asyncio.to_thread(lambda: [*map(text.token, tokens)]) if body.return_token_strs else None
    return JSONResponse({"count": len(tokens), "max_model_len": capacity, "tokens": tokens, "token_strs": strings})


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeRequest, engine: EngineDep, settings: SettingsDep, model: ModelName) -> Response:
    """Return the text of tokens, including special ones."""
    if body.model not in (None, model):
        raise unknown_model(body.model or "", model)
    outrider = engine.outrider
    limit, rows = settings.max_prompt or outrider.build.capacity, outrider.manifest.vocab_rows
    if len(body.tokens) > limit:
        raise ApiError(400, f"there are {len(body.tokens):,} tokens; this server's limit is {limit:,}", "tokens")
    if any(not 0 <= token < rows for token in body.tokens):
        raise ApiError(400, f"tokens are ids from 0 to {rows - 1:,}", "tokens")
    return JSONResponse({"prompt": await asyncio.to_thread(outrider.text.decode, body.tokens)})
