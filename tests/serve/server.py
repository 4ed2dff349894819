"""Real servers over real bundles: in processes of their own, or in threads of this one for what is only about HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import filelock

from outrider.bundle.manifest import CHAT_TEMPLATE
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.serve.network.access import LOOPBACK
from outrider.serve.network.server import HttpServer
from outrider.serve.settings import Settings
from outrider.tests.support import COMMAND, build, reseal

PROMPT = "Customer: Hi, I would like to order a coffee.\nAgent:"
TEMPLATE = (
    "{% for m in messages %}{{ 'Customer: ' if m.role == 'user' else 'Agent: ' }}{{ m.content }}\n{% endfor %}"
    "{% if messages[-1].content == 'refuse' %}{{ raise_exception('never say that') }}{% endif %}"
    "{% if add_generation_prompt %}Agent:{{ manner }}{% endif %}"
)


def chat_bundle(export: Path, output: Path, batch: int = 4, capacity: int = 511) -> Path:
    """Copy a bundle of an export with a chat template. It is built once, beside the export."""
    made = export.with_name(f"chat-bundle-{batch}-{capacity}")
    with filelock.FileLock(f"{made}.lock"):
        if not made.exists():
            partial = build(export, export.with_name(f"{made.name}.making"), k=[1, 2, 4], capacity=capacity, batch=batch)
            (partial / CHAT_TEMPLATE).write_text(TEMPLATE)
            reseal(partial)
            partial.rename(made)
    return Path(shutil.copytree(made, output))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def fetch(url: str, body: bytes | None = None, **headers: str) -> tuple[int, Message, bytes]:
    """Return the status, headers and body of a response."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


class Reached:
    """A server that listens at `url`."""

    url: str

    def ready(self) -> None:
        """Wait until the bundle is loaded."""
        for _ in range(600):
            status, health = self.health()
            if status == 200:
                return
            assert status == 503, health
            time.sleep(0.1)
        raise AssertionError("the server did not become ready")

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the status and body of /health."""
        status, _, body = fetch(f"{self.url}/health")
        return status, json.loads(body)


class Server(Reached):
    """`outrider serve` in a process of its own, on a free port."""

    def __init__(self, bundle: Path, *options: str, env: dict[str, str] | None = None, max_files: int | None = None):
        command = [*COMMAND, "serve", str(bundle), "--port", "0", *options]
        if max_files is not None:
            command = ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh", *map(str, command)]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, **(env or {})}
        )
        self.log: list[str] = []
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            self.log.append(line)
            message = json.loads(line)["message"]
            if "running on" in message:
                self.url = message.split("running on ")[1].split()[0]
                break
        assert self.url, self.log
        # The pipe must be read: the server would block when it is full.
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the server, and read the rest of its log."""
        self.process.send_signal(how)
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


class ServerHere(Reached):
    """The same server in a thread of this process, which has imported what it needs; nothing of it is logged."""

    def __init__(self, bundle: Path, **settings: Any):
        self._server = HttpServer(Settings(bundle, hosts=LOOPBACK, **settings), LOOPBACK[1], 0, drain=30)
        self.url = self._server.url
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()

    def stop(self) -> None:
        """End the server."""
        self._server.should_exit = True
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()


@contextmanager
def serving_here(bundle: Path, **settings: Any) -> Iterator[ServerHere]:
    """Run a server in a thread, and wait until it is ready."""
    server = ServerHere(bundle, **settings)
    try:
        server.ready()
        yield server
    finally:
        server.stop()


@contextmanager
def serving(bundle: Path, *options: str, env: dict[str, str] | None = None, max_files: int | None = None) -> Iterator[Server]:
    """Run a server, which may open as many files as that, and wait until it is ready."""
    server = Server(bundle, *options, env=env, max_files=max_files)
    try:
        server.ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def text_of(outrider: Outrider, prompt: str, **params: Any) -> str:
    """Return the text of plain decoding in this process."""
    return "".join(event.text for event in outrider.generate(prompt, SamplingParams(**params), k=0))


def post(server: Reached, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    status, _, answer = fetch(server.url + path, body, **headers)
    return status, json.loads(answer)


def counters(server: Reached) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
