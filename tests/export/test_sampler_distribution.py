"""The verifier's tokens have the target's distribution; the same test detects each of the four wrong samplers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats

from outrider.engines.contract import EDITS, SETTINGS
from outrider.runtime.reference import Fault, named_settings, verify, warp
from outrider.tests.samplers import NEUTRAL, UNEDITED, Array, Graphs, row, run

# A chi-square test of the emitted tokens against the exact p. Of a right sampler a test's p-value is below 1e-6 with a
# probability of one in a million, and the seeds are fixed; each test below makes at most 4 such tests.
FALSE_ALARM = 1e-6
SIZE, K, DRAWS, ENOUGH = 40, 3, 20_000, 500


def emitted(
    graphs: Graphs | None, seed: int, settings_row: Array, fault: Fault | None = None
) -> tuple[list[list[int]], list[npt.NDArray[np.float64]]]:
    """Run rounds with the same p and q in each row, by the graph or the reference; return tokens and each row's exact p."""
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((K + 1, SIZE)) * 1.5).astype(np.float32)
    chosen = named_settings(settings_row)
    near = logits[:K] + random.standard_normal((K, SIZE)) * 0.7
    q = np.stack([warp(each, chosen) for each in near]).astype(np.float32)
    shares = q.astype(np.float64) / q.sum(axis=1, dtype=np.float64, keepdims=True)
    drafted = np.stack([random.choice(SIZE, DRAWS, p=each) for each in shares], axis=1)
    uniforms = random.random((DRAWS, K + 1, 3), dtype=np.float32)
    p = [warp(each.astype(np.float64), chosen) for each in logits]
    if graphs is None:
        wide = logits.astype(np.float64)
        return [
            verify(wide, drafted[n].tolist(), q.astype(np.float64), chosen, uniforms[n], fault=fault) for n in range(DRAWS)
        ], p
    accepted, tokens, _ = run(
        graphs,
        "verifier",
        SIZE,
        logits=np.broadcast_to(logits, (DRAWS, K + 1, SIZE)),
        drafted=np.pad(drafted, ((0, 0), (0, 1))),
        drafted_count=np.full(DRAWS, K),
        q=np.broadcast_to(np.concatenate([q, q[:1]])[:, None], (K + 1, DRAWS, SIZE)),
        settings=np.broadcast_to(settings_row, (DRAWS, len(SETTINGS))),
        edit_ids=np.broadcast_to(UNEDITED[0], (DRAWS, 1)),
        edits=np.broadcast_to(UNEDITED[1], (DRAWS, 1, len(EDITS))),
        uniforms=uniforms,
        candidates=np.array([SIZE]),
    )
    return [tokens[n, : accepted[n] + 1].tolist() for n in range(DRAWS)], p


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings_row", SETTINGS_TRIED, ids=lambda each: str(named_settings(each)))
def test_emitted_tokens_have_the_targets_distribution(graphs: Graphs, settings_row: Array, seed: int) -> None:
    rounds, p = emitted(graphs, seed, settings_row)
    assert sum(len(tokens) for tokens in rounds) > 1.05 * DRAWS  # some are accepted
    assert min(p_values(rounds, p)) > FALSE_ALARM


@pytest.mark.parametrize("fault", Fault)
def test_the_same_test_detects_each_wrong_sampler(fault: Fault) -> None:
    rounds, p = emitted(None, 0, row(top_k=8), fault)
    assert min(p_values(rounds, p)) < FALSE_ALARM / 1000


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
