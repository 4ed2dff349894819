"""Comparing engines with the exported graphs: those of a bundle at any time, and a rewritten model before it is sealed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from outrider.backends.base import Engines
from outrider.backends.onnxruntime.package import package_version
from outrider.bundle.manifest import Build, Manifest
from outrider.engines.arrays import Floats, Int64s
from outrider.engines.contract import CONTEXT, PAST_FEATURES
from outrider.engines.device import Cpu
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.engines.session import Session
from outrider.errors import EngineError

Pass = tuple[Int64s, Int64s, int]
"""Token ids [B, S], positions [B], and the first slot."""


def alike(engines: Engines, export: Path, manifest: Manifest) -> tuple[Engines, Engines, bool]:
    """Return engines, what they are compared with, and whether both do without rounding activations: both or neither does.

    Args:
        export: the folder of the exported graphs, which run on the CPU.
        manifest: the export's.

    Raises:
        EngineError: ONNX Runtime is not installed, or refuses the graphs.
    """
    reference, ours = _reference(export, manifest, engines.build), engines.unrounded()
    theirs = reference.unrounded()
    return (engines, reference, False) if ours is None or theirs is None else (ours, theirs, True)


def _reference(export: Path, manifest: Manifest, build: Build) -> Engines:
    """Return an export's own graphs on the CPU, which the engines of every backend are compared with."""
    package_version()
    from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines

    plain = msgspec.structs.replace(build, backend="onnxruntime", device="cpu", rewrites={})
    return OnnxRuntimeEngines(export, manifest, plain, Cpu())


def check_same(export: Path, engines: Engines, role: str) -> None:
    """Compare what one of `ROLES` computes with what the graph in the folder `export` does, over passes of every kind.

    A model of bf16 is not compared: the export runs on the CPU, where ONNX Runtime has no kernels for bf16.
    `outrider verify --engines` compares them on a GPU.

    Raises:
        EngineError: they differ by more than the precision's tolerance, or a model does not run.
    """
    manifest = engines.manifest
    model = manifest.models[role]
    if model.precision == "bf16":
        return
    ours, theirs, unrounded = alike(engines, export, manifest)
    tolerance = PRECISIONS[model.precision].unrounded if unrounded else PRECISIONS[model.precision].fusion
    expected, actual = (_results(each, role) for each in (theirs, ours))
    for want, got in zip(expected, actual, strict=True):
        finite = np.isfinite(want)
        allowed = tolerance * max(1.0, float(np.abs(want[finite]).max(initial=0)))
        if (finite != np.isfinite(got)).any() or (np.abs(want[finite] - got[finite]) > allowed).any():
            raise EngineError(
                f"rewritten, the results of the {role} would differ by more than {allowed:.2g}",
                "build the export with --backend onnxruntime, and report this",
            )


def _passes(build: Build, vocab_rows: int) -> list[Pass]:
    """Return passes of every kind: over all sequences, each at its own position, and over all but the first."""
    random = np.random.default_rng(0)
    passes: list[Pass] = []
    position = 0
    for rows in (min(build.max_prompt_chunk, 16), 2, 1, build.k[-1] + 1):
        position = min(position, build.capacity - rows)
        positions = np.array([max(position - 3 * sequence, 0) for sequence in range(build.batch)])
        firsts = {0, min(1, build.batch - 1)}
        passes += [(random.integers(0, vocab_rows, (build.batch - at, rows)), positions[at:], at) for at in firsts]
        position += rows
    return passes


def with_context(role: str, ids: Int64s) -> Int64s:
    """Return the ids of a pass; in one of a block head, the first half of the rows are those of a context."""
    if role == "block-head":
        ids[:, : ids.shape[1] // 2] = CONTEXT
    return ids


def give_features(session: Session, width: int | None) -> None:
    """Give random features to a draft head, the same each time."""
    if session.reads_features and width is not None:
        shape = session.batch, session.capacity, width
        session.set_features(np.random.default_rng(1).standard_normal(shape, dtype=np.float32))


def _results(engines: Engines, role: str) -> list[Floats]:
    """Return the logits of the passes on one model, which leaves memory then, and the features that it has written."""
    session = engines.session(role, engines.build.batch)  # first: a batch that has no room is refused
    give_features(session, engines.manifest.models[role].features)
    logits = []
    for ids, positions, first in _passes(engines.build, session.vocab_rows):
        ids = with_context(role, ids)
        session.assume(positions, first)
        logits.append(session.run(ids, positions, first).copy())
        count, rows = ids.shape
        if session.recurrence is None or not 1 < rows <= engines.build.k[-1] + 1:
            continue
        if int(positions.max()) + 2 + rows <= session.capacity:  # after a row that was confirmed, one that is accepted later
            session.assume(positions, first)
            session.run(ids, positions, first, certain=[1] * count)
            logits.append(session.run(ids, positions + 2, first, certain=[1] * count).copy())
    features = written_features(session, engines.manifest.models[role].precision)
    return logits if features is None else [*logits, features]


def written_features(session: Session, precision: str) -> Floats | None:
    """Return the features of a session's first slots, float32 [B, C, H]; None if it has none."""
    features = session.cache().get(PAST_FEATURES)
    return None if features is None else DTYPES[PRECISIONS[precision].dtype].decode(features[:, 0, : session.capacity])
