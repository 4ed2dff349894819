"""Compares engines with the exported graphs: rewritten models before a bundle is sealed, and a bundle's engines at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from outrider.backends.base import Engines, import_package
from outrider.backends.onnxruntime.package import EXTRA
from outrider.bundle.manifest import Build, Manifest
from outrider.engines.arrays import Floats, Int64s
from outrider.engines.contract import CONTEXT, PAST_FEATURES
from outrider.engines.device import Cpu
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.engines.session import Session
from outrider.errors import EngineError
from outrider.progress import SILENT, Progress

PassInputs = tuple[Int64s, Int64s, int]
"""Token ids [B, S], positions [B], and the first slot."""


def alike(engines: Engines, export: Path, manifest: Manifest) -> tuple[Engines, Engines, bool]:
    """Return engines and their reference, ONNX Runtime on the CPU. Either both round activations, or neither.

    Args:
        export: the folder of the exported graphs.
        manifest: the export's manifest.

    Returns:
        The engines, the reference, and whether neither rounds.

    Raises:
        EngineError: ONNX Runtime is not installed, or refuses the graphs.
    """
    import_package("onnxruntime", EXTRA)
    from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines

    plain = msgspec.structs.replace(engines.build, backend="onnxruntime", device="cpu", rewrites={}, stages=[])
    reference, ours = OnnxRuntimeEngines(export, manifest, plain, Cpu()), engines.unrounded()
    theirs = reference.unrounded()
    others = {name: found for name, each in engines.others.items() if (found := each.unrounded()) is not None}
    if ours is None or theirs is None or len(others) < len(engines.others):
        return engines, reference, False
    ours.others = others
    return ours, theirs, True


def largest(values: npt.NDArray[Any]) -> float:
    """Return the largest finite magnitude, at least 1: tolerances of logits are relative to it."""
    return max(1.0, float(np.abs(values[np.isfinite(values)]).max(initial=0)))


def difference(want: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    """Return the largest difference: 0 between equal infinities, infinity if only one side is NaN or infinite."""
    distance = np.subtract(want, got, out=np.zeros_like(want), where=want != got)
    return float(np.nan_to_num(np.abs(distance), nan=np.inf).max())


def check_same(export: Path, engines: Engines, role: str, progress: Progress = SILENT) -> None:
    """Check that the model of one of `ROLES` computes the same as its graph in the folder `export`, over all kinds of passes.

    It advances by 1 for each of `passes_of_check`.

    A bf16 model is not compared: the export runs on the CPU, where ONNX Runtime has no bf16 kernels. Use
    `outrider verify --engines` on a GPU.

    Raises:
        EngineError: they differ by more than the precision's tolerance, or a model does not run.
    """
    manifest = engines.manifest
    model = manifest.models[role]
    if model.precision == "bf16":
        return
    ours, theirs, unrounded = alike(engines, export, manifest)
    tolerance = PRECISIONS[model.precision].unrounded if unrounded else PRECISIONS[model.precision].fusion
    expected, actual = (_results(each, role, progress) for each in (theirs, ours))
    for want, got in zip(expected, actual, strict=True):
        allowed = tolerance * largest(want)
        if not difference(want, got) <= allowed:
            other = "without --stages" if engines.build.stages_of(role) else "with --backend onnxruntime"
            raise EngineError(
                f"the rewritten {role}'s results would differ by more than {allowed:.2g}",
                f"build the export {other}, and report this",
            )


def passes_of_check(build: Build) -> int:
    """Return how many passes `check_same` runs on both sides together, without the additional ones of recurrent layers."""
    return 2 * len(_passes(build, 1))


def _passes(build: Build, vocab_rows: int) -> list[PassInputs]:
    """Return passes of every kind: over all sequences, each at its own position, and over all but the first."""
    random = np.random.default_rng(0)
    passes: list[PassInputs] = []
    position = 0
    for rows in (min(build.max_prompt_chunk, 16), 2, 1, build.k[-1] + 1):
        position = min(position, build.capacity - rows)
        positions = np.array([max(position - 3 * sequence, 0) for sequence in range(build.batch)])
        firsts = {0, min(1, build.batch - 1)}
        passes += [(random.integers(0, vocab_rows, (build.batch - at, rows)), positions[at:], at) for at in firsts]
        position += rows
    return passes


def with_context(role: str, ids: Int64s) -> Int64s:
    """Return the ids of a pass. For a block head, the first half of the rows becomes context."""
    if role == "block-head":
        ids[:, : ids.shape[1] // 2] = CONTEXT
    return ids


def give_features(session: Session, width: int | None) -> None:
    """Give a draft head random features, the same each time."""
    if session.reads_features and width is not None:
        shape = session.batch, session.capacity, width
        session.set_features(np.random.default_rng(1).standard_normal(shape, dtype=np.float32))


def _results(engines: Engines, role: str, progress: Progress) -> list[Floats]:
    """Return the logits of all passes on one model, and the features that it has written. The model leaves memory then."""
    session = engines.session(role, engines.build.batch)  # first: a batch that has no room is refused
    give_features(session, engines.manifest.models[role].features)
    logits = []
    for ids, positions, first in _passes(engines.build, session.vocab_rows):
        ids = with_context(role, ids)
        session.assume(positions, first)
        logits.append(session.run(ids, positions, first).copy())
        progress.advance(1)
        count, rows = ids.shape
        if session.recurrence is None or not 1 < rows <= engines.build.k[-1] + 1:
            continue
        if int(positions.max()) + 2 + rows <= session.capacity:  # after a confirmed row and one that is accepted later
            session.assume(positions, first)
            session.run(ids, positions, first, certain=[1] * count)
            logits.append(session.run(ids, positions + 2, first, certain=[1] * count).copy())
    features = written_features(session, engines.manifest.models[role].precision)
    return logits if features is None else [*logits, features]


def written_features(session: Session, precision: str) -> Floats | None:
    """Return the features of a session's slots, float32 [B, C, H]; None if it has none."""
    features = session.cache().get(PAST_FEATURES)
    return None if features is None else DTYPES[PRECISIONS[precision].dtype].decode(features[:, 0, : session.capacity])
