"""The HTTP surface: routes, streams, keys and limits."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider import __version__
from outrider.engines.errors import OutriderError, UsageError
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import QueueFullError, Scheduler
from outrider.serve import protocol
from outrider.serve.metrics import Metrics
from outrider.serve.protocol import ChatRequest, Common, CompletionRequest
from outrider.serve.worker import NotReadyError, Ticket, TimedOutError, Worker

LOGGER = logging.getLogger("outrider.serve")
CHAT = "/v1/chat/completions"
OPEN_PATHS = ("/", "/health")  # that need no key
# Our names of what a request asks for, and the API's.
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "the": "prompt", "every": "stop_token_ids"}
CHAT_NAMES = {"max_new_tokens": "max_completion_tokens", "logprobs": "top_logprobs", "the": "messages"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server runs, and what it allows."""

    bundle: Path
    device: str | None = None  # "cpu" or "cuda"; None is what the bundle was built on
    k: int | str = "auto"  # draft tokens a round
    drafter: str | None = None
    most_waiting: int = 64  # requests without a slot
    timeout: float = 600.0  # seconds, of an answer
    model: str = ""  # the name it answers to; "" is that of the target's checkpoint
    keys: tuple[str, ...] = field(default=(), repr=False)  # any of which must be given; none is that none need be
    hosts: tuple[str, ...] = ()  # names by which it may be asked; none is that any will do
    most_bytes: int = 1 << 20  # of a request's body
    most_choices: int = 16  # of a request: prompts times n
    most_prompt: int | None = None  # tokens; None is what the bundle holds
    log_prompts: bool = False


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = str(self).encode("utf-8", "replace").decode()  # what a client sent may be no text
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        LOGGER.info("refused", extra={"status": self.status, "reason": self.code or self.param})
        return JSONResponse(self.body(), self.status, headers)


def api_error(error: OutriderError, chat: bool = False) -> ApiError:
    """What one of ours is over HTTP."""
    if isinstance(error, UsageError):
        fields = ChatRequest.model_fields if chat else CompletionRequest.model_fields
        names = NAMES | (CHAT_NAMES if chat else {})
        name = str(error).split(" ", 1)[0]
        param, message = names.get(name, name), f"{error}; {error.mend}"
        for ours, theirs in names.items():
            message = message.replace(ours, theirs) if "_" in ours else message
        return ApiError(400, message, param if param in fields else None)
    for kind, status, code in (
        (QueueFullError, 429, "queue_full"),
        (NotReadyError, 503, "not_ready"),
        (TimedOutError, 504, "timeout"),
    ):
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    return ApiError(500, str(error), code="engine_error")


class Guard:
    """Keys, names and the size of bodies, before anything reads them; and how many requests get an error."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics | None = None):
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none here
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refused: ApiError | None = None
        if self._settings.hosts and _host(headers.get(b"host", b"")) not in self._settings.hosts:
            # A page of the web may let its name mean this machine; a browser here then sends its requests to this server.
            refused = ApiError(
                403, f"ask for this server as {self._settings.hosts[0]}, or give it keys", code="host_not_allowed"
            )
        if scope["path"] not in OPEN_PATHS and self._settings.keys and not self._known(headers.get(b"authorization", b"")):
            refused = ApiError(401, "this needs a key: send the header Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.most_bytes:
            refused = refused or self._too_large()

        async def noted(message: Message) -> None:
            if self._metrics is not None and message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.refused.labels(str(message["status"])).inc()
            await send(message)

        if refused is not None:
            await refused.response()(scope, receive, noted)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._settings.most_bytes:  # as FastAPI lets pass from where it reads a body
                raise HTTPException(413, str(self._too_large()))
            return message

        await self._app(scope, counted, noted)

    def _known(self, header: bytes) -> bool:
        scheme, _, given = header.partition(b" ")
        # Each is compared, and each in constant time, so that how long it takes says nothing.
        matches = [hmac.compare_digest(given.strip(), key.encode()) for key in self._settings.keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._settings.most_bytes:,} bytes", code="body_too_large")


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
        if len(prompts) * asked.n > settings.most_choices:
            raise ApiError(
                400, f"{len(prompts)} prompts times n = {asked.n} are more than {settings.most_choices} answers", "n"
            )
        most = settings.most_prompt or self._worker.scheduler.outrider.build.capacity
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
        return Scheduler(outrider, most_waiting=settings.most_waiting, k=settings.k, drafter=settings.drafter)

    worker = Worker(load, metrics, settings.timeout)

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
        return _invalid(error).response()

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
        return JSONResponse({"status": "ok", "running": worker.scheduler.load.running})

    @app.get("/metrics", response_model=None)
    async def scrape() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    page = files("outrider.serve").joinpath("page.html").read_text(encoding="utf-8")
    script, style = (page.split(f"<{tag}>")[1].split(f"</{tag}>")[0] for tag in ("script", "style"))
    allowed = [
        "default-src 'none'",
        f"script-src {_digest(script)}",
        f"style-src {_digest(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {"Content-Security-Policy": "; ".join(allowed), "X-Content-Type-Options": "nosniff"}

    @app.get("/", response_model=None, include_in_schema=False)
    async def chat_page() -> Response:
        return HTMLResponse(page, headers=headers)

    return app, worker, metrics


async def http_error(_: Request, error: Exception) -> Response:
    """What the framework itself refuses, in our form."""
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, str(error.detail)).response()
    answer.headers.update(error.headers or {})
    return answer


def _host(header: bytes) -> str | None:
    """Of a Host header, without the port."""
    try:
        return urlsplit(f"//{header.decode('latin-1')}").hostname
    except ValueError:
        return None


def _digest(text: str) -> str:
    """What a content security policy knows a piece of the page by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def sse(body: dict[str, Any]) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def _streaming(chunks: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _invalid(error: RequestValidationError) -> ApiError:
    """What is wrong with a body, by the name of the parameter."""
    first = error.errors()[0]
    place = [str(each) for each in first["loc"] if each != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON")
    name = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"this server has no parameter {name}", name, "unsupported_parameter")
    return ApiError(400, f"{name or 'the body'}: {first['msg']}", place[0] if place else None)
