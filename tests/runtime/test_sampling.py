"""Sampling through the whole loop, on real sessions: parameters, seeds and logprobs."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.audit.controls import Watch
from outrider.bundle.manifest import Generation
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.sampling import SamplingState
from outrider.tests.runtime.answers import PROMPT, events, ids
from outrider.tests.support import END, PAIR, reseal, run

K = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "reward": {"frequency_penalty": -0.3, "presence_penalty": -1},
    "bias": {"logit_bias": {token: (-100 if token % 2 else 2.5) for token in range(300, 700)}},
    "at least": {"min_new_tokens": 50, "stop_token_ids": list(range(300, 420))},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_new_tokens": 20},
}


SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


@pytest.fixture(scope="module")
def plain(trained: Outrider) -> Callable[..., list[int]]:
    """Plain decoding's answer with some penalties, greedy or, by a rule, sampled."""

    @functools.cache
    def made(name: str, rule: str | None = None) -> list[int]:
        return ids(trained, **PENALTIES.get(name, {}), **(SAMPLED | {"rule": rule} if rule else {}))

    return made


def in_turn(case: dict[str, Any]) -> bool:
    """Every other k with each of the penalties."""
    return (["none", *PENALTIES].index(case["name"]) + K.index(case["k"])) % 2 == 0


@pytest.mark.in_turn(runs=in_turn)
@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("name", PENALTIES)
def test_greedy_with_penalties_is_plain_greedy_with_penalties(
    trained: Outrider, plain: Callable[..., list[int]], name: str, k: int
) -> None:
    """Each verified position sees the drafted prefix before it, exactly as plain decoding would."""
    assert plain(name) != plain("none")
    assert ids(trained, k=k, **PENALTIES[name]) == plain(name)


@pytest.mark.in_turn(runs=in_turn)
@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("name", ["none", *PENALTIES])
def test_exact_match_gives_plain_decodings_tokens_whatever_k(
    trained: Outrider, plain: Callable[..., list[int]], name: str, k: int
) -> None:
    speculative = events(trained, k=k, rule="exact-match", **SAMPLED, **PENALTIES.get(name, {}))
    assert [t for e in speculative for t in e.token_ids] == plain(name, "exact-match")
    assert speculative[-1].stats.accepted > 0
    assert plain(name, "rejection") == plain(name, "exact-match")  # plain knows no rule


def test_proposals_from_the_text_are_accepted_by_exact_match_whatever_the_rule(trained: Outrider) -> None:
    """They were drawn from no distribution, so no ratio can accept them; the answer to a seed is plain decoding's."""
    params = SamplingParams(max_new_tokens=60, temperature=0.6, seed=7, rule="rejection")
    plain, proposed = (list(trained.generate(3 * PROMPT, params, k=k, drafter=name)) for k, name in ((0, None), (8, "ngram")))
    assert [t for e in proposed for t in e.token_ids] == [t for e in plain for t in e.token_ids]
    assert 0 < proposed[-1].stats.accepted < proposed[-1].stats.drafted


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_is_that_of_transformers(trained: Outrider, model: LlamaForCausalLM, penalty: float) -> None:
    inputs = AutoTokenizer.from_pretrained(PAIR / "target")(PROMPT, return_tensors="pt")
    ours = ids(trained, k=4, repetition_penalty=penalty)
    theirs = model.generate(
        inputs.input_ids, do_sample=False, max_new_tokens=len(ours), repetition_penalty=penalty, pad_token_id=0
    )
    assert theirs[0, inputs.input_ids.shape[1] :].tolist() == ours


def test_penalties_follow_the_documented_formula(trained: Outrider, model: LlamaForCausalLM) -> None:
    """Plain decoding, written out once more: logits - frequency * count - presence * (count > 0), of the answer alone."""
    tokens = trained.text.encode(PROMPT, chat=False)
    answer: list[int] = []
    for _ in range(40):
        with torch.no_grad():
            logits = model(torch.tensor([tokens + answer])).logits[0, -1].double().numpy()
        counts = np.bincount(answer, minlength=len(logits))
        answer.append(int((logits - 0.9 * counts - 0.6 * (counts > 0)).argmax()))
    got = ids(trained, k=4, frequency_penalty=0.9, presence_penalty=0.6, max_new_tokens=40)
    assert got == answer[: len(got)]
    assert len(got) > 20


