"""Encodes the prompts of requests as token ids, in workers."""

from __future__ import annotations

import asyncio
import time

from outrider.errors import EngineError, UsageError
from outrider.runtime.text.text import PromptTooLongError
from outrider.serve.workers.messages import PromptJob, Reply
from outrider.serve.workers.worker_main import JOB_SECONDS
from outrider.serve.workers.workers import Worker, WorkerEndedError, Workers

AT_ONCE = 8  # requests whose prompts are encoded at the same time
SPARE = 2  # idle workers that are kept


class PromptEncoder:
    """Encodes prompts. All owners share its workers."""

    def __init__(self, workers: Workers):
        """Encode prompts in workers that are forked from `workers`."""
        self._workers = workers
        self._spare: list[Worker] = []
        self._places = asyncio.Semaphore(AT_ONCE)

    async def encode(self, job: PromptJob) -> list[list[int]]:
        """Return the token ids of each prompt.

        Raises:
            UsageError: a prompt cannot be encoded, or takes too long.
            PromptTooLongError: a prompt has more tokens than `job.limit`.
            EngineError: the worker does not start, or has crashed.
        """
        async with self._places:
            reply = await self._ask(job)
        if reply.error:
            raise (PromptTooLongError if reply.too_long else UsageError)(reply.error, reply.hint, param=reply.param)
        return reply.prompts

    async def _ask(self, job: PromptJob) -> Reply:
        self._spare = [worker for worker in self._spare if not worker.ended]
        worker = self._spare.pop() if self._spare else await asyncio.to_thread(self._workers.fork)
        started = time.monotonic()
        try:
            reply = await worker.reply(job)
        except WorkerEndedError as error:
            if time.monotonic() - started >= JOB_SECONDS:
                message = f"the prompt takes longer than {JOB_SECONDS:g} seconds to read"
                raise UsageError(message, "shorten it", param="prompt") from error
            raise EngineError("the process that reads prompts has crashed", "shorten the prompt") from error
        except asyncio.CancelledError:  # nothing waits for the reply any more
            worker.close()
            raise
        if len(self._spare) < SPARE:
            self._spare.append(worker)
        else:
            worker.close()
        return reply
