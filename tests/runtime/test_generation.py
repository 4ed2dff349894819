"""Requests: what ends a generation, what is refused, and that a bundle survives an abandoned one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import Generation
from outrider.errors import EngineError, UsageError
from outrider.export.pair import export_pair
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import NONE
from outrider.runtime.scheduler import Scheduler
from outrider.runtime.stats import Stats
from outrider.tests.support import BROKEN, build, llama, reseal, write_checkpoint


def text_of(outrider: Outrider, prompt: str, *, k: int | str = "auto", **params: Any) -> str:
    return "".join(event.text for event in outrider.generate(prompt, SamplingParams(**params), k=k))


def ids_of(outrider: Outrider, prompt: str | list[int], *, k: int | str = "auto", **params: Any) -> list[int]:
    events = outrider.generate(prompt, SamplingParams(**params), k=k)
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_never_more_tokens_than_asked_for(tiny: Outrider, limit: int, k: int) -> None:
    events = list(tiny.generate("the quick", SamplingParams(max_new_tokens=limit), k=k))
    assert sum(len(event.token_ids) for event in events) == limit
    assert events[-1].finish_reason == "length"
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)


def test_token_ids_are_a_prompt_too(tiny: Outrider) -> None:
    ids = tiny.text.encode("the quick", chat=False)
    assert ids_of(tiny, ids, max_new_tokens=9) == ids_of(tiny, "the quick", max_new_tokens=9)


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
def test_the_end_of_text_token_ends_the_text_anywhere_in_a_round(tiny_export: Path, tmp_path: Path, k: int) -> None:
    """Each of the first tokens in turn becomes the end of text, so that it falls on every position of a round."""
    bundle = build(tiny_export, tmp_path / "bundle")
    free = ids_of(Outrider.load(bundle), "the lazy dog", max_new_tokens=12, k=0)
    for end in dict.fromkeys(free):
        reseal(bundle, generation=Generation(eos_token_ids=[end], special_tokens={}))
        events = list(Outrider.load(bundle).generate("the lazy dog", SamplingParams(max_new_tokens=12), k=k))
        stats = events[-1].stats
        assert [token for event in events for token in event.token_ids] == free[: free.index(end) + 1]
        assert events[-1].finish_reason == "stop"
        assert stats.emitted == stats.accepted + stats.own == free.index(end) + 1
        assert stats.unexamined >= 0


@pytest.mark.parametrize("k", [0, 4])
def test_a_stop_string_ends_the_text(tiny: Outrider, k: int) -> None:
    whole = text_of(tiny, "the quick", max_new_tokens=40, k=0)
    stop = whole[20:24]
    events = list(tiny.generate("the quick", SamplingParams(max_new_tokens=40, stop=[stop]), k=k))
    assert "".join(event.text for event in events) == whole[: whole.index(stop)]
    assert events[-1].finish_reason == "stop"


def test_a_prompt_that_fills_the_capacity_still_gets_one_token(tiny: Outrider) -> None:
    capacity = tiny.build.capacity
    events = list(tiny.generate([5] * capacity, k=4))
    assert [len(event.token_ids) for event in events] == [1]
    assert events[-1].finish_reason == "capacity"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([5] * 161, {}, "161 tokens; the bundle's capacity is 160"),
        ([320], {}, "token id outside 0..319"),
        ([-1], {}, "token id outside"),
        ("a\udce9b", {}, "not UTF-8"),
        ("the", {"k": 3}, "k = 3 was not built into this bundle; it has k = 0, 1, 2, 4, 8"),
        ("the", {"k": -1}, "k = -1 was not built"),
    ],
)
def test_invalid_requests_are_refused_at_once(
    tiny: Outrider, prompt: str | list[int], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        tiny.generate(prompt, **options)  # type: ignore[arg-type]
    assert caught.value.hint


def test_an_abandoned_generation_leaves_the_bundle_valid(tiny: Outrider) -> None:
    fresh = ids_of(tiny, "the lazy dog", max_new_tokens=20, k=4)
    abandoned = tiny.generate("0123456789", SamplingParams(max_new_tokens=60), k=8)
    next(abandoned)
    assert ids_of(tiny, "the lazy dog", max_new_tokens=20, k=4) == fresh
    with pytest.raises(UsageError, match="another generation was started"):
        next(abandoned)


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_what_is_drafted_does_not_depend_on_the_request_before(trained: Outrider, drafter: str) -> None:
    """A drafter that kept another text would cost acceptance, which no answer shows."""
    texts = (
        "Once upon a time there was a little dog. " * 3,
        "Question: Tom has 5 apples and buys 7 more. How many apples has Tom?",
    )

    def accepted(*prompts: str) -> int:
        fresh = trained.observed(lambda launches, shape, index, lane, result: result)
        scheduler = Scheduler(fresh, k=4, drafter=drafter)
        for prompt in prompts:
            request = scheduler.submit(trained.text.encode(prompt, chat=False), SamplingParams(max_new_tokens=40))
            while scheduler.busy:
                scheduler.step()
        return request.stats.accepted

    assert accepted(*texts) == accepted(texts[1]) > 0


def test_logits_with_nan_stop_the_request(broken_bundle: Path) -> None:
    outrider = Outrider.load(broken_bundle)
    assert ids_of(outrider, [1, 2], max_new_tokens=1)
    before = ids_of(outrider, [1, 2, 3], max_new_tokens=1)
    with pytest.raises(EngineError, match="contain NaN or infinity"):
        ids_of(outrider, [1, 2, 3, 4, BROKEN], max_new_tokens=3)
    assert ids_of(outrider, [1, 2, 3], max_new_tokens=1) == before  # the NaN in the cache is gone


@pytest.mark.slow
def test_a_token_that_the_draft_lacks_costs_only_acceptance(tmp_path: Path) -> None:
    """Heads of different padded sizes: the target has rows that the draft's embedding lacks, and prefers one of them."""
    target = llama(vocab_size=384, tie_word_embeddings=False)
    target.lm_head.weight.data[380] = 100 * target.lm_head.weight.data[7]
    write_checkpoint(tmp_path / "target", target)
    write_checkpoint(tmp_path / "draft", llama(seed=1, vocab_size=352))
    export_pair(str(tmp_path / "target"), str(tmp_path / "draft"), tmp_path / "onnx", precision="fp32")
    outrider = Outrider.load(build(tmp_path / "onnx", tmp_path / "bundle"))
    assert [read_manifest(tmp_path / "bundle").models[role].vocab_rows for role in ("target", "draft")] == [384, 384]
    plain = ids_of(outrider, "the quick brown", max_new_tokens=40, k=0)
    assert max(plain) >= 352
    assert ids_of(outrider, "the quick brown", max_new_tokens=40, k=4) == plain


