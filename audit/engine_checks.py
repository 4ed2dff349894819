"""`outrider verify --engines`: a bundle's engines compared with ONNX Runtime on the CPU, from the same inputs.

Polygraphy's comparator is not used. It runs TensorRT and ONNX Runtime by runners of its own, one pass at a time, and compares
numbers. Here every backend runs through the sessions that serve requests, each pass reads what the passes before it left in the
cache, and of samplers it is the choices that are compared: rounding may turn one where two tokens are nearly as likely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.backends.base import Engines, required_rows
from outrider.backends.comparison import alike, give_features, with_context, written_features
from outrider.bundle.folder import check_files, read_manifest
from outrider.bundle.manifest import Model, model_file
from outrider.engines.arrays import Floats
from outrider.engines.contract import BLOCK_STATE, CANDIDATES, DRAFT_SAMPLERS, MARKOV, SETTINGS, sampler_tensors
from outrider.engines.device import Device, Engine, host_buffer
from outrider.engines.precisions import PRECISIONS
from outrider.engines.session import Session
from outrider.errors import FolderError
from outrider.progress import SILENT, Progress

SAMPLER_TOLERANCE = 1e-3  # of probabilities and logprobs, all computed in fp32
SAME_CHOICES = 0.95  # choices that must be the same; rounding decides a few, at the edge of a nucleus or between two tokens
CASES = 40  # random inputs for each shape of a sampler
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Compared:
    """One engine in one of its shapes."""

    engine: str
    rows: int
    difference: float  # the largest, of logits, features, probabilities or logprobs
    tolerance: float
    same_choices: float  # share of equal choices: a row's most likely token, a drafted token, a verdict, near features

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance and self.same_choices >= SAME_CHOICES  # NaN fails

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the verdict, for JSON."""
        return asdict(self) | {"passed": self.passed}


