"""Edge cases of the sampler graphs: ties, zeros, NaN and infinity, one token left, too few candidates, extreme uniforms."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engines.samplers import DECIDED, FORBIDDEN, MORE_CANDIDATES, NOT_FINITE
from outrider.runtime.rounds.reference import draw, excluded, named_settings, verify, warp
from outrider.tests.samplers import NEUTRAL, RULES, Graphs, one_row, round_of, row, run


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_the_greedy_graphs_report_nan_and_infinity(graphs: Graphs, wrong: float) -> None:
    """Except in rows after the first rejected token, which are not used."""
    logits = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    logits[0, 1, 5] = logits[1, 2, 5] = wrong
    drafted = np.where([[True, True, True], [True, False, True]], logits.argmax(-1), 1)
    count = np.array([2, 2])
    _, _, status = run(graphs, "greedy_verifier", 64, logits=logits, drafted=drafted, drafted_count=count)
    assert status.tolist() == [NOT_FINITE, DECIDED]
    _, status = run(graphs, "greedy_draft_sampler", 64, logits=logits[:, 1:2])
    assert status.tolist() == [NOT_FINITE, DECIDED]


@RULES
def test_q_zero_where_p_is_not(graphs: Graphs, exact_match: int) -> None:
    """The draft proposes only token 0, which is unlikely in the target; everything else comes from the residual."""
    logits = np.log(np.array([[0.01, 0.09, 0.4, 0.5]] * 2))
    q = np.array([[1.0, 0, 0, 0]])
    for uniform in np.linspace(0, 0.999, 40):
        uniforms = np.array([[uniform, 0.5, uniform], [0.5, 0.5, 0.5]])
        tokens, _ = round_of(graphs, logits, [0], q, uniforms, exact_match=exact_match)
        assert tokens == verify(logits, [0], q, named_settings(row(exact_match=exact_match)), uniforms)
        assert (tokens[0] == 0) == (uniform < 0.01)  # u q(0) < p(0), and the first hundredth of the inverse CDF


@RULES
@pytest.mark.parametrize("drafted", [0, 1])
def test_p_one_hot(graphs: Graphs, exact_match: int, drafted: int) -> None:
    logits = np.array([[-1000.0, 1000, -1000]] * 2)
    tokens, status = round_of(
        graphs, logits, [drafted], np.full((1, 3), 1 / 3), np.full((2, 3), 0.999), exact_match=exact_match
    )
    assert (tokens, status) == ([1, 1] if drafted == 1 else [1], DECIDED)


@pytest.mark.parametrize("values", [{"top_p": 1e-6}, {"top_k": 1}, {"temperature": 1e-3}, {"min_p": 1}, {"temperature": 0}])
def test_only_the_best_token_is_left(graphs: Graphs, values: dict[str, float]) -> None:
    logits = np.random.default_rng(1).standard_normal(257) * 5
    q, token, status = one_row(graphs, logits, 0, **values)
    assert (token, status) == (int(logits.argmax()), DECIDED)
    if values != {"temperature": 0}:
        assert q[token] == 1
        assert np.count_nonzero(q) == 1


def test_a_top_p_of_one_keeps_everything(graphs: Graphs) -> None:
    logits = np.random.default_rng(1).standard_normal(700)
    q, _, _ = one_row(graphs, logits, top_p=1)
    assert np.count_nonzero(q) == 700
    np.testing.assert_allclose(q.sum(), 1, atol=1e-6)


def test_tokens_equal_to_the_last_kept_one_are_kept(graphs: Graphs) -> None:
    logits = np.array([3.0, 2, 2, 2, 0])
    for values in ({"top_k": 2}, {"top_p": 0.7}):
        q, _, _ = one_row(graphs, logits, 0, **values)
        assert np.flatnonzero(q).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("values", [{"top_p": 0.95}, {"top_k": 500}, {"top_k": 600, "top_p": 0.5}])
def test_too_few_candidates_are_reported_and_more_of_them_decide(graphs: Graphs, values: dict[str, float]) -> None:
    logits = np.random.default_rng(1).standard_normal(700)
    assert one_row(graphs, logits, candidates=64, **values)[2] == MORE_CANDIDATES
    q, token, status = one_row(graphs, logits, candidates=700, **values)
    assert status == DECIDED
    np.testing.assert_allclose(q, warp(logits.astype(np.float32).astype(np.float64), named_settings(row(**values))), atol=1e-6)
    assert not excluded(logits, named_settings(row(**values)), token)
    # The number of candidates changes nothing where they are enough.
    enough = one_row(graphs, logits, candidates=690, **values)
    assert enough[1:] == (token, DECIDED)
    np.testing.assert_array_equal(enough[0], q)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_and_infinity_are_reported(graphs: Graphs, value: float, temperature: float) -> None:
    """In any row up to that of the target's own token; later rows are not used."""
    logits = np.zeros((3, 300), dtype=np.float32)
    logits[:, 7] = 50
    q = np.eye(1, 300, 7).repeat(2, axis=0)
    for at in range(3):
        broken = logits.copy()
        broken[at, 299] = value
        assert one_row(graphs, broken[at], temperature=temperature)[2] == NOT_FINITE
        uniforms = np.full((3, 3), 0.5)
        assert round_of(graphs, broken, [7, 7], q, uniforms, 300, temperature=temperature, top_p=0.9)[1] == NOT_FINITE
        rejecting = round_of(graphs, broken, [3, 7], np.eye(1, 300, 3).repeat(2, axis=0), uniforms, temperature=temperature)
        assert rejecting[1] == (NOT_FINITE if at == 0 else DECIDED)


