"""Stages of a target in other processes: all but the last are Ray actors, which may run on other machines.

The process that decodes has the last stage, the samplers and the drafters, whose heads read features there. An actor opens one
stage of the same bundle, from its own disk, and keeps the caches of its layers. A pass is one message, which goes from stage to
stage. What sessions must do before it travels with it, accepted counts included, so caches cannot drift apart.

Ray places the actors, carries the messages, runs them in order, and tells when an actor dies.

Ray does not know what an actor holds, so this code checks that the bundle and the release are those of the decoding process.
It also limits how long a pass may take, and finds out which stage failed. Nothing is sent twice: the caches of an actor end
with it, and after any failure nobody knows which stages have run a pass. All later passes fail, too, until the session is
reopened with new actors and empty caches, as a server does, or the bundle is opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import outrider
from outrider.backends.base import Engines
from outrider.backends.stage_chain import Chain, Sent
from outrider.backends.stage_host import Crossing, StageHost, passed, seal
from outrider.bundle.manifest import is_cuda
from outrider.engines.cluster import connect
from outrider.engines.device import Cpu, Launch, in_sequence
from outrider.engines.session import Pass, Session
from outrider.engines.sizes import Sizes

# Seconds for a pass through all of them: at most, and at least, because the first pass reads weights from the disk.
PASSING, LEAST_PASSING = 120.0, 30.0


class RemoteStages(Session):
    """The stages in actors, as one."""

    skips_logits = False
    recordable = False
    overlaps = True

    def __init__(self, connect: Callable[[], Chain], last: Sizes):
        """Forward to a chain; `last` are the sizes of its last stage."""
        super().__init__(Cpu(), last)
        assert last.stage is not None
        self._connect, self._chain, self._paired = connect, connect(), False
        self._gives = last.stage.gives

    @property
    def is_graph(self) -> bool:
        """Whether the stages are a compiled graph of Ray, so that they are all on this machine."""
        return self._chain.is_graph

    def bind(self, buffers: Pass) -> Launch:
        return in_sequence(self.bind_parts(buffers))

    def bind_parts(self, buffers: Pass) -> Sequence[Launch]:
        ids, commits = buffers.input_ids.view(), [each.view() for each in buffers.commits or ()]
        message = Crossing((), ids, buffers.positions.view(), buffers.window, buffers.first, commits)
        given = [each.view() for each in passed(self._gives, buffers.boundary, *buffers.input_ids.shape)]
        under_way: list[Sent] = []

        def begin() -> None:
            assert buffers  # keeps their memory alive for as long as the launch
            under_way[:] = [self._chain.send(message)]

        def finish() -> None:
            for view, array in zip(given, self._chain.receive(under_way.pop()), strict=True):
                view[...] = array

        return [begin, finish]

    def pair_lone_rows(self) -> None:
        self._paired = True
        self._chain.later("pair_lone_rows")

    def check(self) -> None:
        self._chain.check()

    def reopen(self) -> None:
        self._chain.close()  # or the new actors find no free cores
        self._chain = self._connect()
        if self._paired:
            self.pair_lone_rows()

    def clear(self, slot: int) -> None:
        self._chain.later("clear", slot)

    def restart(self, slot: int) -> None:
        self._chain.later("restart", slot)

    def copy(self, slot: int, to: int, length: int) -> None:
        self._chain.later("copy", slot, to, length)

    def snapshot(self, slot: int, place: int) -> None:
        self._chain.later("snapshot", slot, place)

    def restore(self, place: int, slot: int, position: int) -> None:
        self._chain.later("restore", place, slot, position)

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        return self._chain.cache()


class RayStages:
    """Opens all stages of a target but the last in actors, in the cluster at `RAY_ADDRESS` or in a new one on this machine."""

    def __init__(self, cores: int = 1, device: str | None = None, passing: float = PASSING, graph: bool = True):
        """Open stages.

        Args:
            cores: of each stage.
            device: see `StageHost.open`. Each stage on a GPU gets one from Ray.
            passing: the most seconds of a pass.
            graph: whether stages on one machine are a graph; see `stage_chain.py`.
        """
        self._cores, self._device, self._passing, self._graph = cores, device, passing, graph

    def __call__(self, engines: Engines, sizes: Sequence[Sizes]) -> Session:
        """Return a target's stages but the last; see `Engines.elsewhere`."""
        return RemoteStages(lambda: self._chain(engines, sizes), sizes[-1])

    def _chain(self, engines: Engines, sizes: Sequence[Sizes]) -> Chain:
        connect(len(sizes) * self._cores)
        group = get_current_placement_group()  # of a replica, which has room for its stages
        host = ray.remote(num_cpus=self._cores)(StageHost)
        spans = [each.stage.layers for each in sizes if each.stage is not None]
        actors = {}
        for number, ((first, last), place) in enumerate(zip(spans, engines.build.places, strict=False), 1):
            name = f"stage {number} (layers {first}-{last})"
            # The replica has the first bundle of resources, and each stage, with a GPU or without, its own.
            strategy = "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group, number)
            options = host.options(num_gpus=int(is_cuda(self._device or place)), scheduling_strategy=strategy)
            actors[name] = options.remote(name)
        chain = Chain(actors, self._passing, self._graph)
        chain.open(engines.folder, seal(engines.manifest), outrider.__version__, sizes[0].batch, self._device)
        return chain
