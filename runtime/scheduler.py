"""Continuous batching of requests over the slots of a loaded bundle.

schedule      what the next step does: which requests to admit, to read prompts of, and to decode
run           a chunk of one prompt, and a round of all requests whose prompts are read
postprocess   emit tokens, and free slots
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from outrider.errors import EngineError, OutriderError, StageError, UsageError
from outrider.runtime.alternation import Alternation, Decided
from outrider.runtime.loaded import LoadedBundle
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import AUTO
from outrider.runtime.policy.policy import Policy
from outrider.runtime.request import Event, Request
from outrider.runtime.request_queue import RequestQueue
from outrider.runtime.rounds.rounds import RoundResult
from outrider.runtime.stats import Load
from outrider.runtime.text.stream import NONE_SHOWN


class SchedulerOutput(NamedTuple):
    """What a step does."""

    read: Request | None  # whose prompt to read a chunk of
    round: list[Request]  # which to decode


NOTHING = SchedulerOutput(None, [])
PAUSE = 0.002  # seconds to sleep if all requests wait for their grammars
MAX_LATE = 0.5  # seconds that an answer may wait for its grammar in a slot that another request could use


class Scheduler:
    """Runs one step at a time, from one thread. A request's answer does not depend on other requests.

    Owners of requests get fair shares; see `RequestQueue`.
    """

    def __init__(
        self,
        bundle: LoadedBundle,
        *,
        max_waiting: int = 64,
        k: int | str = AUTO,
        drafter: str | None = None,
        share_prefixes: bool = False,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Use all slots of a loaded bundle, which must not be used otherwise meanwhile.

        Args:
            max_waiting: requests that may wait for a slot.
            k, drafter: as in `Outrider.generate`, for all requests.
            share_prefixes: whether owners reuse cached prefixes of other owners' prompts. This reveals the length of a common
                prefix.
            policy: chooses for each round; None is the policy for k and drafter.
            clock: returns seconds.

        Raises:
            UsageError: the bundle has no such k or drafter.
        """
        bundle.check_drafting(k, drafter)
        self.bundle = bundle
        self.max_waiting = max_waiting
        self._decoder = bundle.decoder
        self._slots = bundle.decoder.slots
        self._slots.across_owners = share_prefixes
        self._policy = policy or bundle.policy_for(k, drafter)
        self._rounds = Alternation(bundle.decoder, self._policy, bundle.allowed_drafters(k, drafter))
        self._clock = clock
        self._queue = RequestQueue()
        self.displaced = self._queue.displaced
        for slot in self._slots:
            self._slots.forget(slot)
        self._forget()

    def reset(self) -> None:
        """Drop the running requests and clear the caches. Waiting requests keep waiting."""
        for request in self._running:
            request.slot = None
        self._decoder.abandon()
        for slot in self._slots:
            self._slots.clear(slot)
        self._forget()

    def _forget(self) -> None:
        self._free = list(self._slots)
        self._running: list[Request] = []  # in the order of admission
        self._reading: deque[Request] = deque()  # those with unread prompts, which take turns
        self._ended: Decided = []  # of rounds that had to end between two steps
        self.lost: StageError | None = None  # of a stage that failed between two steps
        self._last = (0, 0)

    @property
    def busy(self) -> bool:
        """Whether requests are running or waiting, or a stage was lost after them."""
        return bool(self._running or self._queue or self.lost)

    @property
    def load(self) -> Load:
        """How busy the scheduler is now."""
        used = sum(len(request.tokens) for request in self._running) / (len(self._slots) * self.bundle.build.capacity)
        running, waiting, remembered = len(self._running), len(self._queue), len(self.bundle.memory or ())
        return Load(running, waiting, used, *self._last, self._slots.evicted, remembered)

    @property
    def places(self) -> int:
        """The number of requests that may wait: `max_waiting`, and one more for each free slot."""
        return self.max_waiting + len(self._free)

    def waiting(self) -> Counter[Hashable]:
        """Return the number of waiting requests by owner. Any thread may call it."""
        return self._queue.by_owner()

    def submit(self, prompt: list[int], params: SamplingParams, owner: Hashable = None) -> Request:
        """Queue a request for the token ids of a prompt; see `submit_all`."""
        return self.submit_all([(prompt, params)], owner)[0]

    def submit_all(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        owner: Hashable = None,
        priority: int = 0,
        shown: Mapping[int, str] = NONE_SHOWN,
    ) -> list[Request]:
        """Queue all requests, or none.

        Args:
            requests: the token ids and parameters of each.
            owner: identifies the owner of the requests.
            priority: the owner's requests with the lowest number are served first and displaced last. Equal ones are served
                first come, first served.
            shown: tokens that are part of the text, as in `TextStream`.

        Raises:
            UsageError: a request cannot be answered, or there are more requests than slots and places in the queue.
            QueueFullError: too many requests are waiting.
        """
        self._check_count(len(requests))
        if any(params.varies_with_drafts for _, params in requests):
            raise UsageError(
                "with the rejection rule, a seed's answer depends on how many tokens are drafted, and so on other requests",
                "leave out the rule or the seed",
                param="rule",
            )
        made = [self.bundle.request(prompt, params, owner, shown) for prompt, params in requests]
        return self.enqueue(made, owner, priority)

    def enqueue(self, requests: Sequence[Request], owner: Hashable = None, priority: int = 0) -> list[Request]:
        """Queue requests made by `LoadedBundle.request`; see `submit_all`."""
        self._check_count(len(requests))
        for request in requests:
            request.owner, request.priority, request.submitted = owner, priority, self._clock()
        self._queue.add(requests, owner, self.places)
        return list(requests)

    def _check_count(self, count: int) -> None:
        limit = self.max_waiting + len(self._slots)
        if count > limit:
            raise UsageError(f"{count} answers at once exceed the capacity of {limit}", f"ask for at most {limit}", param="n")

    def cancel(self, request: Request) -> None:
        """Drop a request, and free its slot at once."""
        if request.slot is not None:
            while self._rounds.begun:
                self._ended += self._timed(self._rounds.begun, self._rounds.end)
            for ended, result in self._ended:
                if ended.slot is not None and isinstance(result, EngineError):  # or nobody learns of it if `ended` is cancelled
                    ended.slot.finite = False
                    self.lost = result if isinstance(result, StageError) else self.lost
            self._release(request)
        self._queue.remove(request)

    def step(self) -> list[tuple[Request, Event | OutriderError]]:
        """Run one step, and return events and errors in the order of admission."""
        ended, self._ended = [each for each in self._ended if each[0].running], []
        if ended:
            return self._postprocess(ended)
        plan = self._schedule()
        if plan == NOTHING and self._running and not self._rounds.begun:
            time.sleep(PAUSE)
        return self._postprocess(self._run(plan))

    def _schedule(self) -> SchedulerOutput:
        begun = self._rounds.begun
        if begun and self._changing():
            return NOTHING
        if not begun:  # a grammar may have become late since
            self._preempt()
        while self._queue and self._free:
            request = self._queue.next(self._running)
            if request.admitted is None:
                request.admitted, request.acceptance = self._clock(), self._policy.begin()
                request.lengths = self._policy.lengths(request.owner)
            slot = self._slots.admit(request, self._free)
            self._free.remove(slot)
            self._running.append(request)
            if slot.unread:
                self._reading.append(request)
        if self._free and len(self._running) > 1:
            self._close_gaps()
        decoding: list[Request] = []
        for request in self._running:
            if request in self._reading or request in begun:
                continue
            if request.ready():
                request.late = None
                decoding.append(request)
            elif request.late is None:
                request.late = self._clock()
        if not self._reading:
            return SchedulerOutput(None, decoding)
        reading = self._reading[0]
        self._reading.rotate(-1)  # long prompts do not hold up short ones
        return SchedulerOutput(reading, decoding)

    def _changing(self) -> bool:
        """Return whether the next step has more to do than rounds, so that begun rounds must end first."""
        used = sorted(request.slot.index for request in self._running if request.slot is not None)
        gaps = used[-1] - used[0] >= len(used)
        return gaps or bool(self._reading) or bool(self._queue and (self._free or self._late()))

    def _late(self) -> list[Request]:
        """Return the requests whose grammars are so late that others could use their slots."""
        since = self._clock() - MAX_LATE
        return [request for request in self._running if request.late is not None and request.late <= since]

    def _preempt(self) -> None:
        """Put an answer whose grammar is late back into the queue, with its tokens, if another request could use its slot."""
        if self._free or not self._queue:
            return
        late = self._late()
        if late and any(request.ready(patient=False) for request in self._queue):
            running = Counter(request.owner for request in self._running)
            request = max(late, key=lambda each: running[each.owner])
            self._release(request)
            request.tokens = list(request.tokens)  # the old list belongs to the slot and ends here
            request.late = None
            self._queue.put_back(request)

    def _close_gaps(self) -> None:
        """Move slots in use together, because a pass runs over all slots from the first to the last in use."""
        used = sorted((request.slot for request in self._running if request.slot is not None), key=lambda slot: slot.index)
        while gaps := [slot for slot in self._free if used[0].index < slot.index < used[0].index + len(used)]:
            last, gap = used[-1], gaps[0]
            self._slots.move(last, gap, self._free)
            used.sort(key=lambda slot: slot.index)

    def _run(self, plan: SchedulerOutput) -> Decided:
        results: Decided = []
        if plan.read is not None and (error := self._read(plan.read)) is not None:
            results.append((plan.read, error))
        if decoding := [*plan.round, *self._rounds.begun]:
            decided = self._timed(decoding, lambda: self._rounds.run(plan.round, alone=plan.read is None))
            drafted = (len(result.drafted) for _, result in decided if isinstance(result, RoundResult))
            self._last = len(decided), max(drafted, default=0)
            results += decided
        return results

    def _timed(self, requests: Sequence[Request], run: Callable[[], Decided]) -> Decided:
        """Run rounds, and count the time of the engines for the requests that take part."""
        started = self.bundle.engine_seconds()
        decided = run()
        for request in requests:
            request.stats.engine_seconds += self.bundle.engine_seconds() - started
        return decided

    def _read(self, request: Request) -> EngineError | None:
        assert request.slot is not None
        try:
            self._slots.share(request)
            if request.slot.unread:
                self._slots.prefill(request.slot)
        except EngineError as error:
            return error
        if not request.slot.unread:
            self._reading.remove(request)
            if not request.stats.emitted:  # otherwise it was preempted, and its answer is read again too
                request.stats.prompt_seconds = self._clock() - (request.admitted or 0.0)
        return None

    def _postprocess(self, results: Decided) -> list[tuple[Request, Event | OutriderError]]:
        emitted: list[tuple[Request, Event | OutriderError]] = []
        for request, result in results:
            outcome: Event | OutriderError
            if isinstance(result, EngineError):
                assert request.slot is not None
                request.slot.finite = False
                outcome = result
            else:
                try:
                    outcome = request.take(result)
                    request.stats.seconds = self._clock() - (request.admitted or 0.0)
                except EngineError as error:  # the tokenizer's
                    outcome = error
            if isinstance(outcome, Event) and outcome.finish_reason is not None:
                self._decoder.finish(request)
            if not isinstance(outcome, Event) or outcome.finish_reason is not None:
                self._release(request)
            emitted.append((request, outcome))
        return emitted

    def _release(self, request: Request) -> None:
        slot, request.slot = request.slot, None
        assert slot is not None
        self._slots.release(slot)
        self._free.append(slot)
        self._running.remove(request)
        if request in self._reading:
            self._reading.remove(request)