def test_rates_have_their_documented_denominators() -> None:
    stats = Stats()
    stats.count("model", drafted=4, accepted=4, rejected=0, own=1)
    stats.count("model", drafted=4, accepted=1, rejected=1, own=1)
    stats.count("model", drafted=2, accepted=0, rejected=1, own=1)
    stats.count(NONE, drafted=0, accepted=0, rejected=0, own=1)  # a plain round at the end
    assert stats.mean_acceptance_length == 1 + 5 / 3
    assert stats.acceptance_rate == 5 / 10
    assert stats.per_position_rates == [2 / 3, 1 / 3, 1 / 2, 1 / 2]
    assert (stats.emitted, stats.rejected, stats.unexamined, stats.rounds) == (9, 2, 3, 4)


def test_totals_are_the_sums_of_the_counters() -> None:
    one, other = Stats(prompt_tokens=3, seconds=1.5), Stats(prompt_tokens=4, seconds=0.5)
    one.count("model", drafted=1, accepted=1, rejected=0, own=1)
    other.count("ngram", drafted=3, accepted=2, rejected=1, own=1)
    one.add(other)
    assert (one.prompt_tokens, one.seconds, one.rounds, one.emitted) == (7, 2.0, 2, 5)
    assert (one.drafted_at, one.accepted_at) == ([2, 1, 1], [2, 1, 0])


def test_a_draft_reads_for_one_request_in_each_round(trained_bundles: Callable[..., Path]) -> None:
    outrider = Outrider.load(trained_bundles(capacity=512, batch=2, k=[1, 4]), slots=2)
    draft, prompts = outrider.decoder.drafters["model"], [[token] * 150 for token in (40, 50)]
    assert isinstance(draft, ModelDrafter)
    scheduler = Scheduler(outrider, k=4, drafter="model")
    requests, before, pieces = [scheduler.submit(each, SamplingParams(max_new_tokens=40)) for each in prompts], [0, 0], []
    while scheduler.busy:
        scheduler.step()
        after = [len(draft.written(slot)) for slot in range(2)]
        pieces.append([max(after[slot] - before[slot], 0) for slot in range(2)])
        before = after
    assert all(min(piece) <= 5 for piece in pieces)  # a round's own tokens
    chunk = outrider.build.max_prompt_chunk
    assert sum(5 < max(piece) <= chunk + 5 for piece in pieces) > 150 // chunk  # while others wait
    assert all(request.stats.drafted > 0 for request in requests)


def test_a_draft_reads_the_prompt_after_the_first_token(trained: Outrider) -> None:
    prompt = "The old man walked along the road, and the dog ran on before him. " * 12
    events, draft = trained.generate(prompt, SamplingParams(max_new_tokens=40), k=1), trained.decoder.drafters["model"]
    assert isinstance(draft, ModelDrafter)
    assert len(next(events).token_ids) == 1
    assert draft.written(0) == []
    *_, last = events
    assert len(draft.written(0)) > last.stats.prompt_tokens
    assert last.stats.drafted > 0
    assert 0 < last.stats.prompt_seconds < last.stats.seconds
    assert 0 <= last.stats.outside_engines < 1
