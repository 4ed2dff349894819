"""The response to one HTTP request, assembled from the events of its choices.

Streams use FastAPI's own server-sent events instead of sse-starlette. By default that package ends every stream at SIGTERM, but
this server lets answers finish.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError, UsageError
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event, Request
from outrider.runtime.text.text import PromptTooLongError
from outrider.serve.api.answer import PlainFormat
from outrider.serve.api.errors import ApiError, api_error, unknown_model
from outrider.serve.api.protocol import Common
from outrider.serve.deliveries import LATE, Result, TimedOutError, timed_out
from outrider.serve.engine import EngineThread
from outrider.serve.settings import Settings
from outrider.serve.workers.messages import PromptJob

PROMPTS = {"prompt", "messages", "tools", "instructions", "input"}  # the fields that `log_prompts` logs
LOGGER = logging.getLogger("outrider.serve")
Body = TypeVar("Body", bound=Common)


class ResponseAssembler(ABC, Generic[Body]):
    """Submits the choices of one HTTP request (n for each prompt), and assembles their events into its response."""

    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]
    grammar_field: ClassVar[str] = "structured_outputs"  # the field that errors about the grammar name

    def __init__(self, http: HttpRequest, body: Body, engine: EngineThread, settings: Settings, model: str):
        """Prepare a response.

        Args:
            model: the name of the model in the API.

        Raises:
            ApiError: the request is for another model.
            NotReadyError: the bundle is not loaded.
        """
        if body.model not in (None, model):
            raise unknown_model(body.model or "", model)
        outrider = engine.outrider
        self.text, self.capacity = outrider.text, outrider.build.capacity
        self.end_ids = outrider.manifest.generation.eos_token_ids
        self.body, self._http, self._path = body, http, http.url.path
        self._engine, self._settings = engine, settings
        self.id, self.created, self.model = f"{self.id_prefix}{uuid.uuid4().hex}", int(time.time()), model
        self.prompts: list[list[int]] = []
        self.requests: list[Request] = []
        self._results: asyncio.Queue[tuple[int, Result]] = asyncio.Queue()
        self._finished: dict[int, str] = {}  # finish reasons by choice
        self._started = time.perf_counter()
        self._first_token: float | None = None

    @abstractmethod
    def params(self, prompt: list[int], grammar: StructuredOutputs | None) -> SamplingParams:
        """Return the parameters of the answers, given the first prompt; raises `UsageError` if one is out of range."""

    @functools.cached_property
    def structured(self) -> StructuredOutputs | None:
        """The structured output that the request asks for; raises `UsageError` if it is not valid."""
        return self.body.structured()

    @functools.cached_property
    def answers(self) -> PlainFormat:
        """The format of the answers; raises `UsageError` or `ApiError` if the request cannot have it."""
        return PlainFormat(self.structured)

    def grammar_parts(self) -> dict[str, StructuredOutputs]:
        """Return the parts of the grammar, by the request's field that each comes from."""
        return {} if self.structured is None else {self.grammar_field: self.structured}

    @abstractmethod
    def whole(self, answers: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return the body of a whole response to the events of each choice."""

    @abstractmethod
    def frames(self) -> AsyncIterator[bytes]:
        """Yield the server-sent events of a stream."""

    async def encode(
        self,
        *,
        texts: Sequence[str] = (),
        messages: Sequence[dict[str, Any]] = (),
        tools: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> list[list[int]]:
        """Return the token ids of each text, or of a chat's messages, within the server's limits; see `PromptJob`.

        Raises:
            ApiError: a limit of the server is exceeded.
            UsageError, QueueFullError, EngineError: see `PromptEncoder.encode`.
            TimedOutError: its turn does not come in time.
        """
        self._check_choices(len(texts) or 1)
        settings, owner = self._settings, self._http.state.owner
        job = PromptJob(settings.max_prompt or self.capacity, texts, messages, tools, settings.allow_special_tokens, **options)
        return await encode(self._engine, job, owner, self.prompt_field, self._left)

    @property
    def _limit(self) -> float:
        """The request's time limit in seconds, or the server's."""
        return min(self._settings.timeout, self.body.timeout or self._settings.timeout)

    @property
    def _left(self) -> float:
        """What is left of the time limit."""
        return self._limit - (time.perf_counter() - self._started)

    def _hanging(self) -> TimedOutError:
        """Return the error of a request whose time is over while a step of the engines, which would notice it, hangs."""
        return timed_out(self._limit, "try again later")

    async def respond(self, prompts: list[list[int]]) -> Response:
        """Submit the prompts, all or none, and return the response, whole or as a stream.

        Raises:
            ApiError: a limit of the server is exceeded, or a choice of a whole response failed.
            UsageError, QueueFullError, NotReadyError: see `EngineThread.submit`.
            TimedOutError: the engines hang.
        """
        self._check_limits(prompts)
        self.prompts = prompts
        params = self.params(prompts[0], await self._compiled(prompts[0]) if self.answers.constrained else None)
        requests = [(prompt, replace(params, seed=seed)) for prompt in prompts for seed in self.body.seeds()]
        owner = self._http.state.owner
        try:
            async with asyncio.timeout(self._left + LATE):
                self.requests = await self._engine.submit(
                    requests,
                    lambda *result: self._results.put_nowait(result),
                    self.answers.shown,
                    owner,
                    self.body.priority,
                    self.body.timeout,
                    time.perf_counter() - self._started,
                )
        except TimeoutError as error:
            raise self._hanging() from error
        if self.body.stream:
            return _Stream(self._stream(), self._cancel)
        return JSONResponse(self.whole(await self._collect()))

    async def _compiled(self, prompt: list[int]) -> StructuredOutputs | None:
        """Return the answers' grammar, compiled in a worker, where it cannot take the engines' time or memory."""
        grammar = None
        try:
            grammar = await asyncio.to_thread(self.answers.constraint, prompt)  # building it must not block streams
            if grammar is not None:
                await self._compile(grammar, self.answers.before_grammar(prompt))
        except UsageError as error:
            parts = self.grammar_parts()
            for field, part in parts.items() if [*parts.values()] != [grammar] else ():  # find the part at fault
                try:
                    await self._compile(part)
                except UsageError as own:
                    raise ApiError(400, f"{own}; {own.hint}", field) from error
            raise ApiError(400, f"{error}; {error.hint}", next(iter(parts))) from error
        return grammar

    async def _compile(self, grammar: StructuredOutputs, opening: Sequence[int] = ()) -> None:
        engine, owner = self._engine, self._http.state.owner
        try:
            async with asyncio.timeout(self._left), engine.turn(engine.compiling, owner):
                await engine.grammars.compile(grammar, owner, opening)
        except TimeoutError as error:
            raise TimedOutError("the grammar was not compiled in time", "try again later") from error

    def _check_choices(self, prompts: int) -> None:
        if prompts * self.body.n > (limit := self._settings.max_choices):
            raise ApiError(400, f"{prompts} prompts times n = {self.body.n} exceeds the limit of {limit} choices", "n")

    def _check_limits(self, prompts: list[list[int]]) -> None:
        self._check_choices(len(prompts))
        limit = self._settings.max_prompt or self.capacity
        for prompt in prompts:
            if len(prompt) > limit:
                message = f"the prompt has {len(prompt):,} tokens; this server's limit is {limit:,}"
                raise ApiError(400, message, self.prompt_field, "context_length_exceeded")

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all choices as they arrive, each with its choice's index.

        Raises:
            ApiError: a choice failed; the others are cancelled.
        """
        soon = asyncio.get_running_loop().call_later
        late = soon(self._left + LATE, lambda: self._results.put_nowait((0, self._hanging())))
        try:
            while len(self._finished) < len(self.requests):
                index, result = await self._results.get()
                if isinstance(result, OutriderError):
                    self._finished[index] = "error"
                    raise api_error(result, self._path)
                if self._first_token is None:
                    self._first_token = time.perf_counter()
                if result.finish_reason is not None:
                    self._finished[index] = result.finish_reason
                yield index, result
        finally:
            late.cancel()
            self._cancel()
            self._log()

    def _cancel(self) -> None:
        """Cancel the choices that have not finished."""
        unfinished = {index: request for index, request in enumerate(self.requests) if index not in self._finished}
        if unfinished:
            self._engine.cancel(list(unfinished.values()))
            self._finished |= dict.fromkeys(unfinished, "cancelled")

    async def _collect(self) -> list[list[Event]]:
        """Return all events of each choice. If the client disconnects, cancel the choices."""
        events: list[list[Event]] = [[] for _ in self.requests]

        async def collect() -> None:
            async for index, event in self.events():
                events[index].append(event)

        async def disconnect() -> None:
            while (await self._http.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(collect()), asyncio.create_task(disconnect())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ApiError(499, "the client has disconnected")
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return events

    async def _stream(self) -> AsyncIterator[bytes]:
        """Yield the stream's events; an error is the last one."""
        try:
            async for frame in self.frames():
                yield frame
        except ApiError as error:
            yield sse(error.body())
        finally:
            self._cancel()

    def _log(self) -> None:
        now = time.perf_counter()
        fields: dict[str, Any] = {
            "request": self.id,
            "path": self._path,
            "prompt_tokens": sum(map(len, self.prompts)),
            "completion_tokens": sum(request.stats.emitted for request in self.requests),
            "seconds": round(now - self._started, 4),
            "first_token_seconds": None if self._first_token is None else round(self._first_token - self._started, 4),
            "finish_reasons": sorted(set(self._finished.values())),
        }
        if self._settings.log_prompts:
            fields["prompts"] = self.body.model_dump(include=PROMPTS, exclude_defaults=True)
        LOGGER.info("answered", extra=fields)


async def encode(engine: EngineThread, job: PromptJob, owner: Hashable, field: str, seconds: float) -> list[list[int]]:
    """Return the token ids of a job.

    Args:
        field: the request's field that the prompts come from.
        seconds: the time limit.

    Raises:
        ApiError: a prompt is too long.
        UsageError, QueueFullError, EngineError: see `PromptEncoder.encode`.
        TimedOutError: its turn does not come in time.
    """
    try:
        async with asyncio.timeout(seconds), engine.turn(engine.reading, owner):
            return await engine.prompts.encode(job)
    except PromptTooLongError as error:
        raise ApiError(400, str(error), field, "context_length_exceeded") from error
    except TimeoutError as error:
        raise TimedOutError("the prompt was not read in time", "try again later") from error


class _Stream(EventSourceResponse):
    """A stream that calls `end` even if the client leaves before the first chunk, so that `chunks` never runs."""

    def __init__(self, chunks: AsyncIterator[bytes], end: Callable[[], None]):
        super().__init__(chunks, headers={"Cache-Control": "no-cache"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def sse(body: dict[str, Any], event: str | None = None) -> bytes:
    """Return a server-sent event with a JSON body, and optionally a name."""
    return format_sse_event(data_str=json.dumps(body, separators=(",", ":")), event=event)
