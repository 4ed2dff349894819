"""Processes that handle untrusted input from clients, outside the server's process.

A chat template is a program that may never end. Tokenizers and grammars may take seconds and gigabytes, or crash. Threads
cannot be killed, and would hold the GIL, which would stop all streams. So one process loads the tokenizer and is forked for
each worker. A fork takes milliseconds, and the workers share the process's memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from outrider.errors import EngineError, FolderError, OutriderError, UsageError
from outrider.runtime.text.text import Text
from outrider.serve.workers.messages import Drop, Fork, Reply, TextSource, WorkerRequest
from outrider.serve.workers.worker_main import LENGTH, TEMPLATE_SECONDS, TIME_LIMIT, receive, send


class WorkerEndedError(OutriderError):
    """A worker has exceeded a limit or crashed before it replied."""

    def __init__(self, at_work: bool):
        """Create the error; `at_work` says whether the worker was working on this message, which then is the likely cause."""
        super().__init__("the process has ended", "try again later")
        self.at_work = at_work


class Worker:
    """The server's connection to a worker. Replies come in the order of the messages. Thread-safe."""

    def __init__(self, channel: socket.socket):
        """Talk to a worker through a socket."""
        self._channel = channel
        self._lock = threading.Lock()
        self._asked: deque[Future[Reply]] = deque()
        self._dropped: deque[int] = deque()
        self.ended = False
        self.closed = False  # whether the server has ended it
        threading.Thread(target=self._read, name="worker", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a reply is pending."""
        return bool(self._asked)

    def ask(self, message: WorkerRequest | Fork, file: socket.socket | None = None) -> Future[Reply]:
        """Send a message, and return a future for its reply, which fails with `WorkerEndedError` if the worker ends.

        Args:
            file: comes with a `Fork`.

        Raises:
            UsageError: the message is nested too deeply.
        """
        try:
            line = msgspec.json.encode(message)
        except RecursionError as error:
            raise UsageError("the prompt is nested too deeply", "reduce the nesting", param="chat") from error
        reply: Future[Reply] = Future()
        reply.set_running_or_notify_cancel()  # the reply comes even if nobody waits for it any more
        with self._lock:
            self._asked.append(reply)
            if self.ended:
                self._fail(at_work=False)
            with suppress(OSError):  # the reading thread notices the same error
                while self._dropped:
                    send(self._channel, msgspec.json.encode(Drop(self._dropped.popleft())))
                if file is not None:
                    socket.send_fds(self._channel, [LENGTH.pack(len(line))], [file.fileno()])
                    self._channel.sendall(line)
                else:
                    send(self._channel, line)
        return reply

    def drop(self, answer: int) -> None:
        """Tell the worker with the next message to drop an answer. Takes no lock, so that finalizers may call it anywhere."""
        self._dropped.append(answer)

    async def reply(self, message: WorkerRequest) -> Reply:
        """Send a message, and wait for the reply; see `ask`."""
        return await asyncio.wrap_future(await asyncio.to_thread(self.ask, message))

    async def fork(self) -> Worker:
        """Return a new worker that has the same compiled grammars; raises `WorkerEndedError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                await asyncio.wrap_future(self.ask(Fork(), theirs))
            except BaseException:
                ours.close()
                raise
        return Worker(ours)

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        self.closed = True
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                reply = msgspec.msgpack.decode(receive(self._channel), type=Reply)
                self._asked.popleft().set_result(reply)
        with self._lock:
            self.ended = True
            self._fail(at_work=True)
            self._channel.close()

    def _fail(self, at_work: bool) -> None:
        while self._asked:
            self._asked.popleft().set_exception(WorkerEndedError(at_work))
            at_work = False  # a worker handles one message at a time


class Workers:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        self._source = b""
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self, text: Text, vocab_rows: int, end_ids: list[int]) -> None:
        """Start the process, and wait until it has loaded a bundle's tokenizer and chat template.

        Args:
            vocab_rows, end_ids: see `LocalGrammars`.

        Raises:
            FolderError: the template takes too long.
            EngineError: the process does not start.
        """
        # Send the contents, not a path: the bundle may be replaced while this server uses the files that it has opened.
        template = text.template
        source, special = (None, {}) if template is None else (template.source, template.special_tokens)
        self._source = msgspec.json.encode(TextSource(text.tokenizer.to_str(), source, special, vocab_rows, end_ids))
        self._start()

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                # -P: nothing from the working directory
                [sys.executable, "-P", "-m", "outrider.serve.workers.worker_main", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a tokenizer that crashes prints a stack into the log
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
                pass_fds=[theirs.fileno()],
                process_group=0,  # one group for the process and all its workers
            )
        except OSError as error:
            raise EngineError(f"the process that reads prompts does not start: {error}", "restart the server") from error
        finally:
            theirs.close()
        try:
            send(self._control, self._source)
            receive(self._control)
        except (EOFError, OSError) as error:
            if self.process.wait() == -TIME_LIMIT:
                raise FolderError(
                    f"the chat template takes longer than {TEMPLATE_SECONDS:g} seconds for a short conversation",
                    "fix the checkpoint's template, then export and build again",
                ) from error
            message = "the process that reads prompts does not start"
            raise EngineError(message, "free some memory, then restart the server") from error

    def fork(self) -> Worker:
        """Return a new worker. If the process has ended, start it again first.

        Raises:
            EngineError: the process does not start.
        """
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            except OSError:
                self._start()
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return Worker(ours)

    def close(self) -> None:
        """End the process and all workers."""
        if self.process is not None and self._control is not None:
            self._control.close()
            self.process.wait()
