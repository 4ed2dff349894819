"""Stages of a target as those in other processes, without processes: what Ray carries is copied instead."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

import outrider
from outrider.backends.base import Engines
from outrider.backends.remote_stages import RemoteStages
from outrider.backends.stage_chain import Chain, Sent
from outrider.backends.stage_host import Crossing, PassedOn, StageHost, seal
from outrider.engines.session import Session
from outrider.engines.sizes import Sizes
from outrider.errors import EngineError


class LocalChain(Chain):
    """Runs hosts of stages when a pass is sent or, if they are `late`, when it is waited for. Others do so in between."""

    def __init__(self, engines: Engines, sizes: Sequence[Sizes], late: bool = False):
        super().__init__({}, 0)
        self.hosts, self.late = [StageHost(f"stage {number}") for number in range(1, len(sizes) + 1)], late
        for index, host in enumerate(self.hosts):
            host.open(index, engines.folder, seal(engines.manifest), outrider.__version__, sizes[0].batch, None)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.sent: deque[bytes] = deque()  # that no stage has run
        self.given: deque[bytes] = deque()  # that nobody has received
        self.failure: EngineError | None = None  # of all passes from now on
        self.passes = self.overlapping = 0  # passes sent, and how many of them while another was under way
        self.dies_at: int | None = None  # the number of a pass

    def later(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, arguments))

    def send(self, message: Crossing) -> Sent:
        if self.failure is not None:
            raise self.failure
        self.overlapping += bool(self.sent or self.given)
        self.passes += 1
        self.sent.append(pickle.dumps(message._replace(calls=self.calls)))
        self.calls = []
        if not self.late:
            self.work()
        return Sent(self.passes, None)

    def work(self) -> None:
        message = pickle.loads(self.sent.popleft())
        for host in self.hosts:
            message = host.run(message)
        self.given.append(pickle.dumps(message.given))

    def receive(self, sent: Sent) -> PassedOn:
        if self.failure is not None:
            raise self.failure
        assert sent.number == self.passes - len(self.sent) - len(self.given) + 1  # in order
        if self.late:
            self.work()
        given: PassedOn = pickle.loads(self.given.popleft())
        return given

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        return {name: tensor for host in self.hosts for name, tensor in host.cache(self.calls).items()}


class LocalStages:
    """Opens stages in this process; see `Engines.elsewhere`."""

    def __init__(self, late: bool = False):
        self.late = late
        self.chains = list[LocalChain]()

    def __call__(self, engines: Engines, sizes: Sequence[Sizes]) -> Session:
        def connect() -> LocalChain:
            self.chains.append(LocalChain(engines, sizes, self.late))
            return self.chains[-1]

        return RemoteStages(connect, sizes[-1])
