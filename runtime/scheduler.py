"""Requests on a bundle: continuous batching over the slots that it was loaded with. One request alone is the simplest case.

schedule      what the next step does: whom to admit, whose prompt to read on, who takes part in the round
run           a chunk of one prompt, and one round of all requests whose prompts are read
postprocess   what is emitted, and which slots are free again
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.errors import EngineError, OutriderError, UsageError
from outrider.runtime.loaded import LoadedBundle
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import AUTO
from outrider.runtime.policy.policy import Policy
from outrider.runtime.request import Event, Request
from outrider.runtime.rounds.rounds import RoundResult


class QueueFullError(OutriderError):
    """More requests are waiting than may wait."""


class SchedulerOutput(NamedTuple):
    """What a step does."""

    read: Request | None  # a chunk of this one's prompt
    round: list[Request]


NOTHING = SchedulerOutput(None, [])
PAUSE = 0.002  # seconds, when all requests wait for what their grammars allow
MAX_LATE = 0.5  # seconds that an answer waits for its grammar in a slot that another request could use


@dataclass(slots=True)
class Load:
    """How busy the scheduler is."""

    running: int
    waiting: int
    used: float  # share of the caches' positions, 0..1
    batch: int = 0  # requests of the last round
    k: int = 0  # of the last round
    evicted: int = 0  # tokens worth keeping that were overwritten in the caches, since the bundle was loaded


class Scheduler:
    """Runs one step at a time, from one thread. What a request gets does not depend on the others.

    Slots and places in the queue are shared fairly among the owners of requests: a free slot goes to the owner that runs the
    fewest, and a full queue makes room for an owner that has fewer waiting than another.
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
        """Schedule on all slots of a loaded bundle, which must not generate otherwise meanwhile.

        Args:
            max_waiting: requests that may wait for a slot.
            k, drafter: as in `Outrider.generate`, for all requests.
            share_prefixes: whether what was read of one owner's prompts is used for those of others, which tells how long the
                beginning is that they have in common.
            policy: what chooses for each round; None is what k and drafter ask for.
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
        self._drafters = bundle.allowed_drafters(k, drafter)
        self._policy = policy or bundle.policy_for(k, drafter)
        self._clock = clock
        self.displaced: list[Request] = []  # lost their place in the queue to another owner's; for the caller to take
        self._waiting: deque[Request] = deque()
        self._turns: dict[Hashable, int] = {}  # by owner: the number of the last admission
        for slot in self._slots:
            self._slots.forget(slot)
        self._forget()

    def reset(self) -> None:
        """Drop the requests that have a slot, and what their caches hold. Those that wait keep waiting."""
        for request in self._running:
            request.slot = None
        for slot in self._slots:
            self._slots.clear(slot)
        self._forget()

    def _forget(self) -> None:
        self._free = list(self._slots)
        self._running: list[Request] = []  # in the order of admission
        self._reading: deque[Request] = deque()  # those whose prompts are not read yet; they take turns
        self._last = (0, 0)

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._running or self._waiting)

    @property
    def load(self) -> Load:
        """How busy the scheduler is now."""
        capacity = self.bundle.build.capacity
        used = sum(len(request.tokens) for request in self._running) / (len(self._slots) * capacity)
        return Load(len(self._running), len(self._waiting), used, *self._last, self._slots.evicted)

    @property
    def room(self) -> int:
        """How many more requests would find a place."""
        return self.places - len(self._waiting)

    @property
    def places(self) -> int:
        """How many requests may wait now, those that do included: as many more as there are free slots."""
        return self.max_waiting + len(self._free)

    def waiting(self) -> Counter[Hashable]:
        """Return how many requests of each owner wait. Any thread may ask."""
        return Counter(request.owner for request in list(self._waiting))

    def submit(self, prompt: list[int], params: SamplingParams, owner: Hashable = None) -> Request:
        """Queue a request, given by its token ids. The requests of one owner are served first come, first served.

        Raises:
            UsageError: it cannot be answered, alone or beside others.
            QueueFullError: too many are waiting.
        """
        return self.submit_all([(prompt, params)], owner)[0]

    def submit_all(
        self, requests: Sequence[tuple[list[int], SamplingParams]], owner: Hashable = None, priority: int = 0
    ) -> list[Request]:
        """Queue all of them, or none. Owners get fair shares; anything that identifies one will do.

        Args:
            requests: token ids and parameters of each.
            owner: whose they are.
            priority: those of an owner with the lowest priority are served first, and lose their place in the queue last.

        Raises:
            UsageError: one cannot be answered, alone or beside others, or there will never be room for so many at once.
            QueueFullError: too many are waiting.
        """
        self._check_count(len(requests))
        for _, params in requests:
            if params.seed is not None and params.temperature > 0 and not params.exact:
                raise UsageError(
                    "with the rejection rule the answer to a seed depends on how many tokens are drafted, and that depends on"
                    " the other requests",
                    "leave out the rule or the seed",
                    param="rule",
                )
        return self.enqueue([self.bundle.request(prompt, params, owner) for prompt, params in requests], owner, priority)

    def enqueue(self, requests: Sequence[Request], owner: Hashable = None, priority: int = 0) -> list[Request]:
        """Queue requests that were checked, all of them or none; see `submit_all`.

        Raises:
            UsageError: there will never be room for so many at once.
            QueueFullError: too many are waiting.
        """
        self._check_count(len(requests))
        self._make_room(len(requests), owner)
        for request in requests:
            request.owner, request.priority, request.submitted = owner, priority, self._clock()
        self._waiting += requests
        return list(requests)

    def _make_room(self, count: int, owner: Hashable) -> None:
        """Displace the latest of the least urgent requests of those that have most waiting, until `count` find a place.

        An owner loses none while it has no more waiting than the newcomer will have (buffer stealing, McKenney 1990).
        """
        missing = count - self.room
        waiting = self.waiting()
        limit = waiting[owner] + count
        displaced: list[Request] = []
        while len(displaced) < missing:
            most = max(waiting, key=waiting.__getitem__, default=owner)
            if waiting[most] <= limit:
                raise QueueFullError(f"the queue is full: {len(self._waiting)} requests are waiting", "try again later")
            theirs = sorted((each for each in self._waiting if each.owner == most), key=lambda each: each.priority)
            displaced.append(theirs[waiting[most] - 1])
            waiting[most] -= 1
        for request in displaced:
            self.cancel(request)
        self.displaced += displaced

    def _check_count(self, count: int) -> None:
        limit = self.max_waiting + len(self._slots)
        if count > limit:
            raise UsageError(
                f"{count} answers at once exceed the total capacity of {limit}", f"ask for at most {limit}", param="n"
            )

    def cancel(self, request: Request) -> None:
        """Drop a request; its slot is free at once."""
        request.cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
        elif request.slot is not None:
            self._release(request)

    def step(self) -> list[tuple[Request, Event | OutriderError]]:
        """Run the heartbeat: return what is emitted, in the order of admission, and which requests failed."""
        plan = self._schedule()
        if plan == NOTHING and self._running:
            time.sleep(PAUSE)
        return self._postprocess(self._run(plan))

    def _schedule(self) -> SchedulerOutput:
        self._preempt()
        while self._waiting and self._free:
            request = self._next()
            if request.admitted is None:
                request.admitted, request.acceptance = self._clock(), self._policy.begin()
            slot = self._slots.admit(request, self._free)
            self._free.remove(slot)
            self._running.append(request)
            if slot.unread:
                self._reading.append(request)
        if self._free and len(self._running) > 1:
            self._close_gaps()
        decoding: list[Request] = []
        for request in self._running:
            if request in self._reading:
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

    def _preempt(self) -> None:
        """Put an answer whose grammar is late back into the queue, with its tokens, if another request could use its slot."""
        if self._free or not self._waiting:
            return
        since = self._clock() - MAX_LATE
        late = [request for request in self._running if request.late is not None and request.late <= since]
        if late and any(request.ready(patient=False) for request in self._waiting):
            running = Counter(request.owner for request in self._running)
            request = max(late, key=lambda each: running[each.owner])
            self._release(request)
            request.tokens = list(request.tokens)  # the slot keeps the others, which end here
            request.late = None
            self._waiting.appendleft(request)

    def _next(self) -> Request:
        """Take a request from the queue, one whose grammar is late only if there is no other: of the owner that runs the
        fewest, among these of the one whose turn was first, and of that owner's requests the most urgent."""
        running = Counter(request.owner for request in self._running)
        request = min(
            self._waiting,
            key=lambda each: (
                not each.ready(patient=False),
                running[each.owner],
                self._turns.get(each.owner, -1),
                each.priority,
            ),
        )
        self._waiting.remove(request)
        present = {each.owner for each in (*self._waiting, *self._running)}
        turn = max(self._turns.values(), default=-1) + 1
        self._turns = {owner: last for owner, last in self._turns.items() if owner in present} | {request.owner: turn}
        return request

    def _close_gaps(self) -> None:
        """Move the last slots in use into free ones between them: a pass runs over all slots from the first to the last."""
        used = sorted((request.slot for request in self._running if request.slot is not None), key=lambda slot: slot.index)
        while gaps := [slot for slot in self._free if used[0].index < slot.index < used[0].index + len(used)]:
            last, gap = used[-1], gaps[0]
            self._slots.move(last, gap, self._free)
            used.sort(key=lambda slot: slot.index)

    def _run(self, plan: SchedulerOutput) -> list[tuple[Request, RoundResult | EngineError]]:
        results: list[tuple[Request, RoundResult | EngineError]] = []
        if plan.read is not None and (error := self._read(plan.read)) is not None:
            results.append((plan.read, error))
        if plan.round:
            engines = self.bundle.engine_seconds()
            results += self._round(plan.round)
            engines = self.bundle.engine_seconds() - engines
            for request in plan.round:
                request.stats.engine_seconds += engines
            drafted = (len(result.drafted) for _, result in results if isinstance(result, RoundResult))
            self._last = len(plan.round), max(drafted, default=0)
        return results

    def _read(self, request: Request) -> EngineError | None:
        """Read a chunk of a prompt."""
        assert request.slot is not None
        try:
            self._slots.share(request)
            if request.slot.unread:
                self._slots.prefill(request.slot)
        except EngineError as error:
            return error
        if not request.slot.unread:
            self._reading.remove(request)
            if not request.stats.emitted:  # or else it was preempted, and its answer is read again as well
                request.stats.prompt_seconds = self._clock() - (request.admitted or 0.0)
        return None

    def _round(self, requests: list[Request]) -> list[tuple[Request, RoundResult | EngineError]]:
        chunks = 1 if len(self._running) > 1 else None  # a drafter that has to catch up holds no one up
        try:
            results = self._decoder.round(requests, self._policy, self._drafters, chunks)
        except EngineError as error:
            if len(requests) == 1:
                return [(requests[0], error)]
            # It is the backend's failure, and perhaps one request's fault: run each on its own.
            return [result for request in requests for result in self._again(request)]
        return list(zip(requests, results, strict=True))

    def _again(self, request: Request) -> list[tuple[Request, RoundResult | EngineError]]:
        """Run the round of one request alone, after one of several has failed."""
        assert request.slot is not None
        try:
            self._slots.restore(request.slot)
        except EngineError as error:
            return [(request, error)]
        return self._round([request])

    def _postprocess(
        self, results: list[tuple[Request, RoundResult | EngineError]]
    ) -> list[tuple[Request, Event | OutriderError]]:
        emitted: list[tuple[Request, Event | OutriderError]] = []
        for request, result in results:
            if isinstance(result, EngineError):
                assert request.slot is not None
                request.slot.finite = False
                self._release(request)
                emitted.append((request, result))
                continue
            try:
                event = request.take(result)
            except EngineError as error:  # the tokenizer's
                self._release(request)
                emitted.append((request, error))
                continue
            request.stats.seconds = self._clock() - (request.admitted or 0.0)
            if event.finish_reason is not None:
                self._release(request)
            emitted.append((request, event))
        return emitted

    def _release(self, request: Request) -> None:
        slot, request.slot = request.slot, None
        assert slot is not None
        self._slots.release(slot)
        self._free.append(slot)
        self._running.remove(request)
        if request in self._reading:
            self._reading.remove(request)