@pytest.mark.parametrize("k", [0, 4])
def test_a_bias_bans_or_forces_a_token(trained: Outrider, k: int) -> None:
    token = ids(trained)[5]
    assert token not in ids(trained, k=k, logit_bias={token: -100})
    assert set(ids(trained, k=k, logit_bias={77: 100}, max_new_tokens=9)) == {77}


@pytest.mark.in_turn(runs=lambda case: (case["temperature"] == 0) == (case["k"] in (0, 4)))
@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_stop_tokens_end_the_text_and_are_banned_before_the_minimum_length(
    trained: Outrider, k: int, temperature: float
) -> None:
    free = ids(trained, k=k, temperature=temperature, seed=5)
    end = free[12]
    stopped = events(trained, k=k, temperature=temperature, seed=5, stop_token_ids=[end])
    assert [t for e in stopped for t in e.token_ids] == free[: free.index(end) + 1]
    assert stopped[-1].finish_reason == "stop"
    longer = ids(trained, k=k, temperature=temperature, seed=5, stop_token_ids=[end], min_new_tokens=30)
    assert end not in longer[:30]
    assert len(longer) >= 30
    late = ids(trained, k=k, temperature=temperature, seed=5, stop_token_ids=[77], min_new_tokens=9, logit_bias={77: 100})
    assert late.index(77) == 9  # the ban ends when it should
    assert len(late) == 10


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("truncation", [{"top_p": 0.999}, {"top_k": 320}])
def test_truncation_that_reaches_beyond_the_first_candidates_is_exact(
    tiny: Outrider, k: int, truncation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The random pair's distributions are flat: top_p keeps nearly all of 320 tokens, and 256 candidates are too few."""
    watch = Watch()
    watched = tiny.observed(watch)
    monkeypatch.setattr("outrider.audit.controls.CHECKED", 1)
    for seed in range(20):
        ids(watched, "the quick", k, temperature=3.0, seed=seed, max_new_tokens=9, **truncation)
    assert watch.checked > 100
    assert watch.disagreed == 0


def test_greedy_needs_no_candidates(trained: Outrider) -> None:
    """The most likely token is never cut, so top_p and top_k cost nothing there."""
    request = trained.request([1], SamplingParams(top_p=0.9, top_k=50, min_p=0.1))
    assert request.sampling.candidates == 1
    assert ids(trained, k=4, top_p=0.9, top_k=50, min_p=0.1) == ids(trained)


@pytest.mark.parametrize("k", [0, 4])
def test_stop_strings_are_not_looked_for_before_the_minimum_length(trained: Outrider, k: int) -> None:
    whole = "".join(event.text for event in events(trained, k=k))
    stop = whole.split()[1]
    short = events(trained, k=k, stop=stop)
    assert "".join(event.text for event in short) == whole[: whole.index(stop)]
    late = events(trained, k=k, stop=stop, min_new_tokens=20)
    assert "".join(event.text for event in late).startswith(whole[: whole.index(stop) + len(stop)])
    assert late[-1].stats.emitted >= 20


def test_a_stop_string_that_is_a_special_token_ends_the_text_at_it(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    reseal(bundle, generation=Generation(eos_token_ids=[1], special_tokens={}))
    outrider = Outrider.load(bundle)
    always: dict[str, Any] = {"logit_bias": {0: 100.0}, "max_new_tokens": 6}
    assert len(ids(outrider, "the lazy dog", **always)) == 6
    for k in (0, 4):
        *_, last = events(outrider, "the lazy dog", k=k, stop=["x", END], **always)
        assert (last.stats.emitted, last.finish_reason) == (1, "stop")
    assert len(ids(outrider, "the lazy dog", stop=END, min_new_tokens=3, **always)) == 4


def test_the_end_of_text_is_banned_before_the_minimum_length(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    free = ids(Outrider.load(bundle), "the lazy dog", max_new_tokens=12)
    reseal(bundle, generation=Generation(eos_token_ids=[free[3]], special_tokens={}))
    outrider = Outrider.load(bundle)
    assert len(ids(outrider, "the lazy dog", max_new_tokens=12)) == free.index(free[3]) + 1
    for k in (0, 1, 4):
        got = ids(outrider, "the lazy dog", k=k, max_new_tokens=12, min_new_tokens=9)
        assert free[3] not in got[:9]
        assert got == ids(outrider, "the lazy dog", max_new_tokens=12, min_new_tokens=9)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_logprobs_are_the_targets_own(trained: Outrider, model: LlamaForCausalLM, k: int, temperature: float) -> None:
    """Of the logits as they are: neither the temperature nor a penalty changes them."""
    prompt = trained.text.encode(PROMPT, chat=False)
    chosen: dict[str, Any] = {"temperature": temperature, "seed": 3, "repetition_penalty": 1.1, "max_new_tokens": 30}
    got = events(trained, k=k, logprobs=3, **chosen)
    tokens = [token for event in got for token in event.token_ids]
    assert tokens == ids(trained, k=k, **chosen)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    want = torch.log_softmax(logits, dim=-1).numpy()
    each = [logprobs for event in got for logprobs in event.logprobs or ()]
    assert len(each) == len(tokens)
    for row, (token, logprobs) in enumerate(zip(tokens, each, strict=True)):
        assert logprobs.logprob == pytest.approx(want[row, token], abs=2e-4)
        best = np.argsort(-want[row])[:3]
        assert [top for top, _ in logprobs.top] == best.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(want[row, best].tolist(), abs=2e-4)
    alone = [logprobs for event in events(trained, k=k, logprobs=0, **chosen) for logprobs in event.logprobs or ()]
    assert [(round(each.logprob, 4), each.top) for each in alone] == [(round(one.logprob, 4), ()) for one in each]
    assert events(trained, k=k, **chosen)[0].logprobs is None


# ------------------------------------------------------------------------------------------------ seeds


@pytest.mark.parametrize("rule", ["rejection", pytest.param("exact-match", marks=pytest.mark.slow)])
def test_a_seed_fixes_the_answer_across_processes_and_whatever_was_asked_before(
    trained_bundle: Path, trained: Outrider, rule: str
) -> None:
    chosen: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "rule": rule, "k": 4, "max_new_tokens": 40}
    here = ids(trained, seed=11, **chosen)
    ids(trained, "Once upon a time", seed=12, **chosen)  # another request between
    assert ids(trained, seed=11, **chosen) == here
    assert ids(trained, seed=12, **chosen) != here
    options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    done = run("generate", trained_bundle, "--prompt", PROMPT, "--json", "--seed=11", *options)
    assert json.loads(done.stdout)["token_ids"] == here


def test_without_a_seed_answers_differ(trained: Outrider) -> None:
    assert len({tuple(ids(trained, temperature=1.0, max_new_tokens=30)) for _ in range(4)}) == 4


def test_the_random_numbers_of_a_seed_never_change() -> None:
    """They are part of the promise: another release must give the same answer."""
    sampling = SamplingState(SamplingParams(seed=1), [1], [], 10)
    first = [[int(number * 2**24) for number in place] for place in sampling.uniforms(0, 2)]
    assert first == RECORDED
    assert np.array_equal(sampling.uniforms(63, 70)[:1], SamplingState(SamplingParams(seed=1), [1], [], 10).uniforms(63, 1))
    assert not np.array_equal(SamplingState(SamplingParams(seed=-1), [1], [], 10).uniforms(0, 2), sampling.uniforms(0, 2))
    same = SamplingState(SamplingParams(seed=np.int64(1)), [1], [], 10)  # type: ignore[arg-type]
    assert np.array_equal(same.uniforms(0, 2), sampling.uniforms(0, 2))
    one, other = (SamplingState(SamplingParams(seed=0), [1], [], 10).uniforms(0, 2) for _ in range(2))
    assert np.array_equal(one, other)  # 0 is a seed as well


RECORDED = [[5093026, 14238970, 2619506, 521879, 15103998], [873533, 12500498, 4131658, 6849496, 2834617]]
