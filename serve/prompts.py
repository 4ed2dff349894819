"""Turns the prompts of requests into token ids, in a child process.

A chat template is a program that may never end, and a tokenizer can take seconds and gigabytes, or crash. Threads cannot be
ended, and these would hold the interpreter's lock, so that no stream could go on. The child ends itself at a time limit,
and the next request gets another.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from outrider.errors import EngineError, FolderError, UsageError
from outrider.runtime.scheduler import QueueFullError
from outrider.runtime.text import PromptTooLongError, Text
from outrider.serve.prompts_child import GRAMMAR_SECONDS, JOB_SECONDS, TEMPLATE_SECONDS, TIME_LIMIT, Job, Reply, Source


class PromptEncoder:
    """The child process, and whose turn it is. One prompt is encoded at a time, and owners of requests take turns."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prompts")  # the only thread that talks to the child
        self.child: subprocess.Popen[bytes] | None = None
        self._source: Source
        self._waiting: Counter[Hashable] = Counter()  # requests of each owner, with the one that is being encoded
        self._turns: weakref.WeakValueDictionary[Hashable, asyncio.Lock] = weakref.WeakValueDictionary()

    def start(self, text: Text, vocab_rows: int, end_ids: list[int]) -> None:
        """Start the child with a bundle's tokenizer and chat template, and wait until it is ready.

        Args:
            vocab_rows, end_ids: see `Grammars`.

        Raises:
            FolderError: the template takes too long.
            EngineError: the child does not start.
        """
        # It gets no path, because the bundle may be replaced while this server runs on the files that it has opened.
        template = text.template
        self._source = Source(
            text.tokenizer.to_str(),
            None if template is None else template.source,
            {} if template is None else template.special_tokens,
            vocab_rows,
            end_ids,
        )
        self._pool.submit(self._start).result()

    def close(self) -> None:
        """End the child. What waits for it is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if (child := self.child) is not None:
            child.kill()  # so that the pool's thread does not wait for its reply
        self._pool.shutdown()
        if self.child is not None:
            self._end()

    async def encode(
        self, job: Job, places: int, queued: Counter[Hashable] | None = None, owner: Hashable = None
    ) -> list[list[int]]:
        """Return the token ids of each prompt.

        Args:
            places: requests that may wait, here and in the queue. When they are taken, an owner may still have its share of
                them, and at least one.
            queued: how many requests of each owner wait in the queue.
            owner: anything that identifies whom the request is from.

        Raises:
            UsageError: a prompt cannot be encoded, or takes too long.
            PromptTooLongError: it has more tokens than `job.limit`.
            QueueFullError: too many are waiting.
            EngineError: the child does not start, or has crashed.
        """
        waiting = self._waiting + (queued or Counter())
        own, total = waiting[owner], waiting.total()
        if own and total >= places and own >= places // len(waiting):
            raise QueueFullError(f"the queue is full: {total} requests are waiting", "try again later")
        turn = self._turns.setdefault(owner, asyncio.Lock())
        self._waiting[owner] += 1
        try:
            async with turn:
                reply = await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, job)
        finally:
            self._waiting[owner] -= 1
            self._waiting += Counter()  # drops those that have none
        if reply.error:
            raise (PromptTooLongError if reply.too_long else UsageError)(reply.error, reply.hint, param=reply.param)
        return reply.tokens

    # --- in the pool's thread --------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", "outrider.serve.prompts_child"],  # -P: nothing from the working directory
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a tokenizer that crashes prints a stack into the log
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise EngineError(f"the process that reads prompts does not start: {error}", "restart the server") from error
        if _exchange(self.child, msgspec.json.encode(self._source)) is None:
            if self._end() == -TIME_LIMIT:
                raise FolderError(
                    f"the chat template takes longer than {TEMPLATE_SECONDS:g} seconds for a short conversation",
                    "fix the checkpoint's template, then export and build again",
                )
            raise EngineError("the process that reads prompts does not start", "free some memory, then restart the server")
        return self.child

    def _ask(self, job: Job) -> Reply:
        try:
            line = msgspec.json.encode(job)
        except UnicodeEncodeError as error:
            raise UsageError("the prompt is not UTF-8 text", "convert it to UTF-8", param="prompt") from error
        except RecursionError as error:
            raise UsageError(
                "the prompt has too many lists and objects within each other", "make it flat", param="chat"
            ) from error
        if self.child is not None and self.child.poll() is not None:  # something ended it while it had nothing to do
            self._end()
        if (answer := _exchange(self.child or self._start(), line)) is not None:
            return msgspec.json.decode(answer, type=Reply)
        if self._end() == -TIME_LIMIT:
            if job.structured:
                message = f"the grammar takes longer than {GRAMMAR_SECONDS:g} seconds to compile"
                raise UsageError(message, "simplify it", param="structured_outputs")
            raise UsageError(f"the prompt takes longer than {JOB_SECONDS:g} seconds to read", "shorten it", param="prompt")
        if job.structured:
            raise UsageError(
                "the process that compiles grammars has crashed on the grammar", "simplify it", param="structured_outputs"
            )
        raise EngineError("the process that reads prompts has crashed", "shorten the prompt")

    def _end(self) -> int:
        """End the child, if it has not ended, and return its exit code."""
        assert self.child is not None
        child, self.child = self.child, None
        with suppress(OSError), child:  # what it has not read cannot be flushed
            child.kill()
        return child.returncode


def _exchange(child: subprocess.Popen[bytes], line: bytes) -> bytes | None:
    """Return the line that answers `line`, or None if the child has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line + b"\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except OSError:
        return None
    return answer if answer.endswith(b"\n") else None
