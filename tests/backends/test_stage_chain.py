"""How passes go through stages in other processes, and what is said if they do not come back, without engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from outrider.backends.stage_chain import Chain
from outrider.backends.stage_host import Crossing
from outrider.errors import EngineError
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


def test_passes_of_any_size_go_through_all_stages_with_what_they_must_do_first() -> None:
    made = chain(stages())
    for rows in (1, 3, 2):
        np.testing.assert_array_equal(made.run(asked(rows))[0], WHOLE[:rows] + 3)
    made.later("clear", 10)
    made.later("clear", 20)
    np.testing.assert_array_equal(made.run(asked())[0], WHOLE[:1] + 63)
    np.testing.assert_array_equal(made.run(asked())[0], WHOLE[:1] + 3)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("behaviour", "message"),
    [(DIES, "failed: ActorDiedError"), (RAISES, ": no"), (LATE, r"did not answer within 0\.5 seconds")],
    ids=["dies", "raises", "late"],
)
def test_the_stage_that_failed_is_named_and_another_chain_works(stage: int, behaviour: int, message: str) -> None:
    made = chain(stages(), 0.5 if behaviour == LATE else 20)
    made.run(asked())
    with pytest.raises(EngineError, match=f"^stage {stage + 1} ?{message}"):
        made.run(asked(1, behaviour, stage))
    began = time.monotonic()
    with pytest.raises(EngineError, match=f"^stage {stage + 1} ?{message}"):  # caches may differ, so no later pass runs
        made.run(asked())
    assert time.monotonic() - began < 0.2
    np.testing.assert_array_equal(chain(stages()).run(asked())[0], WHOLE[:1] + 3)


def test_stages_that_wait_sleep_and_end_with_the_chain() -> None:
    actors = stages()
    made = chain(actors)
    made.run(asked())
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
            made.run(asked(behaviour=LATE, stage=1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(EngineError, match="a pass was interrupted"):
        made.run(asked())


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
