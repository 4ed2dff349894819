"""The verifier's tokens have the target's distribution; the same test detects each of the four wrong samplers.

Once by uniform numbers that fill their square evenly, which leaves nothing to chance, and once by drawn ones.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats

from outrider.engines.samplers import EDITS, SETTINGS
from outrider.runtime.rounds.reference import Fault, named_settings, verify, warp
from outrider.tests.samplers import NEUTRAL, UNEDITED, Array, Graphs, row, run

# A chi-square test of the emitted tokens against the exact p. Of a right sampler a test's p-value is below 1e-6 with a
# probability of one in a million, and the seeds are fixed; each test below makes at most 4 such tests.
FALSE_ALARM = 1e-6
SIZE, K, DRAWS, ENOUGH = 40, 3, 20_000, 500


def verdicts(
    graphs: Graphs | None,
    logits: Array,
    drafted: Array,
    q: Array,
    settings_row: Array,
    uniforms: Array,
    fault: Fault | None = None,
) -> list[list[int]]:
    """What rounds emit that have the same logits [K + 1, V] and q [K, V], by the graph or the reference."""
    count, size = len(drafted), logits.shape[1]
    if graphs is None:
        wide, chosen = logits.astype(np.float64), named_settings(settings_row)
        each_q = q.astype(np.float64)
        return [verify(wide, drafted[n].tolist(), each_q, chosen, uniforms[n], fault=fault) for n in range(count)]
    accepted, tokens, _ = run(
        graphs,
        "verifier",
        size,
        logits=np.broadcast_to(logits, (count, K + 1, size)),
        drafted=np.pad(drafted, ((0, 0), (0, 1))),
        drafted_count=np.full(count, K),
        q=np.broadcast_to(np.concatenate([q, q[:1]])[:, None], (K + 1, count, size)),
        settings=np.broadcast_to(settings_row, (count, len(SETTINGS))),
        edit_ids=np.broadcast_to(UNEDITED[0], (count, 1)),
        edits=np.broadcast_to(UNEDITED[1], (count, 1, len(EDITS))),
        uniforms=uniforms,
        candidates=np.array([size]),
    )
    return [tokens[n, : accepted[n] + 1].tolist() for n in range(count)]


def random_round(seed: int, size: int, settings_row: Array) -> tuple[Array, Array, list[npt.NDArray[np.float64]]]:
    """Random logits of the target, a draft's q that is not far off, and the target's exact p."""
    random, chosen = np.random.default_rng(seed), named_settings(settings_row)
    logits = (random.standard_normal((K + 1, size)) * 1.5).astype(np.float32)
    near = logits[:K] + random.standard_normal((K, size)) * 0.7
    q = np.stack([warp(each, chosen) for each in near]).astype(np.float32)
    return logits, q, [warp(each.astype(np.float64), chosen) for each in logits]


# ------------------------------------------------------------------------------------------------ without chance
# Every token that may be drafted, weighted by its q, with points that fill the square of the uniform number that accepts and
# the one that draws. Where decisions split the square into rectangles, as right ones do, a share of the points differs from
# the share of the area by about one point in POINTS; over all drafted tokens these errors are weighted and cancel out.
FEW, POINTS, ERROR = 10, 512, 0.004


def distances(
    graphs: Graphs | None, seed: int, settings_row: Array, fault: Fault | None = None, count: int = POINTS
) -> list[float]:
    """The largest difference to p, over all tokens, of what each row emits after the rows before it were accepted."""
    logits, q, p = random_round(seed, FEW, settings_row)
    at_points = np.arange(count)
    points = np.stack([(at_points + 0.5) / count, (at_points * (5**0.5 - 1) / 2 + 0.5) % 1], axis=1)
    kept = [int(each.argmax()) for each in p]  # accepted by a uniform number of 0, or as what the target draws itself
    drawing_kept = [(each[:token].sum() + each[token] / 2) for each, token in zip(p, kept, strict=True)]
    cases = [(at, token) for at in range(K) for token in np.flatnonzero(q[at])] + [(K, 0)]
    drafted = np.array([kept[:K]] * len(cases) * count).reshape(len(cases), count, K)
    uniforms = np.zeros((len(cases), count, K + 1, 3), dtype=np.float32)
    uniforms[..., 1] = 0.5
    uniforms[..., 2] = drawing_kept
    for case, (at, token) in enumerate(cases):
        uniforms[case, :, at, 0], uniforms[case, :, at, 2] = points.T
        if at < K:
            drafted[case, :, at] = token
    flat = drafted.reshape(-1, K), uniforms.reshape(-1, K + 1, 3)
    emitted = iter(verdicts(graphs, logits, flat[0], q, settings_row, flat[1], fault))
    shares = np.zeros((K + 1, FEW))
    for at, token in cases:
        weight = float(q[at, token]) / float(q[at].sum(dtype=np.float64)) if at < K else 1.0
        for tokens in itertools.islice(emitted, count):
            if len(tokens) <= at:
                return [1.0]  # a token that the target would have drawn itself was not accepted
            shares[at, tokens[at]] += weight / count
    return [float(np.abs(share - each).max()) for share, each in zip(shares, p, strict=True)]


# ------------------------------------------------------------------------------------------------ by chance


def emitted(
    graphs: Graphs | None, seed: int, settings_row: Array, fault: Fault | None = None, draws: int = DRAWS
) -> tuple[list[list[int]], list[npt.NDArray[np.float64]]]:
    """Run rounds with the same p and q in each row, by the graph or the reference; return tokens and each row's exact p."""
    logits, q, p = random_round(seed, SIZE, settings_row)
    random = np.random.default_rng([seed, 1])
    shares = q.astype(np.float64) / q.sum(axis=1, dtype=np.float64, keepdims=True)
    drafted = np.stack([random.choice(SIZE, draws, p=each) for each in shares], axis=1)
    uniforms = random.random((draws, K + 1, 3), dtype=np.float32)
    return verdicts(graphs, logits, drafted, q, settings_row, uniforms, fault), p


