"""ONNX Runtime's engines: the exported graphs, fused where they compute the same."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import numpy as np

from outrider.backends.open import open_engines
from outrider.bundle.manifest import Build, Manifest, model_file
from outrider.engines.session import Engines
from outrider.errors import EngineError, OutriderWarning
from outrider.progress import Progress

MAX_FUSED = 64  # sequences of a batch; each has attention nodes of its own in every layer
# Of the largest logit: another order of the same sums, which rounded activations make more of.
FUSED_TOLERANCE = {"fp32": 1e-3, "fp16": 2e-2, "int8": 5e-2, "int4": 5e-2}


def package_version() -> str:
    """The release of ONNX Runtime that is installed.

    Raises:
        EngineError: none is.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError(f"onnxruntime cannot be imported: {error}", "pip install 'outrider[cpu]'") from error
    version: str = onnxruntime.__version__
    return version


def fuse_pair(source: Path, folder: Path, manifest: Manifest, build: Build, progress: Progress) -> dict[str, dict[str, int]]:
    """Put graphs with ONNX Runtime's own operators in the place of the exported ones, where they compute the same.

    Returns:
        for each model that was rewritten, how often each rewrite was made.
    """
    if build.device != "cpu" or build.batch > MAX_FUSED:
        return {}  # on CUDA the exported attention has fused kernels
    if any(model.precision == "bf16" for model in manifest.models.values()):
        return {}  # for which there are no kernels, as whoever opens them is told
    try:
        from outrider.backends.onnxruntime.fusion import fuse
    except ImportError as error:
        warnings.warn(
            f"the graphs stay as exported, which is slower: {error}; pip install 'outrider[build]' fuses them",
            OutriderWarning,
            stacklevel=2,
        )
        return {}
    from outrider.backends.onnxruntime.engine import optimize

    made = {}
    for role in manifest.roles:
        progress.stage(f"fusing the {role}")
        fused, final = folder / "fused" / "model.onnx", folder / "final" / model_file(role)
        for path in (fused, final):
            path.parent.mkdir(parents=True)
        try:
            done, left = fuse(source / model_file(role), fused, build.capacity, role == "target", build.batch)
            optimize(fused, final)
            shutil.rmtree(fused.parent)
            progress.stage(f"comparing the fused {role} with the exported one")
            reason = _differs(open_engines(source, manifest, build), open_engines(folder / "final", manifest, build), role)
        except (MemoryError, OSError):
            raise
        except Exception as error:  # rewriting raises whatever it meets in a graph that nobody has seen before
            reason = " ".join(str(error).split()) or type(error).__name__
        if reason is None:
            made[role] = done
            if left:
                said = f"{left[0]} of the {role} stays as exported, which is slower: {'; '.join(left[1:])}"
                warnings.warn(said, OutriderWarning, stacklevel=2)
            for name in (final.name, final.name + ".data"):
                (final.parent / name).replace(folder / role / name)
        else:
            warnings.warn(f"the {role} stays as exported, which is slower: {reason}", OutriderWarning, stacklevel=2)
        shutil.rmtree(fused.parent, ignore_errors=True)
        shutil.rmtree(folder / "final")
    return made


def _differs(plain: Engines, fused: Engines, role: str) -> str | None:
    """Why a fused graph may not stand for the exported one, if it may not."""
    build, model = plain.build, plain.manifest.models[role]
    sizes = [min(build.max_prompt_chunk, 16), 2, 1, build.k[-1] + 1]
    random = np.random.default_rng(0)
    passes, at = [], 0
    for rows in sizes:
        at = min(at, build.capacity - rows)
        # All sequences, each at a place of its own; then all but the first.
        places = np.array([max(at - 3 * sequence, 0) for sequence in range(build.batch)])
        for first in {0, min(1, build.batch - 1)}:
            ids = random.integers(0, model.vocab_rows, (build.batch - first, rows))
            passes.append((ids, places[first:], first))
        at += rows
    found = []
    for engines in (plain, fused):  # one model in memory at a time
        session = engines.session(role, build.batch)
        found.append([session.run(*each).copy() for each in passes])
        del session
    for want, got in zip(*found, strict=True):
        finite = np.isfinite(want)
        allowed = FUSED_TOLERANCE[model.precision] * max(1.0, float(np.abs(want[finite]).max(initial=0)))
        if (finite != np.isfinite(got)).any() or (np.abs(want[finite] - got[finite]) > allowed).any():
            return f"fused, its logits would differ by more than {allowed:.2g}"
    return None
