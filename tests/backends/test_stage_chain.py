"""How passes go through stages in other processes, and what is said if they do not come back, without engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from outrider.backends import stage_chain
from outrider.backends.stage_chain import Chain
from outrider.backends.stage_host import Crossing, PassedOn
from outrider.errors import EngineError, StageError
from outrider.tests.nodes import DIES, LATE, RAISES, WHOLE, Stage, ray_nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["one machine", "two machines"], autouse=True)
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    with ray_nodes(2, 0) if request.param == "one machine" else ray_nodes(0, 2):
        yield


def chain(actors: list[Any], timeout: float = 20) -> Chain:
    made = Chain({f"stage {number}": each for number, each in enumerate(actors, 1)}, timeout)
    made.open()
    return made


def stages() -> list[Any]:
    return [ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Stage).remote() for _ in range(2)]


def asked(rows: int = 1, behaviour: int = 0, stage: int = 0) -> Crossing:
    return Crossing((), np.zeros((rows, 1), dtype=np.int64), np.zeros(1, dtype=np.int64), behaviour, stage, ())


def run(made: Chain, message: Crossing) -> PassedOn:
    return made.receive(made.send(message))


def test_passes_of_any_size_go_through_all_stages_with_what_they_must_do_first() -> None:
    made = chain(stages())
    for rows in (1, 3, 2):
        np.testing.assert_array_equal(run(made, asked(rows))[0], WHOLE[:rows] + 3)
    made.later("clear", 10)
    made.later("clear", 20)
    np.testing.assert_array_equal(run(made, asked())[0], WHOLE[:1] + 63)
    np.testing.assert_array_equal(run(made, asked())[0], WHOLE[:1] + 3)


def test_a_pass_goes_through_a_stage_while_another_is_in_the_next_one(tmp_path: Path) -> None:
    made, held = chain(stages()), str(tmp_path / "held")
    made.later("hold", held)  # until a later pass has reached the first stage
    sent = [made.send(asked())]
    made.later("release", held)
    sent.append(made.send(asked()))
    for _ in range(4):
        np.testing.assert_array_equal(made.receive(sent.pop(0))[0], WHOLE[:1] + 3)
        sent.append(made.send(asked()))
    made.close()  # before what is under way is dropped, for which Ray would wait


@pytest.mark.parametrize("behaviour", [DIES, RAISES, LATE], ids=["dies", "raises", "late"])
def test_what_fails_one_pass_fails_the_other_that_is_under_way(behaviour: int) -> None:
    made = chain(stages(), 0.5 if behaviour == LATE else 20)
    first, second = made.send(asked(1, behaviour, 1)), made.send(asked())
    with pytest.raises(EngineError, match=r"^stage 2 ?.") as error:
        made.receive(first)
    began = time.monotonic()
    with pytest.raises(EngineError) as same:
        made.receive(second)
    del first, second
    assert str(same.value) == str(error.value)
    assert time.monotonic() - began < 0.2


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("behaviour", "message"),
    [(DIES, "failed: ActorDiedError"), (RAISES, ": no"), (LATE, r"did not answer within 0\.5 seconds")],
    ids=["dies", "raises", "late"],
)
def test_the_stage_that_failed_is_named_and_another_chain_works(stage: int, behaviour: int, message: str) -> None:
    made = chain(stages(), 0.5 if behaviour == LATE else 20)
    run(made, asked())
    with pytest.raises(EngineError, match=f"^stage {stage + 1} ?{message}"):
        run(made, asked(1, behaviour, stage))
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"^stage {stage + 1} ?{message}"):  # caches may differ, so no later pass runs
        run(made, asked())
    assert time.monotonic() - began < 0.2
    np.testing.assert_array_equal(run(chain(stages()), asked())[0], WHOLE[:1] + 3)


def test_stages_that_wait_sleep_and_end_with_the_chain() -> None:
    actors = stages()
    made = chain(actors)
    run(made, asked())
    before = sum(ray.get([each.seconds.remote() for each in actors]))
    time.sleep(1)
    assert sum(ray.get([each.seconds.remote() for each in actors])) - before < 0.6
    del made
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(100):
            ray.get([each.done.remote() for each in actors], timeout=10)
            time.sleep(0.05)


def test_after_an_interrupted_pass_the_stages_have_ended() -> None:
    """They may be ahead of this process, and a later pass must not get the result of this one."""
    made, before = chain(stages()), signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            run(made, asked(behaviour=LATE, stage=1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(EngineError, match="a pass was interrupted"):
        run(made, asked())


def test_a_stage_that_takes_too_long_to_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = [ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Stage).remote(1) for _ in range(2)]
    ray.get([each.done.remote() for each in actors])
    monkeypatch.setattr(stage_chain, "OPENING", 1)
    with pytest.raises(StageError, match=r"^stage 2 did not load within 1 seconds") as caught:
        chain(actors)
    assert "free cores" not in caught.value.hint


def test_a_stage_that_dies_when_its_cache_is_read_is_named() -> None:
    made = chain(stages())
    with pytest.raises(StageError, match=r"^stage 1 failed: ActorDiedError"):
        made.cache()
    with pytest.raises(StageError, match=r"^stage 1 failed"):
        run(made, asked())


def test_a_stage_that_dies_or_hangs_between_passes_is_noticed() -> None:
    actors = stages()
    made = chain(actors)
    for _ in range(3):
        made.check()
        np.testing.assert_array_equal(run(made, asked())[0], WHOLE[:1] + 3)
    ray.kill(actors[1])
    with pytest.raises(StageError, match=r"^stage 2 failed: ActorDiedError"):
        watch(made)
    slow = [ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Stage).remote(5) for _ in range(2)]
    made = chain(slow, timeout=0.3)
    slow[0].open.remote(5)
    with pytest.raises(StageError, match=r"^stage 1 did not answer within 0\.3 seconds"):
        watch(made)


def watch(made: Chain) -> None:
    for _ in range(100):
        made.check()
        time.sleep(0.05)


def test_an_address_that_is_none_is_one_error() -> None:
    program = "from outrider.engines.cluster import connect\nfrom outrider.errors import EngineError\n"
    program += "try:\n    connect()\nexcept EngineError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAY_ADDRESS": "nonsense"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.startswith("no Ray cluster: "), done.stderr
