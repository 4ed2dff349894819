"""Failures of a request or of the engines in a running server: the right client gets the error, and the others go on."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from outrider.engines.session import Session
from outrider.errors import EngineError, OutriderError
from outrider.runtime.cache.slots import Slots
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event
from outrider.runtime.rounds.rounds import Rounds
from outrider.runtime.scheduler import Scheduler
from outrider.serve import deliveries
from outrider.serve.engine import EngineThread, NotReadyError
from outrider.serve.metrics import Metrics
from outrider.serve.watchdog import MAX_FAILED_STEPS
from outrider.tests.serve.server import Reached, chat_bundle, fetch, serving, serving_here
from outrider.tests.support import BROKEN, build


def complete(server: Reached, **fields: Any) -> tuple[int, dict[str, Any]]:
    status, _, answer = fetch(f"{server.url}/v1/completions", json.dumps({"temperature": 0} | fields).encode())
    return status, json.loads(answer)


def test_a_prompt_with_nan_logits_fails_alone(broken: Path, tmp_path: Path) -> None:
    bundle = build(broken, tmp_path / "bundle", k=[1, 2], capacity=127, batch=2)
    good = {"prompt": [5, 6, 7], "max_tokens": 40, "min_tokens": 40}
    with serving_here(bundle) as server, ThreadPoolExecutor(8) as pool:
        status, want = complete(server, **good)
        assert status == 200
        for _ in range(3 * MAX_FAILED_STEPS):  # no other request is there, so every step fails
            status, answer = complete(server, prompt=[5, BROKEN, 7], max_tokens=5)
            assert (status, "NaN or infinity" in answer["error"]["message"]) == (500, True)
        assert server.health()[0] == 200
        bodies = [good, {"prompt": [5, BROKEN, 7], "max_tokens": 5}] * 8
        for (status, answer), each in zip(pool.map(lambda each: complete(server, **each), bodies), bodies, strict=True):
            assert status == (200 if each is good else 500)
            assert each is not good or answer["choices"][0]["text"] == want["choices"][0]["text"]
        assert server.health()[0] == 200


@pytest.mark.parametrize(
    ("part", "name", "error"),
    [
        (Rounds, "run", EngineError("the device is gone", "restart the server")),
        (Session, "write", EngineError("the device is gone", "restart the server")),  # only prompts fail
        (Slots, "prefill", RuntimeError("the device is gone")),  # a bug, not a backend's error
    ],
    ids=["rounds", "prompts", "a bug"],
)
def test_broken_engines_are_reported(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, name: str, error: Exception
) -> None:
    bundle = build(tiny_export, tmp_path / "bundle", k=[1], capacity=127, batch=2)
    failing = threading.Event()
    run = getattr(part, name)

    def run_or_fail(self: Any, *rest: Any, **named: Any) -> Any:
        if failing.is_set():
            raise error
        return run(self, *rest, **named)

    monkeypatch.setattr(part, name, run_or_fail)
    engine = EngineThread(bundle, lambda: Scheduler(Outrider.load(bundle, slots=None)), Metrics(), timeout=60)
    engine.start()
    assert engine.loaded.wait(60)

    first = count(5)

    async def ask() -> Event | OutriderError:
        results: asyncio.Queue[Event | OutriderError] = asyncio.Queue()
        request = [next(first), 6, 7], SamplingParams(max_new_tokens=3, min_new_tokens=3)
        await engine.submit([request], lambda _, result: results.put_nowait(result))
        while isinstance(result := await asyncio.wait_for(results.get(), 60), Event) and result.finish_reason is None:
            pass
        return result

    assert isinstance(asyncio.run(ask()), Event)
    failing.set()
    for _ in range(MAX_FAILED_STEPS - 1):
        assert isinstance(asyncio.run(ask()), EngineError)
    failing.clear()  # as after a temporary fault
    assert isinstance(asyncio.run(ask()), Event)
    failing.set()
    for _ in range(MAX_FAILED_STEPS):
        assert isinstance(asyncio.run(ask()), EngineError)
    for _ in range(100):
        if engine.failure is not None:
            break
        time.sleep(0.05)
    with pytest.raises(NotReadyError, match=r"the bundle cannot be run: .*the device is gone"):
        engine.check()
    engine.stop()


def test_requests_are_told_that_their_time_is_over_while_a_step_hangs(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that run and ones that arrive during the step, whole and streamed. Later requests are answered."""
    bundle = build(tiny_export, tmp_path / "bundle", k=[1], capacity=127, batch=2)
    going, hangs, step = threading.Event(), threading.Event(), Scheduler.step

    def stepping(scheduler: Scheduler) -> Any:
        if not going.is_set():
            hangs.set()
        going.wait(8)
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", stepping)
    monkeypatch.setattr(deliveries, "LATE", 0.1)
    going.set()
    asked = {"prompt": [5, 6, 7], "max_tokens": 30, "min_tokens": 30}
    with serving_here(bundle) as server, ThreadPoolExecutor(4) as pool:
        _, want = complete(server, **asked)
        going.clear()
        bodies = [json.dumps(asked | {"timeout": 1, "stream": each}).encode() for each in (False, True)]
        running, streamed = (pool.submit(fetch, f"{server.url}/v1/completions", body) for body in bodies)
        assert hangs.wait(60)
        began = time.monotonic()
        status, answer = complete(server, **asked, timeout=1)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert "longer than 1 seconds" in answer["error"]["message"]
        assert running.result(10)[0] == 504
        assert b"longer than 1 seconds" in streamed.result(10)[2]
        assert time.monotonic() - began < 6
        going.set()
        status, answer = complete(server, **asked)
        assert (status, answer["choices"][0]["text"]) == (200, want["choices"][0]["text"])
        assert server.health()[0] == 200


def test_a_slow_reader_does_not_delay_others(trained_export: Path, tmp_path: Path) -> None:
    """One client reads an answer larger than the sockets' buffers only after all others are done."""
    bundle = chat_bundle(trained_export, tmp_path / "bundle")
    long = {"prompt": "Once", "max_tokens": 480, "min_tokens": 480, "temperature": 0}
    with serving_here(bundle) as server, socket.socket() as slow:
        _, want = complete(server, **long)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = server.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        body = json.dumps(long | {"stream": True, "logprobs": 20, "n": 16}).encode()
        head = (
            f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        slow.sendall(f"{head}\r\n\r\n".encode() + body)
        for _ in range(4):
            status, answer = complete(server, **long)
            assert (status, answer["choices"][0]["text"]) == (200, want["choices"][0]["text"])
        received = b""
        while chunk := slow.recv(65536):
            received += chunk
        chunks = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
        assert len(received) > 2**22  # more than a server's socket buffers
        texts = ["".join(c["text"] for each in chunks for c in each["choices"] if c["index"] == at) for at in range(16)]
        assert texts == [want["choices"][0]["text"]] * 16


@pytest.mark.parametrize("options", [[], ["--log-prompts"]])
def test_prompts_are_logged_only_on_request(trained_export: Path, tmp_path: Path, options: list[str]) -> None:
    bundle = chat_bundle(trained_export, tmp_path / "bundle")
    with serving(bundle, *options) as server:
        assert complete(server, prompt="a most private matter", max_tokens=3)[0] == 200
        fetch(
            f"{server.url}/v1/chat/completions", b'{"messages": [{"role": "user", "content": "another one"}], "max_tokens": 3}'
        )
        assert complete(server, prompt="refused and private", max_tokens=-1)[0] == 400
        server.stop()
        log = "".join(server.log)
    assert ("a most private matter" in log) == ("another one" in log) == bool(options)
    assert "refused and private" not in log
