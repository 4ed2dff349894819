"""Structured output: speculative text under a grammar's mask is plain text under the same mask, whatever the draft and k.

Nothing may weaken these tests.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.runtime.generation import Event, Outrider
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.grammar.matcher import LocalMatcher
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.buffers import VERIFIER
from outrider.runtime.rounds.masks import mask_row
from outrider.runtime.rounds.rounds import RoundResult
from outrider.tests.deferred import deferred
from outrider.tests.runtime.grammar.grammars import GRAMMARS, NOTHING, PROMPT, SCHEMA, K, run, text, tokens
from outrider.tests.support import PAIR

MODES = (*K, "auto", "ngram", "at random")
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 3}}
DRAFTS = (
    "trained",
    "self",
    "random head",
    "trained head",
    "trained parallel",
    "random block",
    "plain block",
    "random parallel-head",
    "openvino",
)


def fits(name: str, text: str) -> bool:
    """Whether a whole answer is what the grammar of that name asks for, by other means than the grammar's engine."""
    if name in ("forces", "branches"):
        return text in (GRAMMARS[name].choice or ())
    if name in ("schema", "object"):
        import jsonschema

        value = json.loads(text)
        jsonschema.validate(value, SCHEMA if name == "schema" else {"type": "object"})
        return True
    if name == "grammar":
        return re.fullmatch(r"[\d() +-]+", text) is not None and isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)
    pattern = GRAMMARS[name].regex or "(apple|pear|plum)(,(apple|pear|plum))*"
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def plain(bundles: dict[str, Outrider]) -> Callable[[str, str, str], list[Event]]:
    """Plain decoding by a draft's bundle, a sampling and a grammar."""
    return functools.cache(lambda draft, sampling, name: run(bundles[draft], name, 0, **SAMPLING[sampling]))


def cases() -> list[Any]:
    """Every grammar, greedy and seeded, with every draft in every mode. In `make test`, the trained pair runs each grammar in
    each mode, and so do the other drafts together, each of them in every mode; half of them greedy, half seeded."""

    def slow(draft: str, mode: int | str, sampling: str, name: str) -> bool:
        turn, seeded, at = DRAFTS.index(draft) + MODES.index(mode), [*SAMPLING].index(sampling), [*GRAMMARS].index(name)
        if draft == DRAFTS[0]:
            return (turn + at + seeded) % 2 != 0
        return turn % 2 != seeded or at != (turn + len(GRAMMARS) // 2 * seeded) % len(GRAMMARS)

    product = itertools.product(DRAFTS, MODES, SAMPLING, GRAMMARS)
    return [pytest.param(*each, marks=pytest.mark.slow) if slow(*each) else pytest.param(*each) for each in product]


@pytest.mark.parametrize(("draft", "mode", "sampling", "name"), cases())
def test_masked_speculative_text_is_masked_plain_text(
    bundles: dict[str, Outrider],
    plain: Callable[[str, str, str], list[Event]],
    draft: str,
    mode: int | str,
    sampling: str,
    name: str,
) -> None:
    events, want = run(bundles[draft], name, mode, **SAMPLING[sampling]), plain(draft, sampling, name)
    assert tokens(events) == tokens(want)
    assert text(events) == text(want)
    assert events[-1].finish_reason == want[-1].finish_reason
    if want[-1].finish_reason == "stop":
        assert fits(name, text(want))
    else:
        assert name in ("object", "grammar", "gbnf", "schema")  # the others end by themselves


@pytest.mark.parametrize("name", GRAMMARS)
def test_plain_masked_text_is_that_of_transformers_with_the_mask(bundles: dict[str, Outrider], name: str) -> None:
    """Written out once more: each token is the likeliest one allowed by the grammar, read from its start, after all before."""
    model = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    text_ids = AutoTokenizer.from_pretrained(PAIR / "target")(PROMPT).input_ids
    outrider = bundles["trained"]
    answer = tokens(run(outrider, name, 0))
    with torch.no_grad():
        logits = model(torch.tensor([text_ids + answer])).logits[0, len(text_ids) - 1 : -1].numpy()
    for at, token in enumerate(answer):
        matcher = outrider.grammars.begin(GRAMMARS[name])
        matcher.advance(answer[:at])
        (allowed,), _ = matcher.masks([])
        assert token == np.where(allowed, logits[at], -np.inf).argmax()


def test_without_masks_the_text_leaves_its_grammar(bundles: dict[str, Outrider], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what the tests above compare depends on the masks, and a token that is not allowed is noticed."""
    free = tokens(list(bundles["trained"].generate(PROMPT, SamplingParams(max_new_tokens=90), k=0)))
    assert all(tokens(run(bundles["trained"], name, 4)) != free for name in GRAMMARS)
    monkeypatch.setattr("outrider.runtime.rounds.rounds.mask_row", lambda *_: None)
    for name in GRAMMARS:
        with pytest.raises(GrammarError, match="not in the grammar"):
            run(bundles["trained"], name, 4)


def test_drafts_are_masked_as_the_target_is(bundles: dict[str, Outrider], monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the target is always accepted, which it would not be if its own tokens were not masked."""
    for k in (1, 8):
        for name in GRAMMARS:
            stats = run(bundles["self"], name, k)[-1].stats
            assert stats.rejected == 0, (name, k)
    monkeypatch.setattr(
        "outrider.runtime.rounds.rounds.mask_row", lambda *rest: mask_row(*rest) if rest[-1] == VERIFIER else None
    )
    assert run(bundles["self"], "forbids", 4)[-1].stats.rejected > 0


def test_what_the_grammar_forces_is_drafted_without_a_drafter(bundles: dict[str, Outrider]) -> None:
    for k in (4, 8, "auto"):
        stats = run(bundles["trained"], "forces", k)[-1].stats
        assert stats.rounds_by_drafter["grammar"] >= stats.rounds - 2
        assert stats.accepted_by_drafter["grammar"] >= 0.8 * (stats.emitted - stats.rounds)
    assert run(bundles["trained"], "forces", 0)[-1].stats.drafted == 0


@pytest.mark.parametrize("name", GRAMMARS)
def test_where_the_mask_leaves_one_token_it_is_forced(bundles: dict[str, Outrider], name: str) -> None:
    answer = tokens(run(bundles["trained"], name, 0))
    matcher, ends = bundles["trained"].grammars.begin(GRAMMARS[name]), bundles["trained"].manifest.generation.eos_token_ids
    left_one = 0
    for token in answer:
        (mask,), _ = matcher.masks([])
        if mask.sum() == 1 and token not in ends:
            assert matcher.forced(K[-1])[0] == token
            left_one += 1
        matcher.advance([token])
    assert left_one or name not in ("forces", "branches", "schema", "gbnf")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "seeded"])
