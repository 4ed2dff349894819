"""A replica of the server in a Ray cluster, and the registry to which replicas report their health."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Scope

from outrider.errors import OutriderError
from outrider.serve.app import create_app
from outrider.serve.engine import EngineThread
from outrider.serve.log import log_as_json
from outrider.serve.settings import Settings

HEALTH_CHECK_PERIOD = 5.0  # seconds between two health checks of a replica
LOGGER = logging.getLogger("outrider.serve")


class ReplicaRegistry:
    """The last report of every replica. Replicas push reports, because a busy one would answer late if it were asked."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, str]] = {}

    def report(self, name: str, metrics: str) -> None:
        """Record that a replica is healthy, with its metrics in Prometheus' format."""
        self._reports[name] = time.monotonic(), metrics

    def healthy(self) -> dict[str, str]:
        """Return the metrics of the replicas that have reported recently, by name."""
        oldest = time.monotonic() - 2.5 * HEALTH_CHECK_PERIOD
        self._reports = {name: report for name, report in self._reports.items() if report[0] > oldest}
        return {name: metrics for name, (_, metrics) in self._reports.items()}


class Replica:
    """A deployment that runs the server's application over one bundle."""

    def __init__(self, settings: Settings, registry: DeploymentHandle):
        """Start to load the bundle."""
        log_as_json()
        self._engine = EngineThread.from_settings(settings, settings.memory())
        self._app = create_app(settings, self._engine)
        self._registry = registry
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._engine.start()

    async def check_health(self) -> None:
        """Report to the registry. Ray calls this periodically, starts to route requests after the first call, and replaces the
        replica if this raises an exception."""
        engine = self._engine
        await asyncio.to_thread(engine.loaded.wait)
        try:
            engine.check()
        except OutriderError as error:
            raise RuntimeError(str(error)) from error
        self._registry.report.remote(self._name, engine.metrics.text().decode())

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yield the ASGI messages of the response to a request. Ray cancels this when the client has disconnected."""
        if self._engine.failure is not None:  # it would fail at once, look the least busy, and get most of the requests
            LOGGER.error("the engines are broken, so this replica exits", extra={"error": str(self._engine.failure)})
            os._exit(1)
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        disconnected = asyncio.Event()

        async def receive() -> Message:
            if request:
                return request.pop()
            await disconnected.wait()
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
            disconnected.set()
            await asyncio.gather(task, return_exceptions=True)  # the application logs its failures and answers 500

    def __del__(self) -> None:
        """Stop the engines; Ray calls this after the last answer."""
        self._engine.stop()
