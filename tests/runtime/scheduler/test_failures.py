"""A request that fails, and what it leaves to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.errors import EngineError
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.rounds import Rounds
from outrider.runtime.scheduler import Scheduler
from outrider.tests.runtime.scheduler.schedules import PROMPTS, Alone
from outrider.tests.support import BROKEN, build


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_request_with_nan_logits_fails_and_the_others_continue(broken: Path, tmp_path: Path, backend: str) -> None:
    bundle = build(broken, tmp_path / "bundle", backend=backend, batch=3)
    batched = Outrider.load(bundle, slots=None)
    params = SamplingParams(max_new_tokens=20)
    want = [token for event in Outrider.load(bundle).generate([5, 6, 7], params, k=0) for token in event.token_ids]
    for k in (0, 2, "auto"):
        scheduler = Scheduler(batched, k=k)
        good, bad, other = (scheduler.submit(prompt, params) for prompt in ([5, 6, 7], [5, BROKEN, 9], [5, 6, 7]))
        got: dict[int, list[int]] = {id(good): [], id(other): []}
        failed = []
        while scheduler.busy:
            for request, event in scheduler.step():
                if isinstance(event, Event):
                    got[id(request)] += event.token_ids
                else:
                    failed.append((request, event))
        assert list(got.values()) == [want, want]
        ((request, error),) = failed
        assert request is bad
        assert isinstance(error, EngineError)
        assert "contain NaN or infinity" in str(error)


def test_a_failed_round_is_run_again_for_each_request_alone(
    batched: Outrider, monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    """So that one request's failure does not fail the others."""
    run = Rounds.run
    scheduler = Scheduler(batched, k=2)
    params = SamplingParams(max_new_tokens=50)
    requests = [scheduler.submit(batched.text.encode(PROMPTS[at], chat=False), params) for at in (0, 1)]
    spoilt = len(batched.text.encode(PROMPTS[1], chat=False)) + 20

    def failing(self: Rounds, lanes: list[Lane], *rest: Any, **named: Any) -> object:
        if any(len(lane.tokens) > spoilt and lane.tokens[:5] == requests[1].prompt[:5] for lane in lanes):
            raise EngineError("it broke", "hint it")
        return run(self, lanes, *rest, **named)

    monkeypatch.setattr(Rounds, "run", failing)
    got: list[int] = []
    failed = []
    while scheduler.busy:
        for request, event in scheduler.step():
            if request is requests[0]:
                assert isinstance(event, Event)
                got += event.token_ids
            elif not isinstance(event, Event):
                failed.append(event)
    assert got == alone(0, 0)
    assert [str(each) for each in failed] == ["it broke"]


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_request_that_is_moved_leaves_no_nan_behind(broken: Path, tmp_path: Path, backend: str) -> None:
    """Its prompt is half read, and nobody has seen yet that its cache contains NaN; another request gets the slot it left."""
    outrider = Outrider.load(build(broken, tmp_path / "three", backend=backend, batch=3), slots=None)
    scheduler = Scheduler(outrider, k=2)

    def params(count: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=count, min_new_tokens=count, logit_bias={BROKEN: -100.0})

    scheduler.submit([5, 9], params(60))
    second = scheduler.submit([5, 9, 4], params(12))
    third = scheduler.submit([BROKEN, *[5] * 150], params(3))
    while second.finish_reason is None:
        scheduler.step()
    scheduler.step()
    assert third.slot is not None
    assert third.slot.index == 1
    assert third.slot.unread
    # Some kernels never look at entries behind a text; to others, a masked NaN is a NaN.
    assert all(np.isfinite(values[2]).all() for values in outrider.sessions["target"].cache().values())
    fourth = scheduler.submit([5] * 40, params(5))
    failed = []
    while scheduler.busy:
        failed += [request for request, result in scheduler.step() if isinstance(result, EngineError)]
    assert failed == [third]
    assert fourth.finish_reason == "length"
