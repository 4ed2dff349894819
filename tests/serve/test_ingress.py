"""What the ingress and the router of a cluster decide, with replicas that are generators in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from outrider.serve.cluster.cluster import Router
from outrider.serve.cluster.ingress import MAX_ATTEMPTS, Ingress
from outrider.serve.cluster.replica import HEALTH_CHECK_PERIOD, ReplicaRegistry
from outrider.serve.settings import Settings

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
Answer = Callable[[dict[str, Any], bytes], AsyncGenerator[Any]]


class Messages:
    """What Ray returns for a call that streams."""

    def __init__(self, answer: AsyncGenerator[Any], cancelled: list[bool]):
        self._answer, self._cancelled = answer, cancelled

    async def __anext__(self) -> Any:
        return await anext(self._answer)

    def cancel(self) -> None:
        self._cancelled.append(True)


class Replicas:
    """Replicas that answer one after the other, each in its way."""

    def __init__(self, *answers: Answer):
        self._left = [*answers]
        self.calls: list[tuple[str, bytes]] = []
        self.cancelled: list[bool] = []

    def options(self, stream: bool, session_id: str) -> Any:
        def remote(scope: dict[str, Any], body: bytes) -> Messages:
            self.calls.append((session_id, body))
            return Messages(self._left.pop(0)(scope, body), self.cancelled)

        return SimpleNamespace(answer=SimpleNamespace(remote=remote))


async def whole(scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any]:
    yield START
    yield {"type": "http.response.body", "body": b"data: one\n\n", "more_body": True}
    yield {"type": "http.response.body", "body": b"data: [DONE]\n\n"}


async def lost_at_once(scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any]:
    yield START
    raise RayActorError


async def lost_later(scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any]:
    yield START
    yield {"type": "http.response.body", "body": b"data: one\n\n", "more_body": True}
    raise RayActorError


def ask(replicas: Replicas, headers: dict[str, str] | None = None, requests: int = 1, places: int = 4) -> list[httpx.Response]:
    """Send requests at once through an ingress."""
    ingress = Ingress(Settings(Path("none")), replicas, SimpleNamespace(), places)
    transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__())

    async def sent() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await asyncio.gather(*(http.post("/v1/completions", json={}, headers=headers) for _ in range(requests)))

    answers = asyncio.run(sent())
    assert not ingress.in_flight
    return answers


def test_another_replica_answers_if_nothing_was_sent() -> None:
    replicas = Replicas(lost_at_once, lost_at_once, whole)
    (answer,) = ask(replicas, {"x-session-id": "mine"})
    assert (answer.status_code, answer.text) == (200, "data: one\n\ndata: [DONE]\n\n")
    assert replicas.calls == [("mine", b"{}")] * 3
    assert len(replicas.cancelled) == 3
    (answer,) = ask(Replicas(*[lost_at_once] * MAX_ATTEMPTS))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")


def test_what_was_begun_is_not_begun_again() -> None:
    replicas = Replicas(lost_later, whole)
    (answer,) = ask(replicas)
    first, error, *_ = answer.text.split("\n\n")
    assert (first, "replica_lost" in error, len(replicas.calls)) == ("data: one", True, 1)


def test_a_client_gets_no_more_than_half_of_the_places() -> None:
    waiting = asyncio.Event()

    async def slow(scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any]:
        waiting.set()
        await asyncio.sleep(0.1)
        async for message in whole(scope, body):
            yield message

    answers = ask(Replicas(*[slow] * 8), requests=8, places=8)
    assert Counter(each.status_code for each in answers) == {200: 4, 429: 4}


def choose(names: list[str], session: str) -> list[list[str]]:
    """The groups of replicas that the router tries in turn for a session."""
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]
    pending = SimpleNamespace(metadata=SimpleNamespace(session_id=session), routing_context=SimpleNamespace())
    groups = asyncio.run(Router.choose_replicas(SimpleNamespace(), replicas, pending))  # type: ignore[arg-type]
    assert pending.routing_context.should_backoff
    return [[each.replica_id.unique_id for each in group] for group in groups]


def test_a_session_goes_to_one_replica_while_there_is_that_one() -> None:
    names = [f"replica{at}" for at in range(4)]
    firsts = {}
    for session in map(str, range(40)):
        ranked = choose(names, session)
        assert sorted(name for (name,) in ranked) == names
        assert choose(names[::-1], session) == ranked
        firsts[session] = ranked[0][0]
        (gone,) = ranked[0]
        assert choose([name for name in names if name != gone], session) == ranked[1:]
    assert set(firsts.values()) == {*names}
    (pair,) = choose(names, "")
    assert len({*pair}) == 2


def test_a_replica_that_no_longer_reports_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, now = ReplicaRegistry(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    registry.report("one", "a")
    now[0] += 2 * HEALTH_CHECK_PERIOD
    registry.report("other", "b")
    assert registry.healthy() == {"one": "a", "other": "b"}
    now[0] += HEALTH_CHECK_PERIOD
    assert registry.healthy() == {"other": "b"}
