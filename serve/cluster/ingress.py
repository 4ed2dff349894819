"""The ingress of a Ray cluster: passes requests to replicas, and retries requests whose replica is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.api.assembler import sse
from outrider.serve.api.errors import ApiError, on_http_error
from outrider.serve.cluster.replica import HEALTH_CHECK_PERIOD
from outrider.serve.log import log_as_json
from outrider.serve.network.guard import Guard
from outrider.serve.settings import Settings

MAX_ATTEMPTS = 3  # replicas to try before the client gets an error
SESSION_HEADER = b"x-session-id"  # Ray's header for requests that belong together
# The parts of a request's scope that are sent to a replica; the others are meaningful only in this process.
SCOPE_KEYS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers", "client")
QUEUE_FULL = ApiError(429, "too many requests are waiting; try again later", code="queue_full")
ENDING = ApiError(503, "the server is shutting down; try again later", code="not_ready")
LOGGER = logging.getLogger("outrider.serve")


class Ingress:
    """The deployment that Ray's proxies send HTTP requests to."""

    def __init__(self, settings: Settings, replicas: DeploymentHandle, registry: DeploymentHandle, places: int):
        """Pass requests to replicas. At most `places` requests may run and wait; owners share the places fairly."""
        log_as_json()
        self._settings, self._replicas, self._registry, self._places = settings, replicas, registry, places
        self.in_flight: Counter[str] = Counter()  # requests by owner
        self._ending = False

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Mount("/", app=self._forward),
            ],
            middleware=[Middleware(Guard, settings=self._settings)],
            exception_handlers={HTTPException: on_http_error},
        )

    async def finish(self) -> None:
        """Refuse requests from now on, and return when all earlier ones have their answers."""
        self._ending = True
        while self.in_flight.total():
            await asyncio.sleep(0.1)

    async def _health(self, _: Request) -> Response:
        if names := sorted(await self._registry.healthy.remote()):
            return JSONResponse({"status": "ok", "replicas": names})
        return ApiError(503, "no replica is ready", code="not_ready").response()

    async def _metrics(self, _: Request) -> Response:
        """Return the metrics of all replicas. Each sample has the replica's name as a label."""
        merged: dict[str, Metric] = {}
        for name, text in (await self._registry.healthy.remote()).items():
            for family in text_string_to_metric_families(text):
                metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                metric.samples += [sample._replace(labels=sample.labels | {"replica": name}) for sample in family.samples]

        class Merged(Collector):
            def collect(self) -> list[Metric]:
                return list(merged.values())

        registry = CollectorRegistry()
        registry.register(Merged())
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request through a replica, unless its owner has too many requests."""
        if self._ending:
            await ENDING.response()(scope, receive, send)
            return
        owner: str = scope["state"]["owner"]
        # An owner may hold as many places as are free (dynamic thresholds, Choudhury and Hahne 1998). So some places are always
        # free for a new owner, and n busy owners end up with one (n + 1)th of the places each. Ray serves waiting requests in
        # the order of arrival.
        if self.in_flight[owner] >= self._places - self.in_flight.total():
            await QUEUE_FULL.response()(scope, receive, send)
            return
        self.in_flight[owner] += 1
        try:
            await self._retry(scope, await Request(scope, receive).body(), receive, send)
        except ClientDisconnect:
            pass
        finally:
            self.in_flight -= Counter({owner: 1})  # also drops an owner that has no requests

    async def _retry(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer a request through a replica. If the replica is lost before anything has been sent, try another."""
        relay = Relay(send)
        error = ApiError(503, "no replica could answer; try again later", code="replica_lost")
        for _ in range(MAX_ATTEMPTS):
            try:
                async with aclosing(self._answer(scope, body)) as messages:
                    async for message in messages:
                        await relay.send(message)
                        if relay.finished:
                            return
            except TimeoutError:
                error = ApiError(504, "the answer took too long; ask for fewer tokens", code="timeout")
                break
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # the client has disconnected; otherwise the replica cancelled the answer
                    raise
            except (RayError, RayServeException) as lost:
                LOGGER.warning("a replica was lost", extra={"error": type(lost).__name__, "begun": relay.begun})
            if relay.begun:
                break
        if not relay.begun:
            await error.response()(scope, receive, send)
        elif relay.is_stream:  # the text so far is valid; end the stream with an error event
            await send({"type": "http.response.body", "body": sse(error.body())})

    async def _answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
        """Yield the messages of a replica.

        Raises:
            TimeoutError: none came within twice the timeout of an answer. A working replica times out earlier.
        """
        forwarded = {key: scope[key] for key in SCOPE_KEYS if key in scope}
        session = dict(scope["headers"]).get(SESSION_HEADER, b"").decode("latin-1")
        messages = self._replicas.options(stream=True, session_id=session).answer.remote(forwarded, body)
        try:
            while True:
                async with asyncio.timeout(2 * self._settings.timeout + HEALTH_CHECK_PERIOD):
                    message = await anext(messages, None)
                if message is None:
                    return
                yield message
        finally:
            messages.cancel()


class Relay:
    """Sends a response. Holds its start back until the first body, so that another replica can be tried until then."""

    def __init__(self, send: Send):
        self._send = send
        self._start: Message | None = None
        self.begun = False  # something has been sent
        self.finished = False
        self.is_stream = False

    async def send(self, message: Message) -> None:
        """Send the next message of a response."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None and not self.begun:
            self.begun = True
            self.is_stream = dict(self._start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
            await self._send(self._start)
        await self._send(message)
        self.finished = not message.get("more_body", False)
