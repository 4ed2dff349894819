"""What the server counts of its requests, and when it gives its engines up: without a bundle."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import EngineError, OutriderError
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event, Request
from outrider.runtime.rounds.rounds import RoundResult
from outrider.runtime.rounds.sampling import SamplingState
from outrider.runtime.stats import Load
from outrider.serve.deliveries import Deliveries, Delivery, Result
from outrider.serve.engine import EngineThread
from outrider.serve.metrics import Metrics
from outrider.serve.watchdog import MAX_FAILED_STEPS, Watchdog

NO_LOAD = Load(running=0, waiting=0, used=0.0)
BROKEN = EngineError("the device is gone", "restart the server")


def request(tokens: int = 9) -> Request:
    params = SamplingParams(max_new_tokens=tokens)
    made = Request([1, 2, 3], params, SamplingState(params, [], [], 512), None, 100)
    made.submitted, made.admitted = 0.0, 1.0
    return made


class Queue:
    """A scheduler that only takes note of what is submitted and reset."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.cancelled: list[Request] = []
        self.resets = 0

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        self.submitted.append(request())
        return self.submitted[-1]

    def cancel(self, which: Request) -> None:
        self.cancelled.append(which)

    def reset(self) -> None:
        self.resets += 1


def watched() -> tuple[Any, Watchdog]:
    queue: Any = Queue()
    return queue, Watchdog(queue)


def test_engines_count_as_broken_when_the_probe_fails_and_not_before() -> None:
    queue, watchdog = watched()
    for _ in range(MAX_FAILED_STEPS - 1):
        assert watchdog.stepped([(request(), BROKEN)]) is None
    assert not queue.submitted
    event = request().take(RoundResult("model", [5], [5, 6], None))
    assert watchdog.stepped([(request(), BROKEN), (request(), event)]) is None  # a token came: one request was at fault
    for _ in range(MAX_FAILED_STEPS):
        assert watchdog.stepped([]) is None  # a prompt was read
        assert watchdog.stepped([(request(), BROKEN)]) is None
    (probe,) = queue.submitted
    assert watchdog.stepped([(request(), BROKEN)]) is None
    assert len(queue.submitted) == 1
    assert watchdog.stepped([(request(), OutriderError("another", "")), (probe, BROKEN)]) is BROKEN


def test_a_step_that_raises_breaks_the_engines_if_the_probe_ran_alone() -> None:
    queue, watchdog = watched()
    for _ in range(MAX_FAILED_STEPS):
        assert watchdog.crashed(BROKEN, others_running=True) is None
    assert queue.resets == MAX_FAILED_STEPS
    queue.submitted[-1].slot = object()
    assert watchdog.crashed(BROKEN, others_running=True) is None
    queue.submitted[-1].slot = object()
    assert watchdog.crashed(BROKEN, others_running=False) is BROKEN


def samples(metrics: Metrics) -> dict[str, float]:
    """What was counted, by the names in Prometheus' format."""
    lines = [line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name.removeprefix("outrider_"): float(value) for name, value in lines if "_created" not in name and float(value)}


def test_a_request_counts_once() -> None:
    engine = EngineThread(Path("none"), lambda: None, Metrics(), 60)  # type: ignore[arg-type,return-value]
    delivered: list[Result] = []
    answered, failed, left = request(tokens=6), request(), request()
    every = (answered, failed, left)
    engine.deliveries.add(every, [Delivery(delivered.append) for _ in every])
    answered.stats.cached_tokens, answered.stats.copied_tokens = 2, 1
    first = RoundResult("model", [4, 5], [4, 5, 6], None), RoundResult("none", [], [7], None)
    engine.deliveries.deliver([(answered, answered.take(each)) for each in first], NO_LOAD)
    last = answered.take(RoundResult("ngram", [8, 9, 1], [8, 9], None))
    for _ in range(2):  # what comes after the end is dropped
        engine.deliveries.deliver([(answered, last), (failed, BROKEN)], NO_LOAD)
    queue: Any = Queue()
    engine.running = queue
    for _ in range(2):
        engine.cancel_now([left, answered])
    assert queue.cancelled == [left]
    assert [type(each) for each in delivered] == [Event, Event, Event, EngineError]
    counted = samples(engine.metrics)
    for name, value in {
        'requests_total{finish_reason="length"}': 1,
        'requests_total{finish_reason="error"}': 1,
        'requests_total{finish_reason="cancelled"}': 1,
        "prompt_tokens_total": 9,
        'cached_prompt_tokens_total{slot="own"}': 1,
        'cached_prompt_tokens_total{slot="other"}': 1,
        "generation_tokens_total": 6,
        "rounds_total": 3,
        'spec_decode_num_drafts_total{drafter="model"}': 1,
        'spec_decode_num_drafts_total{drafter="ngram"}': 1,
        "spec_decode_num_draft_tokens_total": 5,
        'spec_decode_num_accepted_tokens_total{drafter="model"}': 2,
        'spec_decode_num_accepted_tokens_total{drafter="ngram"}': 1,
        'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 2,
        'spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 1,
        "time_to_first_token_seconds_count": 1,
        "request_queue_time_seconds_sum": 1,
        "time_per_output_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 3,
    }.items():
        assert counted[name] == value, name


def test_clients_find_what_their_results_left_in_the_metrics() -> None:
    metrics = Metrics()
    deliveries = Deliveries(metrics)
    which, seen = request(), list[dict[str, float]]()
    deliveries.add([which], [Delivery(lambda _: seen.append(samples(metrics)))])
    deliveries.deliver([(which, which.take(RoundResult("none", [], [7], None)))], Load(running=2, waiting=1, used=0.5))
    deliveries.deliver([(which, BROKEN)], NO_LOAD)
    during, after = seen
    assert (during["num_requests_running"], during["num_requests_waiting"], during["kv_cache_usage"]) == (2, 1, 0.5)
    assert not {"num_requests_running", "num_requests_waiting", "kv_cache_usage"} & set(after)
    assert after['requests_total{finish_reason="error"}'] == 1


def test_a_client_that_leaves_while_its_request_is_queued_cancels_it() -> None:
    engine = EngineThread(Path("none"), lambda: None, Metrics(), 60)  # type: ignore[arg-type,return-value]
    accepted = [request()]

    class Accepting(Queue):
        displaced = ()

        def submit_all(self, *_: object) -> list[Request]:
            return accepted

    queue: Any = Accepting()
    engine.running = queue

    async def leave() -> None:
        submitting = asyncio.create_task(engine.submit([([1], SamplingParams())], lambda *_: None))
        await asyncio.sleep(0.01)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        engine.take_calls(wait=False)  # as the thread does, when its step is done
        await asyncio.sleep(0.01)
        engine.take_calls(wait=False)

    asyncio.run(leave())
    assert queue.cancelled == accepted