def p_values(rounds: list[list[int]], p: list[npt.NDArray[np.float64]]) -> list[float]:
    """Compare the tokens of each row that enough rounds reach with its p, whatever the rows before it had."""
    p_values = []
    for at, each in enumerate(p):
        counts = np.bincount([tokens[at] for tokens in rounds if len(tokens) > at], minlength=SIZE)
        if counts.sum() < ENOUGH:
            continue
        kept = each > 0
        if counts[~kept].any():
            return [0.0]
        common = each * counts.sum() >= 5
        groups = [np.append(array[common], array[kept & ~common].sum()) for array in (counts, each * counts.sum())]
        observed, expected = (group[groups[1] > 0] for group in groups)
        p_values.append(float(scipy.stats.chisquare(observed, expected).pvalue))
    return p_values


SETTINGS_TRIED = [row(), row(temperature=0.6, top_p=0.9), row(top_k=8), row(temperature=1.5, min_p=0.1), row(exact_match=1)]


@pytest.mark.parametrize("settings_row", SETTINGS_TRIED, ids=lambda each: str(named_settings(each)))
def test_evenly_spread_uniforms_give_the_targets_distribution(graphs: Graphs, settings_row: Array) -> None:
    assert max(distances(graphs, 0, settings_row)) < ERROR


COARSE = POINTS // 4  # points, whose error is less than twice as large


def test_so_they_do_by_the_reference() -> None:
    assert max(distances(None, 0, row(top_k=4), count=COARSE)) < 2 * ERROR


@pytest.mark.parametrize("fault", Fault)
def test_by_them_each_wrong_sampler_is_far_off(fault: Fault) -> None:
    assert max(distances(None, 0, row(top_k=4), fault, COARSE)) > 8 * ERROR


DRAWN = [(each, seed) for each in SETTINGS_TRIED for seed in range(3)]


@pytest.mark.slow  # tests/runtime/test_sampling_distribution.py has drawn ones of the whole loop
@pytest.mark.parametrize(("settings_row", "seed"), DRAWN, ids=lambda each: str(named_settings(each)) if np.ndim(each) else None)
def test_emitted_tokens_have_the_targets_distribution(graphs: Graphs, settings_row: Array, seed: int) -> None:
    rounds, p = emitted(graphs, seed, settings_row)
    assert sum(len(tokens) for tokens in rounds) > 1.05 * DRAWS  # some are accepted
    assert min(p_values(rounds, p)) > FALSE_ALARM


@pytest.mark.parametrize("fault", Fault)
def test_the_same_test_detects_each_wrong_sampler(fault: Fault) -> None:
    """With a sixteenth of the draws."""
    rounds, p = emitted(None, 0, row(top_k=8), fault, DRAWS // 16)
    assert min(p_values(rounds, p)) < FALSE_ALARM / 1000


@pytest.mark.slow
def test_the_same_test_passes_the_reference() -> None:
    assert min(p_values(*emitted(None, 0, row(top_k=8)))) > FALSE_ALARM


def test_the_distance_to_the_target_shrinks_with_draws_as_only_the_targets_own_does(graphs: Graphs) -> None:
    """The distance of n draws to p is about sqrt(V / n); to any other distribution it stays."""
    rounds, p = emitted(graphs, 1, row())
    other = warp(np.random.default_rng(9).standard_normal(SIZE), NEUTRAL)
    distances = []
    for draws in (200, 2_000, 20_000):
        share = np.bincount([tokens[0] for tokens in rounds[:draws]], minlength=SIZE) / draws
        distances.append((np.abs(share - p[0]).sum() / 2, np.abs(share - other).sum() / 2))
    assert distances[2][0] < distances[0][0] / 5
    assert distances[2][1] > distances[0][1] / 1.5