def test_greedy_takes_the_first_of_equals(graphs: Graphs) -> None:
    logits = np.zeros((1, 300))
    assert round_of(graphs, logits, [], np.zeros((0, 300)), np.full((1, 3), 0.9), temperature=0) == ([0], DECIDED)


def test_uniforms_at_their_ends_never_draw_a_token_of_no_weight(graphs: Graphs) -> None:
    logits = np.full(700, -np.inf)
    logits[[5, 300, 301]] = [0, 1, -3]
    for uniform in (0.0, 1 - 2**-24):
        tokens, _ = round_of(graphs, logits[None], [], np.zeros((0, 700)), np.full((1, 3), uniform))
        assert tokens == [5 if uniform == 0 else 301]


def test_a_token_with_probability_zero_is_never_accepted(graphs: Graphs) -> None:
    """Not even with a uniform of 0."""
    logits = np.array([[0.0, -np.inf, 1.0]] * 2)
    tokens, _ = round_of(graphs, logits, [1], np.array([[0.0, 1.0, 0.0]]), np.zeros((2, 3)))
    assert len(tokens) == 1
    assert tokens[0] != 1


def test_a_rejection_without_a_residual_draws_from_p(graphs: Graphs) -> None:
    """Only rounding can cause this: p and q are the same powers of two, and u is so close to 1 that u q rounds to q."""
    q = np.array([[0.5, 0.25, 0.25]])
    logits = np.log(np.concatenate([q, q]))
    weights = warp(logits[0], NEUTRAL)
    scaled = q * (1 + 2**-20)  # as if q were rounded up: u q < p fails, and p - q is nowhere positive
    uniforms = np.array([[1 - 2**-24, 0.5, 0.6], [0.5, 0.5, 0.5]])
    tokens, status = round_of(graphs, logits, [0], scaled, uniforms)
    assert (tokens, status) == ([draw(weights, uniforms[0, 1:])], DECIDED)


def test_forbidden_tokens_have_finite_logprobs(graphs: Graphs) -> None:
    """For -inf, ONNX Runtime on CUDA returns ids that no token has."""
    logits = np.full((1, 1, 300), -np.inf, dtype=np.float32)
    logits[0, 0, [7, 9]] = 0
    chosen, ids, values = run(graphs, "logprobs", 300, logits=logits, tokens=np.array([[9]]), candidates=np.array([3]))
    assert chosen.item() == pytest.approx(np.log(0.5))
    assert set(ids[0, 0, :2]) == {7, 9}
    assert values[0, 0, 2] == np.float32(FORBIDDEN)
