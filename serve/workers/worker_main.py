"""The process that workers are forked from, and the worker itself.

A worker renders chat templates, tokenizes, compiles grammars and computes their masks. It ends if it exceeds a limit of time or
memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from outrider.errors import UsageError
from outrider.runtime.grammar.compiler import LocalGrammars, rehearse
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.grammar.matcher import Bools, LocalMatcher
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.text.chat_template import Chat, ChatTemplate
from outrider.runtime.text.text import PromptTooLongError, Text
from outrider.serve.workers.call_arguments import arguments_of
from outrider.serve.workers.messages import (
    Advance,
    Begin,
    Compile,
    Drop,
    Fork,
    Masks,
    PromptJob,
    Reply,
    TextSource,
    Valid,
    WorkerRequest,
)

# The next four are processor time, so that a busy machine does not end a worker.
TEMPLATE_SECONDS = 5.0  # for small conversations in the chat template, at startup
JOB_SECONDS = 10.0  # for the prompts of one request
GRAMMAR_SECONDS = 2.0  # for compiling a grammar
MASK_SECONDS = 1.0  # for the masks of a round; one mask usually takes far less than a millisecond, a large one up to seven
REHEARSED = 32  # tokens into a new grammar for which masks are tried
TIME_LIMIT = signal.SIGPROF  # the signal that ends a process at such a limit
MEMORY = 4 << 30  # bytes of address space
GRAMMAR_MEMORY = 128 << 20  # bytes that the grammars of a worker may hold
NICE, LAST = 5, 15  # niceness of workers, which is below the engines' priority, and of workers with the lowest priority
BURST, SHARE = (
    2.0,
    0.2,
)  # a worker that uses more than this many seconds plus this share of a processor gets the lowest priority
FORCED = 64  # maximum number of forced tokens in a reply
IDLE_SECONDS = 60.0  # after which an idle worker ends
LENGTH = struct.Struct("<I")  # before each message
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


def send(channel: socket.socket, payload: bytes) -> None:
    """Send a message."""
    channel.sendall(LENGTH.pack(len(payload)) + payload)


def receive(channel: socket.socket) -> bytes:
    """Return the next message.

    Raises:
        EOFError: the other side has ended.
    """
    (length,) = LENGTH.unpack(_exactly(channel, LENGTH.size))
    return _exactly(channel, length)


def _exactly(channel: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    view = memoryview(received)
    while view:
        got = channel.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(received)


def main() -> None:
    """Read the `TextSource` from the socket whose number is the first argument, load it, and send an empty message. Then fork a
    worker for each socket that arrives. When the server has ended, end all workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server handles these, and lets requests finish
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    control = socket.socket(fileno=int(sys.argv[1]))
    source = msgspec.json.decode(receive(control), type=TextSource)
    template = None if source.template is None else ChatTemplate(source.template, source.special_tokens)
    text = Text(Tokenizer.from_str(source.tokenizer), template)
    grammars = LocalGrammars(text.tokenizer, source.vocab_rows, source.end_ids)
    if source.end_ids:
        grammars.tokenizer  # noqa: B018  # created once here, and not in each worker
    if template is not None:
        _limit(TEMPLATE_SECONDS)
        template.samples()
        _limit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for workers to end
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # not even for those whose parent, a worker, has ended
    gc.collect()
    gc.freeze()  # so that garbage collection in workers does not write to the memory that they share with this process
    send(control, b"")
    while True:
        word, files, *_ = socket.recv_fds(control, 1, 1)
        if not word:
            os.killpg(0, signal.SIGKILL)
        if not os.fork():
            control.close()
            _Worker(socket.socket(fileno=files[0]), text, grammars).run()
            os._exit(0)
        os.close(files[0])


def takes_much(seconds: float, since: float) -> bool:
    """Return whether work that has used `seconds` since the time `since`, by `time.monotonic`, gets the lowest priority."""
    return seconds > BURST + SHARE * (time.monotonic() - since)


