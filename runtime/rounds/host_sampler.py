"""Decisions that the host makes in a sampler's place, exactly and slowly."""

from __future__ import annotations

import numpy as np

from outrider.engines.arrays import Floats
from outrider.engines.device import Buffer
from outrider.engines.samplers import CANDIDATES, DECIDED, MORE_CANDIDATES
from outrider.errors import EngineError
from outrider.runtime.rounds import reference
from outrider.runtime.rounds.buffers import VERIFIER, Lane, RoundState, Shape
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.sampling import ACCEPTING, DRAFTING, DRAWING


def not_finite() -> EngineError:
    """Return the error for logits that contain NaN or infinity."""
    return EngineError(
        "the model's logits contain NaN or infinity",
        "check the checkpoint; an fp16 export may overflow where fp32 or bf16 does not",
    )


def resolve(launches: Launches, state: RoundState, at: int) -> int:
    """Decide for the lanes that the sampler of step `at` left undecided. If top_k or top_p reach beyond the candidates, the
    step is repeated with more of them. Lanes whose logits are not finite fail.

    Returns:
        the index of the next step to run.
    """
    shape, steps, synchronous = state.shape, launches.steps(state.shape), launches.device.synchronous
    row, status, drafter = steps[at].row, steps[at].status, launches.on_device(shape)
    assert status is not None
    if drafter is not None and drafter.overwritten and row != VERIFIER and not synchronous:
        for step in [step for step in steps[1:at] if step.status is None]:
            step.launch()
    for index in [index for index in state.active if status[index] not in (DECIDED, MORE_CANDIDATES)]:
        state.fail(index, not_finite())
        if row != VERIFIER:
            put_drafted(launches, row, shape, index, 0)  # any token will do for the later passes
    undecided = [index for index in state.active if status[index] == MORE_CANDIDATES]
    if undecided and shape.candidates < launches.max_candidates:
        larger = (size for size in CANDIDATES if shape.candidates < size)
        state.shape = shape._replace(candidates=min(next(larger, launches.vocab_rows), launches.max_candidates))
        return at
    for index in undecided:
        decide_on_host(launches, row, shape, index, state.lanes[index])
    return at + 1


def decide_on_host(launches: Launches, row: int, shape: Shape, index: int, lane: Lane) -> None:
    """Decide in float64 where a sampler's graph cannot, because TensorRT's TopK supports no more candidates. Only nearly flat
    distributions need this."""
    sampling, drafter = lane.sampling, launches.on_device(shape)
    assert sampling is not None
    settings = reference.named_settings(sampling.settings[0])
    edits = reference.edits_of(*sampling.table())
    drafted = drafted_tokens(launches, shape, index)
    if lane.proposed:
        settings |= {"exact_match": 1.0}
    if row == VERIFIER:
        count = lane.k
        uniforms = sampling.uniforms(sampling.emitted, count + 1)[:, ACCEPTING.start : DRAWING.stop]
        logits = launches.device.read(target_rows(launches, shape, index, shape.rows)).astype(np.float64)
        q = draft_probabilities(launches, shape, index, count).astype(np.float64)
        tokens = reference.verify(logits, drafted[:count], q, settings, uniforms, edits)
        put_verdict(launches, shape, index, tokens)
    else:
        assert drafter is not None
        p = reference.draft(drafter.logits(row, shape, index), launches.vocab_rows, settings, edits, drafted[:row])
        uniforms = sampling.uniforms(sampling.emitted + row, 1)[0, DRAWING if sampling.exact else DRAFTING]
        put_drafted(launches, row, shape, index, reference.draw(p, uniforms), p.astype(np.float32))


def drafted_tokens(launches: Launches, shape: Shape, lane: int) -> list[int]:
    """Return the drafted tokens of a lane, followed by unused entries."""
    proposed = launches.inputs.device["proposed"].part(0, shape.batch, shape.rows)
    matrix = proposed if launches.on_device(shape) is None else launches.drafted_matrix(shape)
    tokens: list[int] = launches.device.read(matrix)[lane].tolist()
    return tokens


def draft_probabilities(launches: Launches, shape: Shape, lane: int, count: int) -> Floats:
    """Return the drafter's distributions [count, V] of a lane's drafted tokens."""
    q: Floats = launches.device.read(launches.q.part(0, count, shape.batch, launches.vocab_rows))[:, lane]
    return q


def target_rows(launches: Launches, shape: Shape, lane: int, count: int) -> Buffer:
    """Return the buffer of the target's logits [count, V] of a lane's first rows."""
    return launches.target_logits.part(lane * shape.rows * launches.vocab_rows, count, launches.vocab_rows)


def put_drafted(launches: Launches, row: int, shape: Shape, lane: int, token: int, q: Floats | None = None) -> None:
    """Write a lane's drafted token, and the distribution [V] that it was drawn from."""
    if q is not None:
        at = (row * shape.batch + lane) * launches.vocab_rows
        launches.device.write(launches.q.part(at, 1, launches.vocab_rows), q)
    launches.device.write(launches.outputs.device["drafted"].part(lane * (launches.max_k + 1) + row, 1, 1), np.array(token))
    launches.device.write(launches.token(row, shape)[0].part(lane, 1, 1), np.array(token))
    launches.device.write(launches.outputs.device[f"status {row}"].part(lane, 1), np.array(DECIDED))


def put_verdict(launches: Launches, shape: Shape, lane: int, tokens: list[int]) -> None:
    """Write a lane's accepted tokens and the target's own."""
    padded = np.array([tokens + [-1] * (shape.rows - len(tokens))])
    launches.device.write(launches.outputs.device["tokens"].part(lane * shape.rows, 1, shape.rows), padded)
    launches.device.write(launches.outputs.device["accepted"].part(lane, 1), np.array(len(tokens) - 1))
    launches.device.write(launches.outputs.device["status"].part(lane, 1), np.array(DECIDED))
