"""The sampler's arithmetic as in a textbook: float64 NumPy, row by row, without graphs and backends.

Tests and the audit compare the graphs with it, and a round falls back to it where a backend's graph cannot decide. With a
`Fault` it is one of the audit's negative controls.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from outrider.engines.arrays import Doubles
from outrider.engines.samplers import BLOCK, SETTINGS

TOLERANCE = 2e-4  # relative error of fp32 in a running sum over a whole vocabulary


class Fault(Enum):
    """One wrong line each. All of them change the emitted tokens."""

    ALWAYS_ACCEPT = "always accept"
    INVERTED_RATIO = "accept with p/q inverted"
    RESIDUAL_NOT_SUBTRACTED = "residual not subtracted"
    TARGET_NOT_TRUNCATED = "truncation applied to the draft alone"


@dataclass(frozen=True, slots=True)
class Edit:
    """The edits of one token's logit; see `contract.EDITS`."""

    bias: float = 0.0
    count: int = 0
    seen: bool = False
    banned_rows: int = 0


def edit(logits: Doubles, settings: dict[str, float], edits: dict[int, Edit], prefix: list[int], row: int) -> Doubles:
    """Return logits [V] with bias, ban and penalties, in a row after the drafted `prefix`."""
    out = logits.copy()
    for token in edits.keys() | set(prefix):
        known = edits.get(token, Edit())
        count = known.count + prefix.count(token)
        x = out[token] + known.bias
        if row < known.banned_rows:
            x = -np.inf
        if known.seen or count > 0:
            x = x / settings["repetition_penalty"] if x > 0 else x * settings["repetition_penalty"]
        out[token] = x - settings["frequency_penalty"] * count - settings["presence_penalty"] * (count > 0)
    return out


def warp(logits: Doubles, settings: dict[str, float]) -> Doubles:
    """Return the probabilities [V] from which the next token is drawn."""
    if settings["temperature"] == 0:
        one_hot = np.zeros(len(logits))
        one_hot[logits.argmax()] = 1
        return one_hot
    with np.errstate(under="ignore"):
        e = np.exp((logits - logits.max()) / settings["temperature"])
    kept = e >= settings["min_p"]
    if settings["top_k"] > 0:
        kept &= e >= np.sort(e)[::-1][min(int(settings["top_k"]), len(e)) - 1]
    if settings["top_p"] < 1:
        best = np.sort(e[kept])[::-1]
        reached = np.cumsum(best) >= settings["top_p"] * best.sum()
        kept &= e >= best[int(reached.argmax())]
    p: Doubles = np.where(kept, e, 0) / e[kept].sum()
    return p


def draft(
    logits: npt.NDArray[np.floating], width: int, settings: dict[str, float], edits: dict[int, Edit], prefix: list[int]
) -> Doubles:
    """Return the distribution [width] from which a token is drafted after the drafted `prefix`, given the draft's logits
    [Vd]."""
    laid_out = np.full(width, -np.inf)
    common = min(width, len(logits))
    laid_out[:common] = logits[:common]
    return warp(edit(laid_out, settings, edits, prefix, len(prefix)), settings)


def excluded(logits: Doubles, settings: dict[str, float], token: int) -> bool:
    """Return whether truncation excludes a token for these logits [V], even if fp32 misjudges a sum that just reaches top_p."""
    if settings["temperature"] == 0:
        return bool(logits[token] < logits.max())
    with np.errstate(under="ignore"):
        e = np.exp((logits - logits.max()) / settings["temperature"])
    above = e > e[token]
    if e[token] < settings["min_p"] * (1 - TOLERANCE) or (settings["top_k"] > 0 and above.sum() >= settings["top_k"]):
        return True
    if settings["top_p"] == 1:
        return False
    kept = e >= settings["min_p"]
    if settings["top_k"] > 0:
        kept &= e >= np.partition(e, -int(settings["top_k"]))[-int(settings["top_k"])]
    return bool(e[above].sum() >= settings["top_p"] * e[kept].sum() * (1 + TOLERANCE))


def draw(weights: Doubles, uniforms: npt.NDArray[np.floating]) -> int:
    """Return the token that two uniform numbers pick from weights [V]: first its block of 256, then the token."""
    blocks = np.pad(weights, (0, -len(weights) % BLOCK)).reshape(-1, BLOCK)
    block = _pick(blocks.sum(axis=1), float(uniforms[0]))
    return block * BLOCK + _pick(blocks[block], float(uniforms[1]))


def _pick(weights: Doubles, uniform: float) -> int:
    share = np.cumsum(weights)
    positive = np.flatnonzero(weights > 0)
    past = positive[share[positive] > uniform * share[-1]]
    return int(past[0] if len(past) else positive[-1])


def verify(
    logits: Doubles,
    drafted: list[int],
    q: Doubles,
    settings: dict[str, float],
    uniforms: npt.NDArray[np.floating],
    edits: dict[int, Edit] | None = None,
    fault: Fault | None = None,
) -> list[int]:
    """Return the tokens that one round emits: the accepted drafted tokens and one of the target's own.

    Args:
        logits: the target's, [k + 1, V].
        drafted: k tokens, each drawn from its row of `q` [k, V].
        settings: by the names of `contract.SETTINGS`.
        uniforms: [k + 1, 3]: accepting, block and token of each row.
        fault: the line to make wrong.
    """
    edits = edits or {}
    if fault is Fault.TARGET_NOT_TRUNCATED:
        settings = settings | {"top_k": 0, "top_p": 1, "min_p": 0}
    for row in range(len(drafted) + 1):
        p = warp(edit(logits[row], settings, edits, drafted[:row], row), settings)
        own = draw(p, uniforms[row, 1:])
        if row == len(drafted):
            break
        token, accepting = drafted[row], uniforms[row, 0]
        if fault is Fault.ALWAYS_ACCEPT:
            accepted = True
        elif settings["exact_match"] or settings["temperature"] == 0:
            accepted = token == own
        elif fault is Fault.INVERTED_RATIO:
            accepted = accepting * p[token] < q[row, token]
        else:
            accepted = accepting * q[row, token] < p[token]
        if not accepted:
            residual = np.maximum(p - q[row], 0)
            if not (settings["exact_match"] or settings["temperature"] == 0) and residual.any():
                own = draw(p if fault is Fault.RESIDUAL_NOT_SUBTRACTED else residual, uniforms[row, 1:])
            return [*drafted[:row], own]
    return [*drafted, own]


def named_settings(values: npt.NDArray[np.float32]) -> dict[str, float]:
    """Return one sequence's settings [8] by name."""
    return dict(zip(SETTINGS, values.tolist(), strict=True))


def edits_of(edit_ids: npt.NDArray[np.int64], edits: npt.NDArray[np.float32]) -> dict[int, Edit]:
    """Return one sequence's table, [1, N] and [1, N, 4], by token."""
    return {
        token: Edit(bias, int(count), seen > 0, int(banned_rows))
        for token, (bias, count, seen, banned_rows) in zip(edit_ids[0].tolist(), edits[0].tolist(), strict=True)
    }
