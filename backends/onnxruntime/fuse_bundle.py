"""Replaces the exported graphs of a bundle by fused ones, where those compute the same."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np

from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines, optimize
from outrider.bundle.manifest import Build, Manifest, model_file
from outrider.engines.arrays import Floats, Int64s
from outrider.engines.device import Cpu
from outrider.engines.precisions import PRECISIONS
from outrider.errors import OutriderWarning
from outrider.progress import Progress

MAX_FUSED = 64  # sequences of a batch; each has its own attention nodes in every layer

Pass = tuple[Int64s, Int64s, int]
"""Token ids [B, S], positions [B], and the first slot."""


def fuse_bundle(source: Path, folder: Path, manifest: Manifest, build: Build, progress: Progress) -> dict[str, dict[str, int]]:
    """Replace graphs in `folder` by ones with ONNX Runtime's own operators, where they compute the same as those in `source`.

    Returns:
        For each model that was rewritten, how often each rewrite was applied.
    """
    on_cpu = build.device == "cpu"
    precisions = {model.precision for model in manifest.models.values()}
    if on_cpu and ("bf16" in precisions or build.batch > MAX_FUSED):
        return {}  # the CPU has no kernels for bf16, which opening the engines reports
    if not on_cpu and not precisions <= {"fp16", "bf16"}:
        return {}  # FlashAttention is for these
    try:
        import outrider.backends.onnxruntime.fusion.fuse  # noqa: F401
    except ImportError as error:
        _warn(f"the graphs stay as exported, which is slower: {error}; pip install 'outrider[build]' fuses them")
        return {}
    counts = {}
    for role in manifest.roles:
        try:
            counts[role] = _fuse(source, folder, manifest, build, role, progress)
        except (MemoryError, OSError):
            raise
        except Exception as error:  # a rewrite may raise anything when it meets a graph of a new kind
            reason = " ".join(str(error).split()) or type(error).__name__
            _warn(f"the {role} stays as exported, which is slower: {reason}")
        finally:
            shutil.rmtree(folder / "fused", ignore_errors=True)
            shutil.rmtree(folder / "final", ignore_errors=True)
    return counts


class _Different(Exception):
    """A fused graph does not compute what the exported one does."""


def _fuse(source: Path, folder: Path, manifest: Manifest, build: Build, role: str, progress: Progress) -> dict[str, int]:
    """Fuse one model, compare it with the exported one, and put it in its place."""
    from outrider.backends.onnxruntime.fusion.causal import without_masks
    from outrider.backends.onnxruntime.fusion.fuse import fuse

    progress.stage(f"fusing the {role}")
    fused, final = folder / "fused" / "model.onnx", folder / "final" / model_file(role)
    for path in (fused, final):
        path.parent.mkdir(parents=True)
    left_out: list[str] = []
    if build.device == "cpu":
        counts, left_out = fuse(source / model_file(role), fused, build.capacity, role == "target", build.batch)
        optimize(fused, final)
    else:
        counts = without_masks(source / model_file(role), final)
        if not counts:
            return {}
    shutil.rmtree(fused.parent)
    if manifest.models[role].precision != "bf16":  # the CPU has no kernels for it; `outrider verify --engines` compares on CUDA
        progress.stage(f"comparing the fused {role} with the exported one")
        plain = OnnxRuntimeEngines(source, manifest, build, Cpu())
        _compare(plain, OnnxRuntimeEngines(folder / "final", manifest, build, Cpu()), role)
    if left_out:
        _warn(f"{left_out[0]} of the {role} stays as exported, which is slower: {'; '.join(left_out[1:])}")
    for name in (final.name, final.name + ".data"):
        (final.parent / name).replace(folder / role / name)
    return counts


def _compare(plain: OnnxRuntimeEngines, fused: OnnxRuntimeEngines, role: str) -> None:
    """Raise `_Different` where the logits of the two graphs differ by more than the tolerance."""
    model = plain.manifest.models[role]
    passes = _passes(plain.build, model.vocab_rows)
    expected, actual = (_logits(engines, role, passes) for engines in (plain, fused))
    for want, got in zip(expected, actual, strict=True):
        finite = np.isfinite(want)
        allowed = PRECISIONS[model.precision].fusion * max(1.0, float(np.abs(want[finite]).max(initial=0)))
        if (finite != np.isfinite(got)).any() or (np.abs(want[finite] - got[finite]) > allowed).any():
            raise _Different(f"fused, its logits would differ by more than {allowed:.2g}")


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


def _logits(engines: OnnxRuntimeEngines, role: str, passes: list[Pass]) -> list[Floats]:
    """Run the passes on one model, which leaves memory when this returns."""
    session = engines.session(role, engines.build.batch)
    return [session.run(*each).copy() for each in passes]


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=2)
