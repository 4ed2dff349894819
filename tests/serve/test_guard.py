"""What is refused before anything reads it, and whose request it is: the middleware alone, before a small application."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.serve.api import bodies
from outrider.serve.api.bodies import BodyBudget
from outrider.serve.api.errors import ApiError, on_http_error
from outrider.serve.metrics import Metrics
from outrider.serve.network import guard
from outrider.serve.network.guard import Guard
from outrider.serve.settings import Settings

KEYS = ("first-key", "second-key", "third-key")


def send(headers: dict[str, str] | None = None, body: Any = None, path: str = "/v1/completions", **settings: Any) -> Any:
    """Send a request through a guard with these settings; return the response. The application answers whose it is."""
    metrics = settings.pop("metrics", None)
    client = settings.pop("client", "10.1.2.3")

    async def answer(request: Request) -> Response:
        return JSONResponse({"owner": request.state.owner, "size": len(await request.body())})

    async def missing(_: Request) -> Response:
        return StreamingResponse(iter(["not ", "here"]), 404)

    app = Starlette(
        routes=[Route("/missing", missing), Route("/{path:path}", answer, methods=["GET", "POST"])],
        middleware=[Middleware(Guard, settings=Settings(**({"bundle": "none"} | settings)), metrics=metrics)],
        exception_handlers={HTTPException: on_http_error},
    )

    async def sent() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(client, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
            method = "GET" if body is None else "POST"
            return await http.request(method, path, headers=headers, content=body)

    return asyncio.run(sent())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = [], hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for given, status in ((KEYS[0], 200), (KEYS[2], 200), ("first-ke", 401)):
        compared.clear()
        assert send(bearer(given), keys=KEYS).status_code == status
        assert compared == [(given.encode(), key.encode()) for key in KEYS]


def test_without_a_key_only_the_page_and_the_health_are_answered() -> None:
    for headers in ({}, bearer(""), bearer("no-key"), {"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"}):
        refused = send(headers, keys=KEYS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert send(headers, path="/health", keys=KEYS).status_code == 200
    assert send({}, path="/health/more", keys=KEYS).status_code == 401


def test_each_key_is_an_owner_and_each_address_without_keys() -> None:
    owners = [send(bearer(key), keys=KEYS).json()["owner"] for key in KEYS]
    assert len(set(owners)) == len(KEYS)
    assert not any(key in owner for key in KEYS for owner in owners)  # which may be logged
    assert send(bearer(KEYS[1]), keys=KEYS, client="10.9.9.9").json()["owner"] == owners[1]
    clients = ("10.1.2.3", "10.1.2.4", "::ffff:10.1.2.3", "2001:db8:0:1::1", "2001:db8:0:1::2", "2001:db8:0:2::1")
    first, second, mapped, one, same, other = (send(client=each).json()["owner"] for each in clients)
    assert (mapped, same) == (first, one)
    assert len({first, second, one, other}) == 4


def test_a_host_name_is_one_of_those_allowed_as_a_whole() -> None:
    hosts = ("localhost", "::1")
    for name in ("localhost", "LOCALHOST", "localhost:9", "[::1]:8000"):
        assert send({"Host": name}, hosts=hosts).status_code == 200
    for name in ("evil.example", "localhost.evil.example", "evil-localhost", "evil.example:80", "", "[::1"):
        refused = send({"Host": name}, path="/health", hosts=hosts)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
    assert send({"Host": "anything"}).status_code == 200


def test_what_a_page_of_another_site_sends_is_refused() -> None:
    for site, status in (("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)):
        assert send({"Sec-Fetch-Site": site}).status_code == status
    assert send({"Sec-Fetch-Site": "cross-site"}, path="/").status_code == 200  # a link to the page
    for kind, status in (
        ("application/json; charset=utf-8", 200),
        ("application/x+json", 200),
        ("text/plain", 415),
        ("multipart/form-data", 415),
        ("", 415),
    ):
        assert send({"Content-Type": kind}, b"{}").status_code == status, kind


def test_a_body_is_bounded_whether_it_says_its_length_or_not() -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 10

    json = {"Content-Type": "application/json"}
    for count, status in ((10, 200), (11, 413)):
        assert send(json, b"x" * 10 * count, max_bytes=100).status_code == status
        answer = send(json, pieces(count), max_bytes=100)
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(guard, "LINGER_SECONDS", 0.05)
    assert send({"Content-Type": "application/json"}, never()).status_code == 408


def test_owners_share_the_bytes_of_bodies_and_give_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "HELD_BYTES", 1000)
    budget = BodyBudget(max_bytes=100)
    for _ in range(3):
        with budget.share("one") as take:
            for _ in range(5):
                take(100)  # as many as are left then
            with pytest.raises(ApiError, match="too large") as caught:
                take(100)
            assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
            with budget.share("other") as others:
                others(250)
                with pytest.raises(ApiError):
                    others(250)
    assert not budget.held


def test_an_error_counts_once_whoever_answers_it() -> None:
    metrics = Metrics()
    assert send(path="/missing", metrics=metrics).status_code == 404
    assert send(keys=KEYS, metrics=metrics).status_code == 401
    assert send(metrics=metrics).status_code == 200
    lines = metrics.text().decode().splitlines()
    counted = {line for line in lines if line.startswith("outrider_http_errors_total")}
    assert counted == {f'outrider_http_errors_total{{status="{status}"}} 1.0' for status in (401, 404)}
