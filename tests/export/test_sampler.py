"""The sampler graphs on ONNX Runtime compared with the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engines.samplers import BLOCK, DECIDED
from outrider.runtime.rounds.reference import draw, edit, named_settings, verify, warp
from outrider.tests.samplers import RULES, UNEDITED, Case, Graphs, one_row, round_of, row, run


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


def test_logprobs_are_those_of_the_unmodified_logits(graphs: Graphs) -> None:
    logits = (np.random.default_rng(2).standard_normal((2, 3, 300)) * 4).astype(np.float32)
    tokens = np.array([[4, 5, -1], [7, 8, 9]])
    chosen, ids, values = run(graphs, "logprobs", 300, logits=logits, tokens=tokens, candidates=np.array([4]))
    want = scipy.special.log_softmax(logits.astype(np.float64), axis=2)
    np.testing.assert_allclose(chosen[1], want[1, [0, 1, 2], [7, 8, 9]], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-want, axis=2)[:, :, :4])
    np.testing.assert_allclose(values, np.sort(want, axis=2)[:, :, ::-1][:, :, :4], atol=1e-5)


def test_blocks_are_drawn_with_a_separate_uniform(graphs: Graphs) -> None:
    """One fp32 uniform over 151,936 equal tokens would leave some of them undrawable; two reach all of a block."""
    size = 151_936
    reached = set()
    for step in range(BLOCK):
        uniforms = np.array([[0.5, 0.5, (step + 0.5) / BLOCK]])
        tokens, _ = round_of(graphs, np.zeros((1, size), dtype=np.float32), [], np.zeros((0, size)), uniforms)
        reached.add(tokens[0])
    assert len(reached) == BLOCK
