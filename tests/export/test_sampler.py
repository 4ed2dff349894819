"""The sampler graphs on ONNX Runtime compared with the float64 reference: arithmetic and edge cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engines.samplers import BLOCK, DECIDED, FORBIDDEN, MORE_CANDIDATES, NOT_FINITE
from outrider.runtime.rounds.reference import draw, edit, excluded, named_settings, verify, warp
from outrider.tests.samplers import NEUTRAL, UNEDITED, Array, Case, Graphs, row, run


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.integers(0, 2**32))
def test_the_verifier_decides_as_the_reference_does(graphs: Graphs, seed: int) -> None:
    """Random p, q, k and V, settings and edits, in batches that mix them."""
    case = Case(seed)
    assert case.verdicts(graphs) == [case.reference(sequence) for sequence in range(case.batch)]


def test_the_random_cases_cover_all_outcomes() -> None:
    """They accept, reject, edit and truncate."""
    cases = [Case(seed) for seed in range(200)]
    emitted = [(case, sequence, case.reference(sequence)) for case in cases for sequence in range(case.batch)]
    lengths = [(len(tokens) - 1, case.drafted_count[sequence]) for case, sequence, tokens in emitted]
    assert sum(0 < accepted < count for accepted, count in lengths) > 40
    assert sum(accepted == count > 2 for accepted, count in lengths) > 20
    without_edits = [verify_without_edits(case, sequence) for case, sequence, _ in emitted]
    assert sum(tokens != bare for (_, _, tokens), bare in zip(emitted, without_edits, strict=True)) > 40


def verify_without_edits(case: Case, sequence: int) -> list[int]:
    case.edits_of[sequence] = {}
    return case.reference(sequence)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 8), st.sampled_from([64, 257, 300]))
def test_the_drafter_draws_as_the_reference_does(graphs: Graphs, seed: int, first_row: int, vocab_rows: int) -> None:
    """q is the draft's warped distribution, and the token is drawn from it."""
    case = Case(seed, vocab_rows)
    logits = (case.random.standard_normal((case.batch, 1, vocab_rows)) * 3).astype(np.float32)
    drafted = case.random.integers(0, vocab_rows, (case.batch, 8))
    uniforms = case.random.random((case.batch, 2), dtype=np.float32)
    token, q, status = run(
        graphs,
        "draft_sampler",
        vocab_rows,
        logits=logits,
        drafted=drafted,
        first_row=np.array([first_row]),
        settings=case.settings,
        edit_ids=case.edit_ids,
        edits=case.edits,
        uniforms=uniforms,
        candidates=np.array([vocab_rows]),
    )
    assert (status == DECIDED).all()
    for sequence in range(case.batch):
        chosen = named_settings(case.settings[sequence])
        prefix = drafted[sequence, :first_row].tolist()
        p = warp(edit(logits[sequence, 0], chosen, case.edits_of[sequence], prefix, first_row), chosen)
        if chosen["temperature"] == 0:
            assert token[sequence, 0] == p.argmax()
            continue
        np.testing.assert_allclose(q[sequence], p, atol=2e-6, rtol=2e-4)
        assert token[sequence, 0] == draw(p, uniforms[sequence])


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([64, 257, 300]))
def test_the_greedy_graphs_decide_as_the_others_at_temperature_zero(graphs: Graphs, seed: int, vocab_rows: int) -> None:
    case = Case(seed, vocab_rows)
    case.settings[:] = row(temperature=0)
    case.edit_ids, case.edits = np.repeat(UNEDITED[0], case.batch, 0), np.repeat(UNEDITED[1], case.batch, 0)
    case.edits_of = [{} for _ in range(case.batch)]
    right = case.random.random((case.batch, case.rows)) < 0.7
    case.drafted = np.where(right, case.logits.argmax(-1), case.drafted)
    accepted, tokens, status = run(
        graphs,
        "greedy_verifier",
        vocab_rows,
        logits=case.logits,
        drafted=case.drafted,
        drafted_count=case.drafted_count,
    )
    assert (status == DECIDED).all()
    assert [ids[: count + 1].tolist() for ids, count in zip(tokens, accepted, strict=True)] == case.verdicts(graphs)
    assert all((ids[count + 1 :] == -1).all() for ids, count in zip(tokens, accepted, strict=True))
    logits = (case.random.standard_normal((case.batch, 1, vocab_rows)) * 3).astype(np.float32)
    logits[..., ::7] = -np.inf  # as in a draft that proposes only some tokens
    token, status = run(graphs, "greedy_draft_sampler", vocab_rows, logits=logits)
    assert (status == DECIDED).all()
    assert (token == logits.argmax(-1)).all()


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


def one_row(graphs: Graphs, logits: Array, candidates: int = 0, **values: Any) -> tuple[Array, int, int]:
    """Run the drafter on one row of logits [V]; return q, a token and the status."""
    size = len(logits)
    token, q, status = run(
        graphs,
        "draft_sampler",
        size,
        logits=logits[None, None].astype(np.float32),
        drafted=np.zeros((1, 1)),
        first_row=np.zeros(1),
        settings=row(**values)[None],
        edit_ids=UNEDITED[0],
        edits=UNEDITED[1],
        uniforms=np.array([[0.37, 0.62]]),
        candidates=np.array([candidates or size]),
    )
    return q[0], int(token[0, 0]), int(status[0])