def _limit(seconds: float) -> None:
    """End this process after this many seconds of processor time; 0 lifts the limit. The system enforces the limit, so no code
    in the process can prevent it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class _Worker:
    def __init__(self, channel: socket.socket, text: Text, grammars: LocalGrammars):
        self._channel, self._text, self._grammars = channel, text, grammars
        self._answers: dict[int, LocalMatcher] = {}
        self._asked: queue.SimpleQueue[WorkerRequest | Fork | Drop] = queue.SimpleQueue()
        self._started, self._held = time.monotonic(), _resident()
        self._spent = 0.0  # processor time of the workers that this one descends from, in seconds

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        with suppress(queue.Empty):
            while True:
                message = self._asked.get(timeout=IDLE_SECONDS)
                if isinstance(message, Drop):
                    self._answers.pop(message.answer, None)
                    continue
                if isinstance(message, Fork):
                    self._fork(socket.socket(fileno=message.file))
                    continue
                _limit(self._seconds(message))
                reply = self._reply(message)
                _limit(0)
                full = not isinstance(message, PromptJob) and self._is_full()
                if full:
                    reply = Reply(error="the grammars of your requests take too much memory", hint="simplify them")
                if takes_much(self._spent + time.process_time(), self._started):
                    os.nice(LAST - os.nice(0))
                send(self._channel, msgspec.msgpack.encode(reply))
                if full:  # its other answers continue in another worker
                    return

    def _read(self) -> None:
        """Read messages even while the worker is busy, so that the server never waits to send, and the worker ends with it."""
        with suppress(EOFError, OSError):
            while True:
                length, files, *_ = socket.recv_fds(self._channel, LENGTH.size, 1, socket.MSG_WAITALL)
                if not length:
                    break
                message = msgspec.json.decode(_exactly(self._channel, *LENGTH.unpack(length)), type=WorkerRequest | Fork | Drop)
                if isinstance(message, Fork):
                    (message.file,) = files
                self._asked.put(message)
        os._exit(0)

    def _fork(self, channel: socket.socket) -> None:
        """Fork a worker that reads from another socket. Only this thread computes, so it finds everything in order."""
        spent = self._spent + time.process_time()
        if os.fork():
            channel.close()
            send(self._channel, msgspec.msgpack.encode(Reply()))
            return
        self._channel.close()
        self._channel, self._spent = channel, spent
        self._asked = queue.SimpleQueue()
        self._answers.clear()
        threading.Thread(target=self._read, daemon=True).start()

    @staticmethod
    def _seconds(message: WorkerRequest) -> float:
        if isinstance(message, PromptJob):
            return JOB_SECONDS
        return MASK_SECONDS if isinstance(message, Advance | Masks | Valid) else GRAMMAR_SECONDS

    def _is_full(self) -> bool:
        if _resident() - self._held <= GRAMMAR_MEMORY:
            return False
        self._grammars.forget()
        with suppress(OSError, AttributeError):  # glibc keeps freed memory; other C libraries have no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
        return _resident() - self._held > GRAMMAR_MEMORY

    def _reply(self, message: WorkerRequest) -> Reply:
        try:
            match message:
                case PromptJob():
                    return Reply(_prompts(self._text, message))
                case Compile():
                    os.nice((LAST - os.nice(0)) * message.last)
                    compiled = self._grammars.compile(StructuredOutputs(**message.structured))
                    rehearse(compiled.matcher, REHEARSED, message.opening)
                    return Reply()
                case Begin():
                    self._answers[message.answer] = matcher = self._grammars.begin(StructuredOutputs(**message.structured))
                    return self._next(matcher, message.confirmed)
                case Advance():
                    return self._next(self._answers[message.answer], message.tokens)
                case Masks():
                    masks, rows = self._answers[message.answer].masks(message.drafted)
                    return Reply(masks=[*map(_packed, masks[message.known :])], count=rows)
                case Valid():
                    return Reply(count=self._answers[message.answer].valid(message.tokens))
        except UsageError as error:
            return Reply(
                [], error=str(error), hint=error.hint, param=error.param, too_long=isinstance(error, PromptTooLongError)
            )
        except GrammarError as error:
            return Reply(error=str(error), hint=error.hint)
        except RecursionError:
            message_ = "the messages and tools are nested too deeply"
            return Reply(error=message_, hint="reduce the nesting", param="chat")

    @staticmethod
    def _next(matcher: LocalMatcher, tokens: Sequence[int]) -> Reply:
        matcher.advance(tokens)
        forced = matcher.forced(FORCED)
        return Reply(masks=[*map(_packed, matcher.masks([])[0])], forced=forced)


def _packed(mask: Bools) -> bytes:
    return np.packbits(mask, bitorder="little").tobytes()


def _resident() -> int:
    """Return how many bytes of memory this process holds."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # the peak is good enough: a worker that exceeds the limit ends anyway
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _prompts(text: Text, job: PromptJob) -> list[list[int]]:
    limit = job.limit
    if job.messages:
        messages = [*map(_with_arguments, job.messages)]
        chat = Chat(messages, job.tools, job.add_generation_prompt, job.template_kwargs)
        prompts = [text.encode_chat(chat, limit=limit, allow_special_tokens=job.allow_special_tokens)]
    else:
        add = job.add_special_tokens
        prompts = [text.encode(each, chat=False, limit=limit, add_special_tokens=add) for each in job.texts]
    if (longest := max(map(len, prompts))) > limit:  # refuse here instead of sending them to the server first
        raise PromptTooLongError(f"the prompt has {longest:,} tokens; this server's limit is {limit:,}", "shorten it")
    return prompts


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as values, as templates expect them."""
    calls = [
        call | {"function": call["function"] | {"arguments": arguments_of(call)}} for call in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls} if calls else message


if __name__ == "__main__":
    main()