def compare_engines(engines: Engines, export: Path, progress: Progress = SILENT) -> Iterator[Compared]:
    """Compare every engine of a bundle, with every number of rows that it is built for, with the graphs of `export`.

    One sequence is run, over at most 256 positions. The export may be of another precision than the engines, because ONNX
    Runtime's CPU provider has no kernels for bf16.

    Raises:
        FolderError: the export is damaged, or of other models.
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
    for role in engines.manifest.roles:
        progress.stage(f"comparing the {role}")
        precision = PRECISIONS[engines.manifest.models[role].precision]
        tolerance = precision.unrounded if unrounded else precision.comparison
        sessions = engines.session(role, batch=1), reference.session(role, batch=1)
        for session in sessions:
            give_features(session, engines.manifest.models[role].features)
        for rows in sorted({*required_rows(role, build), build.max_prompt_chunk}):
            if rows > build.capacity:
                continue
            yield _step(role, rows, tolerance, *sessions, drafted=build.k[-1])
        precisions = (each.models[role].precision for each in (engines.manifest, manifest))
        got, want = (written_features(*each) for each in zip(sessions, precisions, strict=True))
        if got is not None and want is not None:
            yield _features(role, build.max_prompt_chunk, tolerance, got, want)
        del sessions  # one model in memory at a time
    for name in engines.manifest.samplers:
        progress.stage(f"comparing the {name}")
        samplers = engines.sampler(name), reference.sampler(name)
        if name == MARKOV:
            model = engines.manifest.models["block-head"]
            precision = PRECISIONS[model.precision]
            yield _markov(model, precision.unrounded if unrounded else precision.comparison, engines, reference, *samplers)
            continue
        for rows in sorted(required_rows(name, build)):
            yield _sampler(name, rows, engines, reference, *samplers)


def _step(role: str, rows: int, tolerance: float, ours: Session, theirs: Session, drafted: int) -> Compared:
    """Run passes of `rows` rows, one after another, over the whole capacity.

    Recurrent layers get passes of up to `drafted` + 1 rows as in rounds: one row is confirmed, and of those behind it one is
    accepted.
    """
    random = np.random.default_rng(rows)
    difference, largest, same = 0.0, 1.0, []
    verifies = ours.recurrence is not None and 1 < rows <= drafted + 1
    certain = [1] if verifies else None
    for at in range(0, min(ours.capacity - rows, 256) + 1, 2 if verifies else rows):
        ids = with_context(role, random.integers(0, ours.vocab_rows, (1, rows)))
        want, got = (session.run(ids, np.array([at]), certain=certain).copy() for session in (theirs, ours))
        distance = np.abs(want - got, out=np.zeros_like(want), where=want != got)  # a short head has minus infinity in both
        difference = max(difference, float(np.nan_to_num(distance, nan=np.inf).max()))
        largest = max(largest, float(np.abs(want[np.isfinite(want)]).max()))
        gap = np.take_along_axis(want, got.argmax(-1)[..., None], -1)[..., 0] - want.max(-1)
        same.append((np.abs(gap) <= 2 * tolerance * largest).mean())  # a near-tie counts as the same choice
    return Compared(role, rows, difference, tolerance * largest, float(np.mean(same)))


def _features(role: str, rows: int, tolerance: float, got: Floats, want: Floats) -> Compared:
    """Compare the features [B, C, H] that the last passes, of so many rows, have left."""
    difference, largest = float(np.nan_to_num(np.abs(want - got), nan=np.inf).max()), max(1.0, float(np.abs(want).max()))
    near = (np.abs(want - got).max(-1) <= tolerance * largest).mean()
    return Compared(f"{role}'s features", rows, difference, tolerance * largest, float(near))


def _sampler(name: str, rows: int, ours: Engines, theirs: Engines, our_engine: Engine, their_engine: Engine) -> Compared:
    """Run random rounds."""
    vocab_rows = ours.manifest.vocab_rows
    difference, same = 0.0, []
    for seed in range(CASES):
        inputs = _inputs(name, rows, ours.build.k[-1] + 1, vocab_rows, np.random.default_rng(seed))
        want = run_sampler(theirs.device, their_engine, name, inputs, vocab_rows)
        got = run_sampler(ours.device, our_engine, name, inputs, vocab_rows)
        choices = next(each for each in ("token", "tokens", "top_ids") if each in want)
        equal = bool((want[choices] == got[choices]).all() and (want.get("status") == got.get("status")))
        same.append(equal)
        for each in {"q", "logprobs", "top_logprobs"} & want.keys():
            if equal or each == "logprobs":
                difference = max(difference, float(np.nan_to_num(np.abs(want[each] - got[each]), nan=np.inf).max()))
    return Compared(name, rows, difference, SAMPLER_TOLERANCE, float(np.mean(same)))


def _markov(
    model: Model, tolerance: float, ours: Engines, theirs: Engines, our_engine: Engine, their_engine: Engine
) -> Compared:
    """Run random rows."""
    assert model.block_state is not None
    difference, largest, same = 0.0, 1.0, []
    for seed in range(CASES):
        random = np.random.default_rng(seed)
        inputs: Arrays = {
            "logits": (6 * random.standard_normal((1, 1, model.vocab_rows))).astype(np.float32),
            BLOCK_STATE: random.standard_normal((1, 1, model.block_state)).astype(np.float32),
            "before": random.integers(0, model.vocab_rows, (1, 1)),
        }
        want = run_sampler(theirs.device, their_engine, MARKOV, inputs, model.vocab_rows, model.block_state)
        got = run_sampler(ours.device, our_engine, MARKOV, inputs, model.vocab_rows, model.block_state)
        largest = max(largest, float(np.abs(want["biased"][np.isfinite(want["biased"])]).max()))
        same.append(bool(want["biased"].argmax() == got["biased"].argmax()))
        for each, values in want.items():  # of the tokens that are not proposed, minus infinity in both
            distance = np.abs(values - got[each], out=np.zeros_like(values), where=values != got[each])
            difference = max(difference, float(np.nan_to_num(distance, nan=np.inf).max()))
    return Compared(MARKOV, 1, difference, tolerance * largest, float(np.mean(same)))


def _inputs(name: str, rows: int, max_rows: int, vocab_rows: int, random: np.random.Generator) -> Arrays:
    """Return a random round of one sequence, as the tensors of one sampler."""
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
    drafted = random.integers(0, vocab_rows, (1, max_rows if name == "drafter" else rows))
    if name not in DRAFT_SAMPLERS:
        drafted = np.where(random.random((1, rows)) < 0.7, logits.argmax(-1), drafted)  # so that some are accepted
    return {
        "logits": logits,
        "drafted": drafted,
        "drafted_count": np.array([count]),
        "first_row": np.array([count]),
        "q": q / q.sum(axis=2, keepdims=True),
        "settings": np.array([list(settings.values())], dtype=np.float32),
        "edit_ids": random.integers(0, vocab_rows, (1, 1)),
        "edits": np.array([[[1.5, 1, 1, 0]]], dtype=np.float32),
        "uniforms": random.random((1, 2) if name == "drafter" else (1, rows, 3), dtype=np.float32),
        "tokens": random.integers(0, vocab_rows, (1, rows)),
        "candidates": np.array([5 if name == "logprobs" else min(CANDIDATES[0], vocab_rows)]),
    }


def run_sampler(
    device: Device, engine: Engine, name: str, inputs: Arrays, vocab_rows: int, block_state: int | None = None
) -> Arrays:
    """Run a sampler once from host arrays, and return its outputs by name."""
    tensors, outputs = sampler_tensors(name, vocab_rows, block_state)
    sizes = {"batch": 1, "rows": inputs["logits"].shape[1], "top": int(inputs.get("candidates", [1])[0])}
    buffers = {}
    for each in tensors:
        values = np.ascontiguousarray(inputs[each.name], dtype=each.dtype)
        if each.name == "candidates":
            buffers[each.name] = host_buffer(values)
            continue
        buffers[each.name] = device.zeros(values.shape, each.dtype, "a comparison")
        device.write(buffers[each.name], values)
    for each in outputs:
        shape = tuple(size if isinstance(size, int) else sizes[size] for size in each.shape)
        buffers[each.name] = device.zeros(shape, each.dtype, "a comparison")
    engine.bind(buffers)()
    return {each.name: device.read(buffers[each.name]).copy() for each in outputs}
