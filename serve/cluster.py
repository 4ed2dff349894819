"""Many machines: an application of Ray Serve, whose replicas each run one bundle behind one HTTP surface.

A client's request comes to a `Front`, of which there are two, and goes on to a `Replica`, which answers it as `outrider serve`
alone would: what passes between them are the messages of ASGI. The front knows when a replica is lost. It asks another one if
the client has not been sent anything yet, and tells the client to try again otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import ray
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import EngineError, OutriderError, UsageError
from outrider.serve.app import create_app, sse
from outrider.serve.errors import ApiError, http_error
from outrider.serve.guard import Guard
from outrider.serve.log import log_as_json
from outrider.serve.settings import Settings

APPLICATION = "outrider"
FRONTS = 2  # so that one is left
TRIES = 3  # replicas that are asked before the client is told
HEALTH_PERIOD = 5.0  # seconds between two times that a replica says how it is
SCALE_UP_DELAY = 10.0  # seconds that requests must have waited for; a bundle is loaded in about as many
SESSION = b"x-session-id"  # Ray's name for the header by which requests are known to belong together
# What of a request's scope goes on; the rest is this process's own.
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers", "client")
LOGGER = logging.getLogger("outrider.serve")


class Router(RequestRouter):  # type: ignore[misc]  # Ray's types are not looked at
    """Chooses replicas: the same for all of a conversation as long as it has room, and else the less busy of two by chance.

    Replicas are ranked for a conversation by a hash of both (rendezvous hashing, Thaler and Ravishankar 1998), so that one that
    comes or goes moves only the conversations that it gets or had.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas; in each the least busy that has room is asked, and the next group if none has."""
        session = ""
        if pending_request is not None:
            session = pending_request.metadata.session_id
            pending_request.routing_context.should_backoff = True  # where none has room; otherwise Ray asks again at once
        if not session:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

        def rank(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{session} {replica.replica_id.unique_id}".encode()).digest()

        return [[each] for each in sorted(candidate_replicas, key=rank)]


class Board:
    """What every replica said of itself last. Replicas tell it, because one that is asked answers after its other requests."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, str]] = {}

    def put(self, name: str, metrics: str) -> None:
        """A replica is well, and has such metrics, in Prometheus' format."""
        self._said[name] = time.monotonic(), metrics

    def get(self) -> dict[str, str]:
        """The metrics of those that were well of late, by name."""
        since = time.monotonic() - 2.5 * HEALTH_PERIOD
        self._said = {name: said for name, said in self._said.items() if said[0] > since}
        return {name: metrics for name, (_, metrics) in self._said.items()}


class Replica:
    """One bundle."""

    def __init__(self, settings: Settings, board: DeploymentHandle):
        log_as_json()
        self._app, self._worker, self._metrics = create_app(settings)
        self._board = board
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._worker.start()

    async def check_health(self) -> None:
        """What Ray asks now and then: it is ready when this first returns, and is replaced where it fails."""
        await asyncio.to_thread(self._worker.loaded.wait)
        try:
            self._worker.check()
        except OutriderError as error:
            raise RuntimeError(str(error)) from error
        self._board.put.remote(self._name, generate_latest(self._metrics.registry).decode())

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """The messages of the answer to one request; to be cancelled is that its client has gone."""
        if self._worker.failure is not None:  # who refuses at once is the least busy, and would be asked first
            LOGGER.error("the engines are broken, so this replica ends", extra={"error": str(self._worker.failure)})
            os._exit(1)
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        asked = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-replica", self._name.encode())]
            messages.put_nowait(message)

        task = asyncio.ensure_future(self._app(scope, receive, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()
            await asyncio.gather(task, return_exceptions=True)  # the application has logged what failed, and said 500

    def __del__(self) -> None:
        """What Ray calls after the last answer."""
        self._worker.stop()


class Front:
    """Between clients and replicas."""

    def __init__(self, settings: Settings, replicas: DeploymentHandle, board: DeploymentHandle):
        log_as_json()
        self._settings, self._replicas, self._board = settings, replicas, board

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Mount("/", app=self._pass_on),
            ],
            middleware=[Middleware(Guard, settings=self._settings)],
            exception_handlers={HTTPException: http_error},
        )

    async def _health(self, _: Request) -> Response:
        if names := sorted(await self._board.get.remote()):
            return JSONResponse({"status": "ok", "replicas": names})
        return ApiError(503, "no replica is ready", code="not_ready").response()

    async def _metrics(self, _: Request) -> Response:
        """Those of all replicas, each sample with its replica's name."""
        merged: dict[str, Metric] = {}
        for name, text in (await self._board.get.remote()).items():
            for family in text_string_to_metric_families(text):
                known = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [sample._replace(labels=sample.labels | {"replica": name}) for sample in family.samples]

        class Merged(Collector):
            def collect(self) -> list[Metric]:
                return list(merged.values())

        registry = CollectorRegistry()
        registry.register(Merged())
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        start: Message | None = None  # not sent yet
        begun: str | None = None  # what kind of answer has begun
        error = ApiError(503, "no replica could answer; try again", code="replica_lost")
        for _ in range(TRIES):
            try:
                async with aclosing(self._answer(scope, body)) as messages:
                    async for message in messages:
                        if message["type"] == "http.response.start":
                            start = message  # with what follows it: until then another replica can be asked
                            continue
                        if start is not None:
                            begun = dict(start["headers"]).get(b"content-type", b"").decode("latin-1")
                            await send(start)
                            start = None
                        await send(message)
                        if not message.get("more_body", False):
                            return
            except BackPressureError:
                error = ApiError(429, "too many requests are waiting; try again later", code="queue_full")
                break
            except TimeoutError:
                error = ApiError(504, "the answer took too long; ask for fewer tokens", code="timeout")
                break
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # the client has gone; otherwise it was cancelled where it ran
                    raise
            except (RayError, RayServeException) as lost:
                LOGGER.warning("a replica was lost", extra={"error": type(lost).__name__, "begun": begun is not None})
            if begun is not None:
                break
        if begun is None:
            await error.response()(scope, receive, send)
        elif begun.startswith("text/event-stream"):  # what has gone out is confirmed, and nothing follows
            await send({"type": "http.response.body", "body": sse(error.body()).encode()})

    async def _answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
        """A replica's messages.

        Raises:
            TimeoutError: one did not come in the time that an answer may wait and run; a replica's own bound comes before.
        """
        plain = {key: scope[key] for key in SCOPE if key in scope}
        session = dict(scope["headers"]).get(SESSION, b"").decode("latin-1")
        messages = self._replicas.options(stream=True, session_id=session).answer.remote(plain, body)
        try:
            while True:
                async with asyncio.timeout(2 * self._settings.timeout + HEALTH_PERIOD):
                    message = await anext(messages, None)
                if message is None:
                    return
                yield message
        finally:
            messages.cancel()


