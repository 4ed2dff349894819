"""One stage of a target in an actor of Ray, and the messages that stages pass on."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import ray
from cachetools import LRUCache
from ray.dag import DAGContext

import outrider
from outrider.backends.open import open_stage, read_bundle
from outrider.bundle.integrity import check_file, unchanged
from outrider.bundle.manifest import WEIGHTS, Manifest, step_file
from outrider.engines.arrays import Int64s
from outrider.engines.contract import Tensor
from outrider.engines.device import Buffer, Launch
from outrider.engines.session import MAX_BOUND, Pass
from outrider.engines.staged_session import boundary_buffers, crossing_layout
from outrider.errors import EngineError, OutriderError, reason_of
from outrider.progress import SILENT

AGAIN = "open the bundle again; Ray's logs have more (/tmp/ray/session_latest/logs)"
SPARE = 1 << 16  # bytes of a message beside the arrays of the largest pass
PassedOn = Sequence[npt.NDArray[Any]]
Call = tuple[str, tuple[Any, ...]]
"""A method of a session, and its arguments."""


class Crossing(NamedTuple):
    """A pass on its way through the stages."""

    calls: Sequence[Call]
    """what each session must do before the pass, in order"""
    ids: Int64s
    positions: Int64s
    window: int
    first: int
    commits: Sequence[Int64s]
    """as in `Pass`"""
    given: PassedOn = ()
    """what the last stage gave"""


def seal(manifest: Manifest) -> str:
    """Return what identifies a bundle: a digest of its manifest, which has the digests of all other files."""
    return hashlib.sha256(manifest.encode()).hexdigest()


def passed(tensors: Sequence[Tensor], boundary: Mapping[str, Buffer], count: int, rows: int) -> list[Buffer]:
    """Return the part of a boundary that a pass of `count` sequences with `rows` rows may use."""
    layout = crossing_layout(tensors, count, rows)
    return [boundary[name].part(0, *shape) for name, (shape, _) in layout.items()]


@contextmanager
def _named(stage: str) -> Iterator[None]:
    """Turn every error into one that names a stage."""
    try:
        yield
    except OutriderError as error:
        raise EngineError(f"{stage}: {error}", error.hint) from error
    except Exception as error:
        raise EngineError(f"{stage} failed: {type(error).__name__}: {reason_of(error)}", AGAIN) from error


def join(most: int) -> str:
    """Prepare the process of an actor for Ray's channels, with messages of `most` bytes, and return the id of its node."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # channels import it if they can; it takes 100 MB
    context = DAGContext.get_current()  # a channel that had to grow does not end when it is torn down
    context.buffer_size_bytes = max(context.buffer_size_bytes, most)
    return str(ray.get_runtime_context().get_node_id())


class StageHost:
    """One stage of a target, in an actor."""

    def __init__(self, name: str):
        """Wait to be opened. `name` is for errors."""
        self._name = name
        self._done = 0

    def open(self, index: int, folder: Path, sealed: str, release: str, batch: int, device: str | None) -> None:
        """Load a stage, with caches for `batch` sequences.

        Args:
            index: of the stage, from 0 on.
            folder: of the bundle, on this machine.
            sealed: the `seal` that it must have.
            release: of Outrider in the process that decodes.
            device: of all stages, or None for the one that the bundle names. The first GPU that this process sees is any.

        Raises:
            EngineError: the bundle or the release is another one, or the stage cannot be loaded.
        """
        with _named(self._name):
            if release != outrider.__version__:
                raise EngineError(
                    f"its process has outrider {outrider.__version__}, and the one that decodes has {release}",
                    "install the same release on every machine",
                )
            with unchanged(folder) as place:
                self._open(index, place, sealed, batch, device)

    def _open(self, index: int, place: Path, sealed: str, batch: int, device: str | None) -> None:
        manifest, build = read_bundle(place)
        if seal(manifest) != sealed:
            raise EngineError(f"its machine has another bundle at {place}", "copy the same bundle to every machine")
        files = [step_file("target", each) for each in build.stages[: index + 1]]  # a stage may use weights of earlier ones
        for name in (files[-1], *(file + WEIGHTS for file in files)):
            check_file(place, name, manifest.files[name], SILENT)
        engines = open_stage(place, manifest, build, index, device)
        sizes = engines.sizes("target", batch).of(engines.build.stages[index])
        self._session = engines.model("target", sizes)
        self._stage, self._device = build.stages[index], engines.device
        self._boundary = boundary_buffers(self._device, [*self._stage.takes, *self._stage.gives], sizes)
        self._ids = self._device.zeros((batch * sizes.max_rows,), "int64", "a pass")
        self._starts, *commits = (self._device.zeros((batch,), "int64", "a pass") for _ in range(3))
        self._commits = commits if sizes.recurrent else []
        self._logits = self._device.zeros((1,), "float32", "no logits")
        self._launches: LRUCache[tuple[int, ...], Launch] = LRUCache(MAX_BOUND)

    def join(self) -> str:
        """Call `join` for messages of the largest pass."""
        return join(sum(self._boundary[each.name].nbytes for each in self._stage.gives) + self._ids.nbytes + SPARE)

    def run(self, message: Crossing) -> Crossing:
        """Run a pass, and return it with what the stage gives."""
        calls, ids, positions, window, first, commits, given = message
        with _named(self._name):
            self._call(calls)
            count, rows = ids.shape
            read = self._ids.part(0, count, rows), self._starts.part(0, count), *(each.part(0, count) for each in self._commits)
            taken = passed(self._stage.takes, self._boundary, count, rows)
            for buffer, array in zip((*read, *taken), (ids, positions, *commits, *given), strict=True):
                self._device.write(buffer, array)
            key = count, rows, window, first
            if (launch := self._launches.get(key)) is None:
                logits = self._logits.part(0, count, 0, self._session.vocab_rows)
                pending = (read[2], read[3]) if commits else None
                bound = Pass(read[0], read[1], logits, window, first, commits=pending, boundary=self._boundary)
                launch = self._launches[key] = self._session.bind(bound)
            launch()
            given = [self._device.read(each) for each in passed(self._stage.gives, self._boundary, count, rows)]
        self._done += 1
        return message._replace(given=given)

    def call(self, message: bytes) -> bytes:
        """Do the same for a pickled message: Ray takes a quarter less time for a call with bytes than for one with arrays."""
        return pickle.dumps(self.run(pickle.loads(message)))

    def done(self) -> int:
        """Return the number of passes that this stage has run."""
        return self._done

    def cache(self, calls: Sequence[Call]) -> dict[str, npt.NDArray[Any]]:
        """Return `Session.cache` after these calls."""
        with _named(self._name):
            self._call(calls)
            found: dict[str, npt.NDArray[Any]] = self._session.cache()
            return found

    def _call(self, calls: Sequence[Call]) -> None:
        for method, arguments in calls:
            if method == "pair_lone_rows":
                self._launches.clear()
            getattr(self._session, method)(*arguments)
