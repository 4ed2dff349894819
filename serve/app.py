"""The HTTP surface: routes, answers and streams."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from outrider import __version__
from outrider.errors import OutriderError
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Scheduler
from outrider.serve import protocol
from outrider.serve.errors import ApiError, api_error, http_error, invalid
from outrider.serve.guard import Guard
from outrider.serve.metrics import Metrics
from outrider.serve.page import page
from outrider.serve.protocol import ChatRequest, Common, CompletionRequest
from outrider.serve.settings import Settings
from outrider.serve.worker import Ticket, Worker

LOGGER = logging.getLogger("outrider.serve")
CHAT = "/v1/chat/completions"


class Answers:
    """The answers to one HTTP request: one for each prompt and choice."""

    def __init__(self, worker: Worker, settings: Settings, request: Request, asked: Common, model: str):
        self.id = f"{'chatcmpl' if isinstance(asked, ChatRequest) else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model  # its name, also where the worker ends meanwhile
        self._worker, self._settings, self._request, self._asked = worker, settings, request, asked
        self._started = time.perf_counter()
        self._first: float | None = None
        self._queue: asyncio.Queue[tuple[int, Event | OutriderError]] = asyncio.Queue()
        self.tickets: list[Ticket] = []
        self.prompts: list[list[int]] = []
        self._ended: dict[int, str] = {}

    async def submit(self, prompts: list[list[int]], params: Callable[[list[int]], SamplingParams]) -> None:
        """Queue all of them, or none."""
        asked, settings = self._asked, self._settings
        if len(prompts) * asked.n > settings.max_choices:
            raise ApiError(400, f"{len(prompts)} prompts times n = {asked.n} are more than {settings.max_choices} answers", "n")
        most = settings.max_prompt or self._worker.scheduler.outrider.build.capacity
        for prompt in prompts:
            if len(prompt) > most:
                message = f"the prompt has {len(prompt):,} tokens; this server takes {most:,}"
                param = "messages" if isinstance(asked, ChatRequest) else "prompt"
                raise ApiError(400, message, param, "context_length_exceeded")
        self.prompts = prompts
        requests = [
            (prompt, replace(usual, seed=seed), self._deliver(at * asked.n + choice))
            for at, prompt in enumerate(prompts)
            for usual in [params(prompt)]
            for choice, seed in enumerate(asked.seeds())
        ]
        self.tickets = await self._worker.submit(requests)

    def _deliver(self, place: int) -> Callable[[Event | OutriderError], None]:
        return lambda result: self._queue.put_nowait((place, result))

    def cancel(self) -> None:
        """Drop those that are not ended."""
        for place, ticket in enumerate(self.tickets):
            if place not in self._ended:
                self._worker.cancel(ticket)
                self._ended[place] = "cancelled"

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Each answer's events as they are confirmed, with its number.

        Raises:
            ApiError: an answer failed; the others are dropped.
        """
        try:
            while len(self._ended) < len(self.tickets):
                place, result = await self._queue.get()
                if isinstance(result, OutriderError):
                    self._ended[place] = "error"
                    raise api_error(result, isinstance(self._asked, ChatRequest))
                if self._first is None:
                    self._first = time.perf_counter()
                if result.finish_reason is not None:
                    self._ended[place] = result.finish_reason
                yield place, result
        finally:
            self.cancel()
            self._log()

    async def whole(self) -> list[list[Event]]:
        """All events of each answer; a client that goes away ends them.

        Raises:
            ApiError: see `events`.
        """
        found: list[list[Event]] = [[] for _ in self.tickets]

        async def collect() -> None:
            async for place, event in self.events():
                found[place].append(event)

        async def gone() -> None:
            while (await self._request.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(collect()), asyncio.create_task(gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise ApiError(499, "the client went away")
            tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found

    @property
    def stats(self) -> list[Any]:
        return [ticket.job.answer.stats for ticket in self.tickets if ticket.job is not None]

    def totals(self) -> dict[str, Any]:
        """Usage and what speculation did, for the end."""
        prompts = [len(prompt) for prompt in self.prompts]
        return {"usage": protocol.usage(self.stats, prompts), "metrics": protocol.metrics(self.stats)}

    def _log(self) -> None:
        now = time.perf_counter()
        said: dict[str, Any] = {
            "request": self.id,
            "path": self._request.url.path,
            "prompt_tokens": sum(map(len, self.prompts)),
            "completion_tokens": sum(each.emitted for each in self.stats),
            "seconds": round(now - self._started, 4),
            "first_token_seconds": None if self._first is None else round(self._first - self._started, 4),
            "finish_reasons": sorted(set(self._ended.values())),
        }
        if self._settings.log_prompts:
            said["prompts"] = self._asked.model_dump(include={"prompt", "messages"})
        LOGGER.info("answered", extra=said)


def create_app(settings: Settings) -> tuple[FastAPI, Worker, Metrics]:
    """The server's application, which starts and stops the worker, and both that it stands on."""
    metrics = Metrics()

    def load() -> Scheduler:
        outrider = Outrider.load(settings.bundle, device=settings.device, slots=None)
        return Scheduler(outrider, max_waiting=settings.max_waiting, k=settings.k, drafter=settings.drafter)

    worker = Worker(settings.bundle, load, metrics, settings.timeout)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="Outrider", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, settings=settings, metrics=metrics)

    @app.exception_handler(ApiError)
    async def _(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(OutriderError)
    async def _(request: Request, error: OutriderError) -> Response:
        return api_error(error, request.url.path == CHAT).response()

    app.add_exception_handler(HTTPException, http_error)

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> Response:
        return invalid(error).response()

    def model_name() -> str:
        return settings.model or worker.scheduler.outrider.manifest.models["target"].source.rstrip("/").rsplit("/", 1)[-1]

    def checked_model(asked: Common) -> str:
        name = model_name()
        if asked.model not in (None, name):
            raise ApiError(404, f"there is no model {asked.model!r} here; there is {name!r}", "model", "model_not_found")
        return name

    def chunk(answers: Answers, kind: str, **rest: Any) -> dict[str, Any]:
        return {"id": answers.id, "object": kind, "created": answers.created, "model": answers.model, **rest}

    async def stream(
        answers: Answers,
        kind: str,
        asked: Common,
        choice: Callable[[int, Event], dict[str, Any]],
        opening: Sequence[dict[str, Any]] = (),
    ) -> AsyncIterator[str]:
        options = asked.stream_options
        extra = {"usage": None} if options is not None and options.include_usage else {}
        try:
            for each in opening:
                yield sse(chunk(answers, kind, choices=[each], **extra))
            async for place, event in answers.events():
                if event.pieces or event.finish_reason is not None or event.logprobs:
                    yield sse(chunk(answers, kind, choices=[choice(place, event)], **extra))
            if extra:
                yield sse(chunk(answers, kind, choices=[], **answers.totals()))
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield sse(error.body())
        finally:
            answers.cancel()

    def origin(asked: Common, events: Sequence[Event]) -> dict[str, Any]:
        if not asked.return_origin:
            return {}
        return {"origin": [[text, drafted] for event in events for text, drafted in event.pieces]}

    @app.post("/v1/completions", response_model=None)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        text = worker.scheduler.outrider.text
        model = checked_model(asked)
        protocol.check_best_of(asked)
        answers = Answers(worker, settings, request, asked, model)
        prompts = await asyncio.to_thread(asked.prompts, text)
        await answers.submit(prompts, lambda _: asked.params(asked.max_tokens, asked.logprobs))
        said = [protocol.CompletionLogprobs(text) for _ in answers.tickets]

        def choice(place: int, events: Sequence[Event]) -> dict[str, Any]:
            found: dict[str, Any] = {"index": place, "text": "".join(event.text for event in events), "logprobs": None}
            if asked.logprobs is not None:
                parts = [said[place].of(event) for event in events]
                found["logprobs"] = {name: [each for part in parts for each in part[name]] for name in parts[0]}
            return found | {"finish_reason": protocol.finish_reason(events[-1].finish_reason)} | origin(asked, events)

        kind = "text_completion"
        if asked.stream:
            return _streaming(stream(answers, kind, asked, lambda place, event: choice(place, [event])))
        found = await answers.whole()
        choices = [choice(place, events) for place, events in enumerate(found)]
        return JSONResponse(chunk(answers, kind, choices=choices, **answers.totals()))

    @app.post(CHAT, response_model=None)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        loaded = worker.scheduler.outrider
        model = checked_model(asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        answers = Answers(worker, settings, request, asked, model)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        prompt = await asyncio.to_thread(asked.prompt, loaded.text)

        def params(prompt: list[int]) -> SamplingParams:
            room = max(loaded.build.capacity - len(prompt) + 1, 1)  # by default, as much as there is room for
            asked_for = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
            return asked.params(room if asked_for is None else asked_for, logprobs)

        await answers.submit([prompt], params)

        def said(events: Sequence[Event]) -> dict[str, Any]:
            if logprobs is None:
                return {"logprobs": None}
            parts = [protocol.chat_logprobs(loaded.text, event) for event in events]
            return {"logprobs": {"content": [each for part in parts for each in part["content"]]}}

        def delta(place: int, event: Event) -> dict[str, Any]:
            reason = protocol.finish_reason(event.finish_reason)
            return (
                {"index": place, "delta": {"content": event.text}, "finish_reason": reason}
                | said([event])
                | origin(asked, [event])
            )

        def message(place: int, events: Sequence[Event]) -> dict[str, Any]:
            content = {"role": "assistant", "content": "".join(event.text for event in events), "refusal": None}
            reason = protocol.finish_reason(events[-1].finish_reason)
            return {"index": place, "message": content, "finish_reason": reason} | said(events) | origin(asked, events)

        if asked.stream:
            first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            opening = [{"index": place, **first} for place in range(asked.n)]
            return _streaming(stream(answers, "chat.completion.chunk", asked, delta, opening))
        found = await answers.whole()
        choices = [message(place, events) for place, events in enumerate(found)]
        return JSONResponse(chunk(answers, "chat.completion", choices=choices, **answers.totals()))

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        manifest, build = worker.scheduler.outrider.manifest, worker.scheduler.outrider.build
        one = {"id": model_name(), "object": "model", "created": 0, "owned_by": "outrider", "max_model_len": build.capacity}
        one |= {"draft": manifest.models["draft"].source if "draft" in manifest.models else None}
        return JSONResponse({"object": "list", "data": [one]})

    @app.get("/health", response_model=None)
    async def health() -> Response:
        worker.check()
        return JSONResponse({"status": "ok", "running": worker.scheduler.load.running})

    @app.get("/metrics", response_model=None)
    async def scrape() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_model=None, include_in_schema=False)
    async def chat_page() -> Response:
        return page()

    return app, worker, metrics


def sse(body: dict[str, Any]) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _streaming(chunks: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
