"""Ray clusters of several nodes on this machine, and a stage for them without engines."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster

from outrider.backends.stage_host import Call, Crossing, join
from outrider.engines.device import Cpu
from outrider.errors import EngineError

SIZE = {"object_store_memory": 100 << 20}
INLINE = 1000  # bytes of a result that travels with calls: with passes of few rows, but not with those of many
WHOLE = np.arange(12.0).reshape(3, 4)
DIES, RAISES, LATE = 1, 2, 3


@contextmanager
def ray_nodes(cores: int, others: int, gpus: int = 0, setup: Callable[[], None] | None = None) -> Iterator[Cluster]:
    """A cluster with `cores` on the node of this process, and `others` more with a core and `gpus` each.

    `setup` runs first in each process of an actor.
    """
    head = {"num_cpus": cores, "include_dashboard": False, "_system_config": {"max_direct_call_object_size": INLINE}}
    cluster = Cluster(initialize_head=True, head_node_args=SIZE | head)
    try:
        for _ in range(others):
            cluster.add_node(num_cpus=1, num_gpus=gpus, **SIZE)
        cluster.wait_for_nodes()
        environment = {} if setup is None else {"worker_process_setup_hook": setup}
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def without_memory() -> None:
    """Let a worker of Ray find little memory on its machine."""
    Cpu.memory = lambda _: (4096, 4096)  # type: ignore[assignment, method-assign]


class Stage:
    """Adds its number to what it is given. Its behaviour is the window of a pass, in which it is the first slot."""

    def __init__(self, slow: int | None = None):
        """`slow` is the index of a stage that takes long to load."""
        self.slow, self.passes = slow, 0

    def open(self, index: int) -> None:
        self.index = index
        if index == self.slow:
            time.sleep(2)

    def join(self) -> str:
        return join(0)

    def run(self, message: Crossing) -> Crossing:
        if message.first == self.index:
            if message.window == DIES:
                os._exit(1)
            if message.window == RAISES:
                raise EngineError(f"stage {self.index + 1}: no", "a hint")
            if message.window == LATE:
                time.sleep(2)
        for method, (held,) in message.calls:
            if method == "release" and self.index == 0:
                Path(held).touch()
            while method == "hold" and self.index == 1 and not Path(held).exists():
                time.sleep(0.01)
        self.passes += 1
        called = sum(slot for method, (slot,) in message.calls if method == "clear")
        return message._replace(given=[each + self.index + 1 + called for each in message.given or [WHOLE[: len(message.ids)]]])

    def call(self, message: bytes) -> bytes:
        return pickle.dumps(self.run(pickle.loads(message)))

    def done(self) -> int:
        return self.passes

    def cache(self, calls: Sequence[Call]) -> dict[str, Any]:
        os._exit(1)

    def seconds(self) -> float:
        return float(sum(psutil.Process().cpu_times()[:2]))


def hosts(count: int = 2) -> list[psutil.Process]:
    """The processes of the stages, when those of earlier tests have ended."""
    for _ in range(200):
        if len(found := _hosts()) == count:
            break
        time.sleep(0.05)
    return found


def _hosts() -> list[psutil.Process]:
    own = {each.pid for each in psutil.Process().children(recursive=True)}  # not those of tests that run beside these
    stages = (each for each in psutil.process_iter(["cmdline"]) if "ray::StageHost" in " ".join(each.info["cmdline"] or ()))
    return [each for each in stages if each.pid in own]
