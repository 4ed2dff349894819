"""Stages of a target in other processes: all but the last are Ray actors, which may run on other machines.

The process that decodes has the last stage, the samplers and the drafters, whose heads read features there. An actor opens one
stage of the same bundle, from its own disk, and keeps the caches of its layers. A pass is one call for each actor. It names the
result of the stage before as an object of Ray, so an actor begins when that is ready, and the decoding process waits once.

Ray places the actors, runs the calls of a process in order, tells when an actor dies, and carries results: up to 100 kB with
the calls, through the decoding process, and larger ones from node to node.

Ray does not know what an actor holds, so this file checks that the bundle and the release are those of the decoding process.
It also limits how long a pass may take, and finds out which stage failed. Nothing is started again or sent twice here: the
caches of an actor end with it, and after any failure nobody knows which stages have run a pass. All later passes fail, too,
until the bundle is opened again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import ray
from cachetools import LRUCache
from ray.exceptions import RayError, RayTaskError

import outrider
from outrider.backends.base import Engines
from outrider.backends.open import open_engines, read_bundle
from outrider.bundle.integrity import check_file, unchanged
from outrider.bundle.manifest import WEIGHTS, Manifest, step_file
from outrider.engines.arrays import Floats, Int64s
from outrider.engines.cluster import connect
from outrider.engines.contract import BATCH_DIM, ROWS_DIM, Tensor, sized
from outrider.engines.device import Buffer, Cpu, Launch
from outrider.engines.session import MAX_BOUND, Pass, Session
from outrider.engines.sizes import Sizes
from outrider.engines.staged_session import FEWEST, boundary_buffers
from outrider.errors import EngineError, OutriderError, UsageError, reason_of
from outrider.progress import SILENT

OPENING = 600.0  # seconds for actors to find a place and to load their stages
PASSING = 120.0  # seconds for a pass through all of them
AGAIN = "open the bundle again; Ray's logs have more (/tmp/ray/session_latest/logs)"
ROOM = "ray status shows whether a node has enough free cores; use fewer with --stage-cores"
PassedOn = Sequence[npt.NDArray[Any]]


def seal(manifest: Manifest) -> str:
    """Return what identifies a bundle: a digest of its manifest, which has the digests of all other files."""
    return hashlib.sha256(manifest.encode()).hexdigest()


def passed(tensors: Sequence[Tensor], boundary: Mapping[str, Buffer], count: int, rows: int) -> list[npt.NDArray[Any]]:
    """Return the part of a boundary that a pass of `count` sequences with `rows` rows may use."""
    names = {BATCH_DIM: count, ROWS_DIM: FEWEST if count * rows < FEWEST else rows}
    return [boundary[each.name].part(0, *sized(each.shape, names)).view() for each in tensors]


class StageHost:
    """One stage of a target, in an actor."""

    def open(self, folder: Path, sealed: str, release: str, index: int, batch: int, device: str | None) -> None:
        """Load a stage, with caches for `batch` sequences.

        Args:
            folder: of the bundle, on this machine.
            sealed: the `seal` that it must have.
            release: of Outrider in the process that decodes.
            index: of the stage, from 0 on.
            device: see `open_engines`.

        Raises:
            EngineError: the bundle or the release is another one, or the stage cannot be loaded.
            FolderError: the bundle is missing or damaged.
        """
        if release != outrider.__version__:
            raise EngineError(
                f"its process has outrider {outrider.__version__}, and the one that decodes has {release}",
                "install the same release on every machine",
            )
        with unchanged(folder) as place:
            manifest, build = read_bundle(place)
            if seal(manifest) != sealed:
                raise EngineError(f"its machine has another bundle at {folder}", "copy the same bundle to every machine")
            files = [step_file("target", each) for each in build.stages[: index + 1]]  # a stage may use weights of earlier ones
            for name in (files[-1], *(file + WEIGHTS for file in files)):
                check_file(place, name, manifest.files[name], SILENT)
            engines = open_engines(place, manifest, build, device)
            sizes = engines.sizes("target", batch).of(build.stages[index])
            self._session = engines.model("target", sizes)
        self._stage, host = build.stages[index], Cpu()
        self._boundary = boundary_buffers(host, [*self._stage.takes, *self._stage.gives], sizes)
        self._ids = host.zeros((batch * sizes.max_rows,), "int64", "a pass")
        self._starts, *commits = (host.zeros((batch,), "int64", "a pass") for _ in range(3))
        self._commits = commits if sizes.recurrent else []
        self._logits = host.zeros((1,), "float32", "no logits")
        self._launches: LRUCache[tuple[int, ...], Launch] = LRUCache(MAX_BOUND)

    def run(self, inputs: tuple[Int64s, Int64s, int, int, PassedOn], taken: PassedOn) -> PassedOn:
        """Run a pass, and return what the stage gives.

        Args:
            inputs: ids, positions, window, first slot and commits as in `Pass`.
            taken: what the stage before gave.
        """
        ids, positions, window, first, commits = inputs
        count, rows = ids.shape
        read = self._ids.part(0, count, rows), self._starts.part(0, count), *(each.part(0, count) for each in self._commits)
        for buffer, array in zip(read, (ids, positions, *commits), strict=True):
            buffer.view()[...] = array
        for view, array in zip(passed(self._stage.takes, self._boundary, count, rows), taken, strict=True):
            view[...] = array
        key = count, rows, window, first
        if (launch := self._launches.get(key)) is None:
            logits = self._logits.part(0, count, 0, self._session.vocab_rows)
            pending = (read[2], read[3]) if commits else None
            bound = Pass(read[0], read[1], logits, window, first, commits=pending, boundary=self._boundary)
            launch = self._launches[key] = self._session.bind(bound)
        launch()
        return passed(self._stage.gives, self._boundary, count, rows)

    def call(self, method: str, *arguments: int) -> Any:
        """Call a method of the session."""
        if method == "pair_lone_rows":
            self._launches.clear()
        return getattr(self._session, method)(*arguments)


class Call(NamedTuple):
    """A call of an actor."""

    stage: str
    result: Any
    passes: bool  # whether it is part of a pass, so that only the next stage needs its result


class Chain:
    """The actors of consecutive stages, and their calls that were not waited for yet."""

    def __init__(self, actors: Mapping[str, Any], timeout: float):
        """Call these actors, by the names of their stages; `timeout` is in seconds, for a pass."""
        self._names, self._actors = [*actors], [*actors.values()]
        self._timeout = timeout
        self._calls: list[Call] = []
        self._failure: tuple[str, str] | None = None  # message and hint

    def submit(self, index: int, method: str, *arguments: Any) -> None:
        """Call an actor. An error appears in the next `wait`."""
        if self._failure is None:
            result = getattr(self._actors[index], method).remote(*arguments)
            self._calls.append(Call(self._names[index], result, method == "run"))

    def run(self, index: int, inputs: Any) -> None:
        """Call `StageHost.run` of an actor, with what the one before gave in the last call."""
        if self._failure is None:
            self.submit(index, "run", inputs, self._calls[-1].result if index else ())

    def wait(self, timeout: float | None = None, hint: str = AGAIN) -> Any:
        """Wait for all calls, and return the result of the last one. `hint` is for a call that is not answered in time.

        Raises:
            EngineError: a call failed, now or earlier, or took too long.
        """
        calls, self._calls = self._calls, []
        if self._failure is None:
            wanted = [call.result for call in calls if not call.passes or call is calls[-1]]
            try:
                return ray.get(wanted, timeout=timeout or self._timeout)[-1]
            except RayError:
                self._failure = _reason(calls, timeout or self._timeout, hint)
                for actor in self._actors:
                    ray.kill(actor)
        raise EngineError(*self._failure)


def _reason(calls: Sequence[Call], timeout: float, hint: str) -> tuple[str, str]:
    """Return why calls failed: the error of the first that failed, or else that one was not answered."""
    waiting = []
    for call in calls:
        if not ray.wait([call.result], timeout=0, fetch_local=False)[0]:
            waiting.append(call)
            continue
        try:
            ray.get(call.result)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, OutriderError):
                return f"{call.stage}: {cause}", cause.hint
            return f"{call.stage} failed: {type(cause).__name__}: {reason_of(cause)}", AGAIN
    return f"{waiting[0].stage} did not answer within {timeout:g} seconds", hint


class RemoteStage(Session):
    """A stage in an actor."""

    skips_logits = False
    recordable = False

    def __init__(self, chain: Chain, index: int, last: bool, sizes: Sizes):
        """Forward to an actor of a chain. After the `last` one, a pass waits for what it gives."""
        super().__init__(Cpu(), sizes)
        assert sizes.stage is not None
        self._chain, self._index = chain, index
        self._gives = sizes.stage.gives if last else []

    def bind(self, buffers: Pass) -> Launch:
        commits = [each.view() for each in buffers.commits or ()]
        inputs = buffers.input_ids.view(), buffers.positions.view(), buffers.window, buffers.first, commits
        given = passed(self._gives, buffers.boundary, *buffers.input_ids.shape)

        def launch() -> None:
            assert buffers  # keeps their memory alive for as long as the launch
            self._chain.run(self._index, inputs)
            if given:
                for view, array in zip(given, self._chain.wait(), strict=True):
                    view[...] = array

        return launch

    def _call(self, method: str, *arguments: int) -> None:
        self._chain.submit(self._index, "call", method, *arguments)

    def pair_lone_rows(self) -> None:
        self._call("pair_lone_rows")

    def share_features(self, target: Session) -> None:
        raise AssertionError("a target reads no features")

    def set_features(self, features: Floats) -> None:
        raise AssertionError("the last stage has the features")

    def clear(self, slot: int) -> None:
        self._call("clear", slot)

    def restart(self, slot: int) -> None:
        self._call("restart", slot)

    def copy(self, slot: int, to: int, length: int) -> None:
        self._call("copy", slot, to, length)

    def snapshot(self, slot: int, place: int) -> None:
        self._call("snapshot", slot, place)

    def restore(self, place: int, slot: int, position: int) -> None:
        self._call("restore", place, slot, position)

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        self._call("cache")
        found: dict[str, npt.NDArray[Any]] = self._chain.wait()
        return found


class RayStages:
    """Opens all stages of a target but the last in actors, in the cluster at `RAY_ADDRESS` or in a new one on this machine."""

    def __init__(self, cores: int = 1, device: str | None = None, passing: float = PASSING):
        """Open stages.

        Args:
            cores: of each stage.
            device: see `open_engines`.
            passing: the most seconds of a pass.
        """
        self._cores, self._device, self._passing = cores, device, passing

    def __call__(self, engines: Engines, sizes: Sequence[Sizes]) -> list[Session]:
        """Return a target's stages but the last; see `Engines.elsewhere`."""
        if not engines.device.synchronous:
            raise UsageError(
                f"stages in several processes run on CPUs only, not on {engines.device.name}",
                "use --device cpu, or leave --stage-cores out",
            )
        connect(len(sizes) * self._cores)
        options = {"num_cpus": self._cores, "scheduling_strategy": "SPREAD"}
        spans = [each.stage.layers for each in sizes if each.stage is not None]
        names = [f"stage {number} (layers {first}-{last})" for number, (first, last) in enumerate(spans, 1)]
        chain = Chain({name: ray.remote(**options)(StageHost).remote() for name in names}, self._passing)
        sealed, batch = seal(engines.manifest), sizes[0].batch
        for index in range(len(sizes)):
            chain.submit(index, "open", engines.folder, sealed, outrider.__version__, index, batch, self._device)
        chain.wait(OPENING, ROOM)
        return [RemoteStage(chain, index, index + 1 == len(sizes), each) for index, each in enumerate(sizes)]