def test_a_device_that_runs_ahead_waits_once_for_a_mask(
    trained_bundles: Callable[..., Path], bundles: dict[str, Outrider], sampling: dict[str, Any]
) -> None:
    """As on a GPU: a masked round is two recordings with the host between, and a plain one stays one."""
    queued = deferred(trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K)))
    free = SamplingParams(max_new_tokens=40, **sampling)
    want = {name: tokens(run(bundles["trained"], name, 0, **sampling)) for name in GRAMMARS}
    want_free = tokens(list(bundles["trained"].generate(PROMPT, free, k=4)))
    for name in GRAMMARS:  # what the first ones have recorded is replayed for the others
        for k in (0, 4, "ngram"):
            assert tokens(run(queued, name, k, **sampling)) == want[name]
        assert tokens(list(queued.generate(PROMPT, free, k=4))) == want_free
    segments = set(queued.rounds.recorder.recorded)
    whole = {
        segment
        for segment in segments
        if segment.begin == 0 and segment.end == len(queued.rounds.launches.steps(segment.shape))
    }
    assert whole
    assert segments - whole


def dead_ends(outrider: Outrider) -> tuple[str, list[str]]:
    """What the target says, and ten or so of its beginnings that the draft would otherwise have continued."""
    said: list[int] = []
    wrong: set[str] = set()

    def watch(launches: Any, shape: Any, index: int, lane: Any, result: RoundResult) -> RoundResult:
        for drafted, token in zip(result.drafted, result.tokens, strict=False):
            if drafted != token and drafted not in outrider.manifest.generation.eos_token_ids:
                wrong.add(outrider.text.decode([*said, drafted]))
            said.append(token)
        said.extend(result.tokens[len(result.drafted) :])
        return result

    forbids = StructuredOutputs(regex="[^eo]{60,160}")
    params = SamplingParams(max_new_tokens=90, structured_outputs=forbids, repetition_penalty=1.3)
    for k in K:
        said.clear()
        want = text(list(outrider.observed(watch).generate(PROMPT, params, k=k)))
    dead = [prefix for prefix in sorted(wrong) if not want.startswith(prefix)]
    assert len(dead) > 5
    return want, dead[:: -(-len(dead) // 10)]


@pytest.mark.in_turn(runs=lambda case: case["draft"] in ("trained", "random block"))  # tokens one by one, and all at once
@pytest.mark.parametrize("draft", ["trained", "random head", "random block", "plain block"])
def test_a_draft_that_runs_into_a_dead_end_changes_nothing(
    bundles: dict[str, Outrider], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """What the target says anyway is in the grammar, and its draft's ways are, too, each with a dead end behind it."""
    outrider = bundles[draft]
    monkeypatch.setattr(outrider, "policy", outrider.adaptive_policy())  # what it has learned may be not to draft
    want, dead = dead_ends(outrider)

    def answer(k: int | str, *dead: str) -> str:  # and the error that it ends with
        lines = [f"start: {json.dumps(want)}", *(f" | {json.dumps(prefix)} NOTHING" for prefix in dead), NOTHING]
        grammar = StructuredOutputs(grammar="\n".join(lines))
        params = SamplingParams(max_new_tokens=90, structured_outputs=grammar, repetition_penalty=1.3)
        said = ""
        try:
            for event in outrider.generate(PROMPT, params, k=k):
                said += event.text
        except GrammarError as error:
            said += str(error)
        return said

    begun = Counter[str]()
    make = LocalMatcher.__init__

    def counting(self: LocalMatcher, compiled: Callable[[], Any], vocab_rows: int, end_ids: Sequence[int]) -> None:
        make(self, lambda: (begun.update(["made"]), compiled())[1], vocab_rows, end_ids)

    monkeypatch.setattr(LocalMatcher, "__init__", counting)
    ways = [dead, *([each] for each in dead)]
    plain = [answer(0, *each) for each in ways]
    assert plain.count(want) > len(dead) / 2  # and in the others, the target goes there itself
    usual = begun["made"]
    begun.clear()
    modes = (2, 8, "auto")
    for k in modes:
        assert [answer(k, *each) for each in ways] == plain
    assert begun["made"] > usual * len(modes)  # some answers needed more than one matcher
    # The control: no row behind such a token is masked.
    masks = LocalMatcher.masks
    monkeypatch.setattr(LocalMatcher, "masks", lambda self, drafted: (masks(self, drafted)[0], 1 + K[-1]))
    assert [answer(4, *each) for each in ways] != plain
