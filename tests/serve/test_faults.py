"""What goes wrong with one request, or with the engines, in a running server: who is told, and that the others go on."""

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
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.loop import Loop
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds import Rounds
from outrider.runtime.scheduler import Scheduler
from outrider.serve.metrics import Metrics
from outrider.serve.worker import LOST, NotReadyError, Worker
from outrider.tests.serve.server import Server, chat_bundle, fetch, serving
from outrider.tests.support import broken_export, build

POISON = 77


def complete(server: Server, **asked: Any) -> tuple[int, dict[str, Any]]:
    status, _, said = fetch(f"{server.url}/v1/completions", json.dumps({"temperature": 0} | asked).encode())
    return status, json.loads(said)


def test_prompts_whose_logits_are_no_numbers_end_themselves_alone(tmp_path: Path) -> None:
    bundle = build(broken_export(tmp_path, POISON), tmp_path / "bundle", k=[1, 2], capacity=127, batch=2)
    good = {"prompt": [5, 6, 7], "max_tokens": 40, "min_tokens": 40}
    with serving(bundle) as server, ThreadPoolExecutor(8) as pool:
        status, want = complete(server, **good)
        assert status == 200
        for _ in range(3 * LOST):  # nobody else is there, so no step brings anything
            status, said = complete(server, prompt=[5, POISON, 7], max_tokens=5)
            assert (status, "not finite numbers" in said["error"]["message"]) == (500, True)
        assert server.health()[0] == 200
        asked = [good, {"prompt": [5, POISON, 7], "max_tokens": 5}] * 8
        for (status, said), each in zip(pool.map(lambda each: complete(server, **each), asked), asked, strict=True):
            assert status == (200 if each is good else 500)
            assert each is not good or said["choices"][0]["text"] == want["choices"][0]["text"]
        assert server.health()[0] == 200


@pytest.mark.parametrize(
    ("part", "name", "error"),
    [
        (Rounds, "run", EngineError("the device is gone", "restart the server")),
        (Session, "write", EngineError("the device is gone", "restart the server")),  # prompts alone cannot be read
        (Loop, "read", RuntimeError("the device is gone")),  # a defect, and not what a backend says
    ],
    ids=["rounds", "prompts", "a defect"],
)
def test_engines_that_run_no_text_any_more_are_said_to_be_broken(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: type, name: str, error: Exception
) -> None:
    bundle = build(tiny_export, tmp_path / "bundle", k=[1], capacity=127, batch=2)
    failing = threading.Event()
    run = getattr(part, name)

    def perhaps(self: Any, *rest: Any, **named: Any) -> Any:
        if failing.is_set():
            raise error
        return run(self, *rest, **named)

    monkeypatch.setattr(part, name, perhaps)
    worker = Worker(bundle, lambda: Scheduler(Outrider.load(bundle, slots=None)), Metrics(), timeout=60)
    worker.start()
    assert worker.loaded.wait(60)

    first = count(5)

    async def ask() -> Event | OutriderError:
        came: asyncio.Queue[Event | OutriderError] = asyncio.Queue()
        await worker.submit([([next(first), 6, 7], SamplingParams(max_new_tokens=3, min_new_tokens=3), came.put_nowait)])
        while isinstance(result := await asyncio.wait_for(came.get(), 60), Event) and result.finish_reason is None:
            pass
        return result

    assert isinstance(asyncio.run(ask()), Event)
    failing.set()
    for _ in range(LOST - 1):
        assert isinstance(asyncio.run(ask()), EngineError)
    failing.clear()  # as after a fault that passes
    assert isinstance(asyncio.run(ask()), Event)
    failing.set()
    for _ in range(LOST):
        assert isinstance(asyncio.run(ask()), EngineError)
    for _ in range(100):
        if worker.failure is not None:
            break
        time.sleep(0.05)
    with pytest.raises(NotReadyError, match=r"the bundle cannot be run: .*the device is gone"):
        worker.check()
    worker.stop()


def test_who_reads_slowly_holds_up_no_one(shipped_export: Path, tmp_path: Path) -> None:
    """An answer larger than what sockets hold, by a client that reads when all others are done."""
    bundle = chat_bundle(shipped_export, tmp_path / "bundle")
    long = {"prompt": "Once", "max_tokens": 480, "min_tokens": 480, "temperature": 0}
    with serving(bundle) as server, socket.socket() as slow:
        _, want = complete(server, **long)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = server.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        body = json.dumps(long | {"stream": True, "logprobs": 20, "n": 16}).encode()
        head = (
            f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        slow.sendall(f"{head}\r\n\r\n".encode() + body)
        for _ in range(8):
            status, said = complete(server, **long)
            assert (status, said["choices"][0]["text"]) == (200, want["choices"][0]["text"])
        received = b""
        while chunk := slow.recv(65536):
            received += chunk
        chunks = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
        assert len(received) > 2**22  # which is more than a server's socket takes by itself
        texts = ["".join(c["text"] for each in chunks for c in each["choices"] if c["index"] == at) for at in range(16)]
        assert texts == [want["choices"][0]["text"]] * 16


@pytest.mark.parametrize("options", [[], ["--log-prompts"]])
def test_prompts_are_in_the_log_only_where_asked(shipped_export: Path, tmp_path: Path, options: list[str]) -> None:
    bundle = chat_bundle(shipped_export, tmp_path / "bundle")
    with serving(bundle, *options) as server:
        assert complete(server, prompt="a most private matter", max_tokens=3)[0] == 200
        fetch(
            f"{server.url}/v1/chat/completions", b'{"messages": [{"role": "user", "content": "another one"}], "max_tokens": 3}'
        )
        complete(server, prompt="refused and private", max_tokens=-1)
        server.stop()
        log = "".join(server.log)
    assert ("a most private matter" in log) == ("another one" in log) == bool(options)
    assert "refused and private" not in log or options