def round_of(
    graphs: Graphs, logits: Array, drafted: list[int], q: Array, uniforms: Array, candidates: int = 1, **values: Any
) -> tuple[list[int], int]:
    """Run the verifier on one sequence: logits [S, V], q [k, V], uniforms [S, 3]; return the tokens and the status."""
    rows, size = logits.shape
    accepted, tokens, status = run(
        graphs,
        "verifier",
        size,
        logits=logits[None],
        drafted=np.array([drafted + [0] * (rows - len(drafted))]),
        drafted_count=np.array([len(drafted)]),
        q=np.concatenate([q, np.zeros((rows - len(q), size))])[:, None],
        settings=row(**values)[None],
        edit_ids=UNEDITED[0],
        edits=UNEDITED[1],
        uniforms=uniforms[None],
        candidates=np.array([candidates]),
    )
    return tokens[0, : accepted[0] + 1].tolist(), int(status[0])


RULES = pytest.mark.parametrize("exact_match", [0, 1])


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


@pytest.mark.parametrize("values", [{}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.3}, {"min_p": 0.1}])
def test_identical_p_and_q_accept_everything(graphs: Graphs, values: dict[str, float]) -> None:
    random = np.random.default_rng(5)
    for _ in range(50):
        logits = random.standard_normal((9, 700)).astype(np.float32) * 2
        drawn = [one_row(graphs, each, 0, **values) for each in logits[:8]]
        uniforms = np.minimum(random.random((9, 3)), 1 - 1e-5)  # q is rounded: u must not be 1 but for rounding
        tokens, _ = round_of(
            graphs, logits, [token for _, token, _ in drawn], np.stack([q for q, _, _ in drawn]), uniforms, 700, **values
        )
        assert tokens[:8] == [token for _, token, _ in drawn]


@pytest.mark.in_turn(runs=lambda case: case["temperature"] == 0.7 and "top_k" in case["truncation"] and not case["exact_match"])
@RULES
@pytest.mark.parametrize("temperature", [0, 1e-3, 0.7, 1.5])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 50, "min_p": 0.01}])
def test_a_vocabulary_of_151936(graphs: Graphs, exact_match: int, temperature: float, truncation: dict[str, float]) -> None:
    random = np.random.default_rng(3)
    logits = (random.standard_normal((9, 151_936)) * 3).astype(np.float32)
    chosen = row(temperature=temperature, exact_match=exact_match, **truncation)
    near = logits[:8] + random.standard_normal((8, 151_936)).astype(np.float32) * 0.3
    q = np.stack([warp(each.astype(np.float64), named_settings(chosen)) for each in near]).astype(np.float32)
    for _ in range(3):
        uniforms = random.random((9, 3), dtype=np.float32)
        drafted = [draw(each.astype(np.float64), random.random(2)) for each in q]
        tokens, status = round_of(
            graphs,
            logits,
            drafted,
            q,
            uniforms,
            151_936,
            temperature=temperature,
            exact_match=exact_match,
            **truncation,
        )
        want = verify(logits.astype(np.float64), drafted, q.astype(np.float64), named_settings(chosen), uniforms)
        assert (tokens, status) == (want, DECIDED)


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


def test_a_sequence_does_not_depend_on_the_rest_of_its_batch(graphs: Graphs) -> None:
    """Each sequence of a mixed batch gives the same result alone."""
    for seed in range(60):
        case = Case(seed)
        together = case.verdicts(graphs)
        for sequence in range(case.batch):
            alone = Case(seed)
            for name in ("logits", "settings", "drafted_count", "edit_ids", "edits", "drafted", "uniforms"):
                setattr(alone, name, getattr(case, name)[sequence : sequence + 1])
            alone.q, alone.batch = case.q[:, sequence : sequence + 1], 1
            assert alone.verdicts(graphs) == [together[sequence]]


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


def test_logprobs_are_those_of_the_unmodified_logits(graphs: Graphs) -> None:
    logits = (np.random.default_rng(2).standard_normal((2, 3, 300)) * 4).astype(np.float32)
    tokens = np.array([[4, 5, -1], [7, 8, 9]])
    chosen, ids, values = run(graphs, "logprobs", 300, logits=logits, tokens=tokens, candidates=np.array([4]))
    want = scipy.special.log_softmax(logits.astype(np.float64), axis=2)
    np.testing.assert_allclose(chosen[1], want[1, [0, 1, 2], [7, 8, 9]], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-want, axis=2)[:, :, :4])
    np.testing.assert_allclose(values, np.sort(want, axis=2)[:, :, ::-1][:, :, :4], atol=1e-5)


def test_forbidden_tokens_have_finite_logprobs(graphs: Graphs) -> None:
    """For -inf, ONNX Runtime on CUDA returns ids that no token has."""
    logits = np.full((1, 1, 300), -np.inf, dtype=np.float32)
    logits[0, 0, [7, 9]] = 0
    chosen, ids, values = run(graphs, "logprobs", 300, logits=logits, tokens=np.array([[9]]), candidates=np.array([3]))
    assert chosen.item() == pytest.approx(np.log(0.5))
    assert set(ids[0, 0, :2]) == {7, 9}
    assert values[0, 0, 2] == np.float32(FORBIDDEN)


def test_blocks_are_drawn_with_a_separate_uniform(graphs: Graphs) -> None:
    """One fp32 uniform over 151,936 equal tokens would leave some of them undrawable; two reach all of a block."""
    size = 151_936
    reached = set()
    for step in range(BLOCK):
        uniforms = np.array([[0.5, 0.5, (step + 0.5) / BLOCK]])
        tokens, _ = round_of(graphs, np.zeros((1, size), dtype=np.float32), [], np.zeros((0, size)), uniforms)
        reached.add(tokens[0])
    assert len(reached) == BLOCK
