"""Many requests on one bundle: continuous batching over the slots that it was built with.

schedule      what the next step does: whom to admit, whose prompt to read on, who takes part in the round
run           a chunk of one prompt, and one round of all texts whose prompts are read
postprocess   what goes out, and which slots are free again
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.errors import EngineError, OutriderError, UsageError
from outrider.runtime.costs import Costs
from outrider.runtime.generation import Answer, Event, Outrider
from outrider.runtime.loop import Round, Text
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy import AUTO, Company, Fixed

SHORTEST = 16  # tokens at the beginning of a prompt for which a slot is chosen because its cache holds them


class QueueFullError(OutriderError):
    """More requests are waiting than may."""


class Job:
    """A request from when it is submitted until its answer ends."""

    def __init__(self, answer: Answer, submitted: float):
        self.answer = answer
        self.submitted = submitted
        self.admitted: float | None = None  # by the same clock
        self.text: Text | None = None  # the slot that it has
        self.cancelled = False


class Plan(NamedTuple):
    """What a step does."""

    read: Job | None  # a chunk of this one's prompt
    round: list[Job]


Result = tuple[Job, "Event | OutriderError"]


@dataclass(slots=True)
class Load:
    """Where the scheduler stands."""

    running: int
    waiting: int
    used: float  # share of the caches' positions, 0..1
    batch: int = 0  # texts of the last round
    k: int = 0  # of the last round


class Scheduler:
    """One step at a time, from one thread. What a request gets does not depend on its company: see `docs/architecture.md`."""

    def __init__(
        self,
        outrider: Outrider,
        *,
        max_waiting: int = 64,
        k: int | str = AUTO,
        drafter: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        company: Callable[..., Company] = Company,
    ):
        """On all slots of `outrider`, which must not generate otherwise meanwhile.

        Args:
            max_waiting: requests that may wait for a slot.
            k, drafter: as in `Outrider.generate`, for all requests.
            company: makes what chooses for several requests.

        Raises:
            UsageError: the bundle has no such k or drafter.
        """
        outrider.check_drafting(k, drafter)
        self.outrider = outrider
        self.max_waiting = max_waiting
        self._k, self._clock = k, clock
        self._loop = outrider.loop
        self._allowed = outrider.drafters if drafter in (None, AUTO) else [str(drafter)]
        if isinstance(k, int) and drafter is None:
            self._allowed = outrider.drafters[:1]
        costs = outrider.policy.costs

        def of_batch(batch: int) -> Costs:
            return costs if batch == 1 else Costs(outrider.manifest, outrider.build, batch)

        self._company = company(outrider.policy, of_batch, self._allowed, k if isinstance(k, int) else None)
        self._waiting: deque[Job] = deque()
        for text in self._loop.texts:
            text.end()
        self._forget()

    def reset(self) -> None:
        """Drop the requests that have a slot, and what their caches hold; those that wait go on waiting."""
        for text in self._loop.texts:
            self._loop.clear(text)
        self._forget()

    def _forget(self) -> None:
        self._free = list(range(len(self._loop.texts)))  # slots, those first whose caches are to be lost first
        self._running: list[Job] = []  # in the order of admission
        self._reading: deque[Job] = deque()  # those whose prompts are not read yet, by turns
        self._alone: Job | None = None  # whom the policy for one was started for
        self._last = (0, 0)

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._running or self._waiting)

    @property
    def load(self) -> Load:
        texts = self._loop.texts
        used = sum(len(job.text.tokens) for job in self._running if job.text) / (len(texts) * self.outrider.build.capacity)
        return Load(len(self._running), len(self._waiting), used, *self._last)

    def submit(self, prompt: list[int], params: SamplingParams) -> Job:
        """Queue a request, by its token ids; first come, first served.

        Raises:
            UsageError: it cannot be answered, alone or in company.
            QueueFullError: too many are waiting.
        """
        return self.submit_all([(prompt, params)])[0]

    def submit_all(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Job]:
        """Queue all of them, or none.

        Raises:
            UsageError: one cannot be answered, alone or in company, or there will never be room for so many at once.
            QueueFullError: too many are waiting.
        """
        if len(requests) > self.max_waiting + len(self._loop.texts):
            raise UsageError(
                f"{len(requests)} answers are asked for at once, more than ever may wait and run",
                f"ask for at most {self.max_waiting + len(self._loop.texts)}",
            )
        answers = [self._answer(*request) for request in requests]
        if len(self._waiting) + len(answers) > self.max_waiting + len(self._free):
            raise QueueFullError(f"{len(self._waiting)} requests are waiting, which is as many as may", "try again later")
        jobs = [Job(answer, self._clock()) for answer in answers]
        self._waiting += jobs
        return jobs

    def _answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        if params.seed is not None and params.temperature > 0 and not params.exact:
            raise UsageError(
                "by the rule of rejection a seed's answer depends on how many tokens are drafted, and in company that depends"
                " on the others",
                "leave the rule out, or the seed",
            )
        return self.outrider.answer(prompt, params)

    def cancel(self, job: Job) -> None:
        """Drop a request; its slot is free at once."""
        job.cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
        elif job.text is not None:
            self._release(job)

    def step(self) -> list[Result]:
        """The heartbeat. Returns what went out, in the order of admission, and which requests failed."""
        return self._postprocess(self._run(self._schedule()))

    def _schedule(self) -> Plan:
        while self._waiting and self._free:
            job = self._waiting.popleft()
            job.admitted = self._clock()
            prompt = job.answer.prompt
            job.text = text = self._freest(prompt)
            self._free.remove(text.slot)
            text.begin(prompt, job.answer.request, text.shared(prompt))
            job.answer.stats.cached_tokens = text.read
            job.text.acceptance = self.outrider.policy.acceptance()
            self._running.append(job)
            if job.text.unread:
                self._reading.append(job)
        self._close_gaps()
        reading = self._reading[0] if self._reading else None
        self._reading.rotate(-1)  # long prompts do not hold up short ones
        return Plan(reading, [job for job in self._running if job not in self._reading])

    def _freest(self, prompt: list[int]) -> Text:
        """The free slot whose cache holds most of a prompt's beginning, or else the one that has been free for longest."""

        def held(slot: int) -> int:
            shared = self._loop.texts[slot].shared(prompt)
            return shared if shared >= SHORTEST else 0

        return self._loop.texts[max(self._free, key=held)]

    def _close_gaps(self) -> None:
        """Bring the last texts into free slots between them: a pass runs over all slots from the first to the last in use."""
        slots = sorted(job.text.slot for job in self._running if job.text is not None)
        while slots and (gaps := [slot for slot in self._free if slots[0] < slot < slots[0] + len(slots)]):
            last, gap = slots.pop(), gaps[0]
            self._loop.move(self._loop.texts[last], gap)
            self._free.remove(gap)
            self._free.insert(0, last)
            slots = sorted([*slots, gap])

    def _run(self, plan: Plan) -> list[tuple[Job, Round | EngineError]]:
        found: list[tuple[Job, Round | EngineError]] = []
        if plan.read is not None:
            job = plan.read
            assert job.text is not None
            try:
                self._loop.read(job.text)
            except EngineError as error:
                found.append((job, error))
            if not job.text.unread:
                self._reading.remove(job)
                job.answer.stats.prompt_seconds = self._clock() - (job.admitted or 0.0)
        if not plan.round:
            return found
        engines = self.outrider.engine_seconds()
        if len(plan.round) == 1:
            found.append((plan.round[0], self._round_alone(plan.round[0])))
        else:
            found += self._round_together(plan.round)
        engines = self.outrider.engine_seconds() - engines
        for job in plan.round:
            job.answer.stats.engine_seconds += engines
        self._last = len(plan.round), max((each.drafted for _, each in found if isinstance(each, Round)), default=0)
        return found

    def _round_alone(self, job: Job) -> Round | EngineError:
        text, policy = job.text, self.outrider.policy
        assert text is not None
        if isinstance(self._k, int):
            text.chooser = Fixed(self._allowed[0], self._k)
        else:
            if self._alone is not job:
                policy.start(text.request.greedy, self._allowed, text.acceptance)
            text.chooser = policy
        self._alone = job
        try:
            others = len(self._running) > 1  # who wait while a draft reads
            return self._loop.round(text, job.answer.wanted, chunks=1 if others else None)
        except EngineError as error:
            return error

    def _round_together(self, jobs: list[Job]) -> list[tuple[Job, Round | EngineError]]:
        self._alone = None
        texts = [job.text for job in jobs if job.text is not None]
        try:
            done = self._loop.round_together(texts, [job.answer.wanted for job in jobs], self._company)
        except EngineError:  # the backend's, and perhaps one request's fault: each on its own
            return [(job, self._round_alone(job)) for job in jobs]
        return list(zip(jobs, done, strict=True))

    def _postprocess(self, found: list[tuple[Job, Round | EngineError]]) -> list[Result]:
        results: list[Result] = []
        for job, done in found:
            text = job.text
            assert text is not None
            if isinstance(done, EngineError):
                text.proven = False
                self._release(job)
                results.append((job, done))
                continue
            event = job.answer.take(done)
            job.answer.stats.seconds = self._clock() - (job.admitted or 0.0)
            if event.finish_reason is not None:
                self._release(job)
            results.append((job, event))
        return results

    def _release(self, job: Job) -> None:
        assert job.text is not None
        if not job.text.proven:
            self._loop.clear(job.text)  # nobody has seen yet whether what it wrote are numbers
        self._free.append(job.text.slot)  # what its cache holds may be the beginning of a prompt to come
        job.text = None
        self._running.remove(job)
        if job in self._reading:
            self._reading.remove(job)
        if self._alone is job:
            self._alone = None
