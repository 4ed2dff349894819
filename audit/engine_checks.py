"""`outrider verify --engines`: compares a bundle's engines with ONNX Runtime on the CPU, on the same inputs.

This does not use Polygraphy's comparator, which runs TensorRT and ONNX Runtime in its own runners, one pass at a time, and
compares numbers. Here every backend runs in the sessions that serve requests, and each pass reads the cache that earlier passes
wrote. For samplers, the choices are compared: rounding may change a choice between two tokens that are about equally likely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.backends.base import Engines, required_rows
from outrider.backends.comparison import alike, difference, give_features, largest, with_context, written_features
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.bundle.manifest import Model, model_file
from outrider.engines.arrays import Floats
from outrider.engines.contract import BLOCK_STATE
from outrider.engines.device import Device, Engine
from outrider.engines.precisions import PRECISIONS
from outrider.engines.samplers import CANDIDATES, DRAFT_SAMPLERS, FORBIDDEN, MARKOV, SETTINGS, sampler_buffers, sampler_tensors
from outrider.engines.session import Session
from outrider.errors import FolderError
from outrider.progress import SILENT, Progress

SAMPLER_TOLERANCE = 1e-3  # of probabilities and logprobs, which are all computed in fp32
SAME_CHOICES = 0.95  # share of choices that must be equal; rounding changes a few, at a nucleus's edge or between two tokens
CASES = 40  # random inputs for each shape of a sampler
Arrays = dict[str, npt.NDArray[Any]]
Side = tuple[Device, Engine]


@dataclass(frozen=True, slots=True)
class Compared:
    """One engine in one of its shapes."""

    engine: str
    rows: int
    difference: float  # the largest, of logits, features, probabilities or logprobs
    tolerance: float
    same_choices: float  # share of equal choices: most likely tokens, drafted tokens, verdicts, close features

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance and self.same_choices >= SAME_CHOICES  # NaN fails

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the verdict, for JSON."""
        return asdict(self) | {"passed": self.passed}


def compare_engines(engines: Engines, export: Path, progress: Progress = SILENT) -> Iterator[Compared]:
    """Compare every engine of a bundle with the graphs of `export`, for every number of rows that the engine is built for.

    The comparison runs one sequence, over at most 256 positions. The export may have another precision than the engines,
    because ONNX Runtime's CPU provider has no bf16 kernels.

    Raises:
        FolderError: the export is damaged, or has other models.
        EngineError: a run failed.
    """
    manifest, build = read_manifest(export), engines.build
    for role in engines.manifest.roles:
        if model_file(role) not in manifest.files:
            raise FolderError(f"{export} has no graphs to compare with", "pass the folder that outrider export wrote")
        ours, theirs = engines.manifest.models[role], manifest.models[role]
        if (ours.source, ours.layers, ours.vocab_rows) != (theirs.source, theirs.layers, theirs.vocab_rows):
            raise FolderError(
                f"{export} is not an export of the bundle's {role}", "pass the export that the bundle was built from"
            )
    check_files(export, manifest, progress)
    engines, reference, unrounded = alike(engines, export, manifest)
    tolerances = {
        role: PRECISIONS[model.precision].unrounded if unrounded else PRECISIONS[model.precision].comparison
        for role, model in engines.manifest.models.items()
    }
    for role in engines.manifest.roles:
        sizes = [rows for rows in sorted({*required_rows(role, build), build.max_prompt_chunk}) if rows <= build.capacity]
        progress.stage(f"comparing the {role}", len(sizes))
        sessions = engines.session(role, batch=1), reference.session(role, batch=1)
        for session in sessions:
            give_features(session, engines.manifest.models[role].features)
        for rows in sizes:
            yield _step(role, rows, tolerances[role], *sessions, drafted=build.k[-1])
            progress.advance(1)
        precisions = (each.models[role].precision for each in (engines.manifest, manifest))
        got, want = (written_features(*each) for each in zip(sessions, precisions, strict=True))
        if got is not None and want is not None:
            yield _features(role, build.max_prompt_chunk, tolerances[role], got, want)
        del sessions  # one model in memory at a time
    for name in engines.manifest.samplers:
        sides = (engines.device, engines.sampler(name)), (reference.device, reference.sampler(name))
        if name == MARKOV:
            progress.stage(f"comparing the {name}")
            yield _markov(engines.manifest.models["block-head"], tolerances["block-head"], *sides)
            continue
        progress.stage(f"comparing the {name}", len(required_rows(name, build)))
        for rows in sorted(required_rows(name, build)):
            yield _sampler(name, rows, build.k[-1] + 1, engines.manifest.vocab_rows, *sides)
            progress.advance(1)


def _step(role: str, rows: int, tolerance: float, ours: Session, theirs: Session, drafted: int) -> Compared:
    """Run passes of `rows` rows, one after another, over the whole capacity.

    With recurrent layers, passes of up to `drafted` + 1 rows run as in rounds: the first row is confirmed, and one of the other
    rows is accepted.
    """
    random = np.random.default_rng(rows)
    distance, scale, same = 0.0, 1.0, []
    verifies = ours.recurrence is not None and 1 < rows <= drafted + 1
    certain = [1] if verifies else None
    for at in range(0, min(ours.capacity - rows, 256) + 1, 2 if verifies else rows):
        ids = with_context(role, random.integers(0, ours.vocab_rows, (1, rows)))
        want, got = (session.run(ids, np.array([at]), certain=certain).copy() for session in (theirs, ours))
        distance, scale = max(distance, difference(want, got)), max(scale, largest(want))
        gap = np.take_along_axis(want, got.argmax(-1)[..., None], -1)[..., 0] - want.max(-1)
        same.append((np.abs(gap) <= 2 * tolerance * scale).mean())  # a near-tie counts as the same choice
    return Compared(role, rows, distance, tolerance * scale, float(np.mean(same)))