def application(settings: Settings, number: tuple[int, int], slots: int, cpus: int, gpus: int, drain: float) -> Any:
    """The application.

    Args:
        number: of replicas, the least and the most; between them as many as there are requests for.
        slots: requests that a replica runs at once.
        cpus, gpus: of a replica.
        drain: seconds that a replica's answers have when it is to end.
    """
    least, most = number
    scale: dict[str, Any] = {"num_replicas": least}
    if least != most:
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least, max_replicas=most, target_ongoing_requests=slots, upscale_delay_s=SCALE_UP_DELAY
            )
        }
    replica = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        # One more than it has slots for, so that a slot that gets free need not wait for the way here.
        max_ongoing_requests=slots + 1,
        max_queued_requests=max(settings.max_waiting, 1),
        health_check_period_s=HEALTH_PERIOD,
        request_router_config=RequestRouterConfig(request_router_class=Router),
        graceful_shutdown_timeout_s=drain,
        max_constructor_retry_count=2,
        **scale,
    )
    board = serve.deployment(Board, name="board", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000).bind()
    replicas = replica.bind(settings, board)
    front = serve.deployment(
        serve.ingress()(Front),
        name="front",
        num_replicas=FRONTS,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,  # the replicas' bound is what counts
        graceful_shutdown_timeout_s=drain + 10,  # it is to tell whose replica did not end in time
    )
    return front.bind(settings, replicas, board)


def cores(replicas: int) -> int:
    """The most that each replica can have: as many as let this number of them fit into the cluster's nodes; 0 if none do."""
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    fit = [each for each in range(1, max(nodes, default=0) + 1) if sum(node // each for node in nodes) >= replicas]
    return max(fit, default=0)


def run(
    settings: Settings, replicas: tuple[int, int], slots: int, cpus: int | None, gpus: int, host: str, port: int, drain: float
) -> None:
    """Run the application in the cluster that `RAY_ADDRESS` names, in place of the one of before, and return when it answers;
    replicas of before answer until then. Without `RAY_ADDRESS` begin a cluster on this machine, and stay until SIGTERM.

    Args: see `application`; without `cpus`, each replica has as many cores as let all fit.

    Raises:
        EngineError: there is no such cluster, or the replicas do not start.
        UsageError: there are too few cores.
    """
    alone = os.environ.get("RAY_ADDRESS", "") in ("", "local")
    try:
        ray.init(**({"address": "local", "include_dashboard": False} if alone else {}), log_to_driver=False)
    except ConnectionError as error:
        raise EngineError(f"no Ray cluster: {error}", "start one with ray start, or unset RAY_ADDRESS") from error
    try:
        most = cores(replicas[1])
        if alone and (cpus or 1) > most:  # another cluster may grow
            raise UsageError(
                f"this machine has too few cores for {replicas[1]} replicas of {cpus or 1}", "ask for fewer, or set RAY_ADDRESS"
            )
        serve.start(proxy_location="EveryNode", http_options=HTTPOptions(host=host, port=port))
        try:
            serve.run(application(settings, replicas, slots, cpus or most or 1, gpus, drain), name=APPLICATION)
        except RuntimeError as error:
            raise EngineError(f"the replicas do not start: {error}", "see serve status, and the log of a replica") from error
        LOGGER.info(f"running on http://{host}:{port}", extra={"replicas": replicas})
        if alone:
            ended = threading.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: ended.set())
            ended.wait()
            serve.shutdown()
    finally:
        ray.shutdown()