def _features(role: str, rows: int, tolerance: float, got: Floats, want: Floats) -> Compared:
    """Compare the features [B, C, H] that the last passes, which had `rows` rows, have written."""
    allowed = tolerance * largest(want)
    near = (np.abs(want - got).max(-1) <= allowed).mean()
    return Compared(f"{role}'s features", rows, difference(want, got), allowed, float(near))


def _sampler(name: str, rows: int, max_rows: int, vocab_rows: int, ours: Side, theirs: Side) -> Compared:
    """Run random rounds."""
    distance, same = 0.0, []
    for seed in range(CASES):
        inputs = _inputs(name, rows, max_rows, vocab_rows, np.random.default_rng(seed))
        want, got = (_run_sampler(*side, name, inputs, vocab_rows) for side in (theirs, ours))
        choices = next(each for each in ("token", "tokens", "top_ids") if each in want)
        counted = want["top_logprobs"] > FORBIDDEN if name == "logprobs" else slice(None)
        equal = bool((want[choices] == got[choices])[counted].all() and (want.get("status") == got.get("status")))
        same.append(equal)
        for each in {"q", "logprobs", "top_logprobs"} & want.keys():
            if equal or each == "logprobs":
                distance = max(distance, difference(want[each], got[each]))
    return Compared(name, rows, distance, SAMPLER_TOLERANCE, float(np.mean(same)))


def _markov(model: Model, tolerance: float, ours: Side, theirs: Side) -> Compared:
    """Run random rows."""
    assert model.block_state is not None
    distance, scale, same = 0.0, 1.0, []
    for seed in range(CASES):
        random = np.random.default_rng(seed)
        inputs: Arrays = {
            "logits": (6 * random.standard_normal((1, 1, model.vocab_rows))).astype(np.float32),
            BLOCK_STATE: random.standard_normal((1, 1, model.block_state)).astype(np.float32),
            "before": random.integers(0, model.vocab_rows, (1, 1)),
        }
        sizes = model.vocab_rows, model.block_state
        want, got = (_run_sampler(*side, MARKOV, inputs, *sizes) for side in (theirs, ours))
        scale = max(scale, largest(want["biased"]))
        same.append(bool(want["biased"].argmax() == got["biased"].argmax()))
        distance = max(distance, *(difference(values, got[each]) for each, values in want.items()))
    return Compared(MARKOV, 1, distance, tolerance * scale, float(np.mean(same)))


def _inputs(name: str, rows: int, max_rows: int, vocab_rows: int, random: np.random.Generator) -> Arrays:
    """Return the inputs of a sampler in a random round of one sequence. Some are for other samplers only."""
    temperature = random.choice([0.0, 0.7, 1.0])
    q = random.random((rows, 1, vocab_rows), dtype=np.float32) ** 8
    settings = dict.fromkeys(SETTINGS, 0.0) | {
        "temperature": temperature,
        "top_k": random.choice([0, 40]) if temperature else 0,
        "top_p": random.choice([0.9, 1.0]) if temperature else 1,
        "repetition_penalty": random.choice([1.0, 1.2]),
        "exact_match": random.integers(2),
    }
    count = int(random.integers(0, rows))
    logits = (6 * random.standard_normal((1, rows, vocab_rows))).astype(np.float32)
    drafted = random.integers(0, vocab_rows, (1, max_rows if name == "draft_sampler" else rows))
    if name not in DRAFT_SAMPLERS:
        drafted = np.where(random.random((1, rows)) < 0.7, logits.argmax(-1), drafted)  # so that many are accepted
    tokens = random.integers(0, vocab_rows, (1, rows))
    if name == "logprobs" and random.integers(2):  # a grammar allows three tokens
        logits, tokens = np.where(logits < np.sort(logits)[..., -3:-2], np.float32(-np.inf), logits), logits.argmax(-1)
    return {
        "logits": logits,
        "drafted": drafted,
        "drafted_count": np.array([count]),
        "first_row": np.array([count]),
        "q": q / q.sum(axis=2, keepdims=True),
        "settings": np.array([list(settings.values())], dtype=np.float32),
        "edit_ids": random.integers(0, vocab_rows, (1, 1)),
        "edits": np.array([[[1.5, 1, 1, 0]]], dtype=np.float32),
        "uniforms": random.random((1, 2) if name == "draft_sampler" else (1, rows, 3), dtype=np.float32),
        "tokens": tokens,
        "candidates": np.array([5 if name == "logprobs" else min(CANDIDATES[0], vocab_rows)]),
    }


def _run_sampler(
    device: Device, engine: Engine, name: str, inputs: Arrays, vocab_rows: int, block_state: int | None = None
) -> Arrays:
    """Run a sampler once on host arrays, and return its outputs by name."""
    tensors, outputs = sampler_tensors(name, vocab_rows, block_state)
    candidates, rows = inputs.get("candidates", np.ones(1)), inputs.get("drafted", inputs["logits"]).shape[1]
    sizes = {"batch": 1, "rows": rows, "edits": 1, "top": int(candidates[0])}
    buffers = sampler_buffers(device, name, sizes, vocab_rows, block_state)
    for each in [each.name for each in tensors]:
        if each == "candidates":
            buffers[each].view()[...] = candidates
        else:
            device.write(buffers[each], inputs[each])
    engine.bind(buffers)()
    return {each.name: device.read(buffers[each.name]).copy() for each in outputs}
