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
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
import torch
from llguidance import LLParserLimits
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider.audit.controls import RandomPolicy
from outrider.errors import OutriderError, UsageError
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.grammar.compiler import LocalGrammars, rehearse
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.grammar.matcher import LocalMatcher
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Request
from outrider.runtime.rounds.buffers import VERIFIER
from outrider.runtime.rounds.masks import mask_row
from outrider.runtime.rounds.reference import named_settings, warp
from outrider.runtime.rounds.rounds import RoundResult
from outrider.runtime.rounds.sampling import SamplingState
from outrider.runtime.scheduler import MAX_LATE, Scheduler
from outrider.tests.deferred import deferred
from outrider.tests.support import PAIR, build, prefill, tokenizer

K = (1, 2, 4, 8)
MODES = (*K, "auto", "ngram", "at random")
PROMPT = "Customer: Hi, I would like to order a coffee.\nAgent:"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "medium", "large"]},
        "price": {"type": "integer", "minimum": 1, "maximum": 99},
        "extras": {"type": "array", "items": {"enum": ["milk", "sugar"]}, "maxItems": 3},
        "address": {"type": "object", "properties": {"street": {"type": "string", "maxLength": 12}}, "required": ["street"]},
    },
    "required": ["name", "size", "price", "extras", "address"],
    "additionalProperties": False,
}
SUM = 'start: term (OPERATOR term)*\nterm: /[0-9]{1,3}/ | "(" start ")"\nOPERATOR: " + " | " - "\n'
GRAMMARS: dict[str, StructuredOutputs] = {
    "forces": StructuredOutputs(choice=[" Of course, what would you like to drink today, and where shall I bring it?"]),
    "branches": StructuredOutputs(choice=[" yes please", " not at all", " maybe so", " yes, of course I can do that for you"]),
    "forbids": StructuredOutputs(regex="[^e]{20,80}"),
    "multi-byte": StructuredOutputs(regex="(naïve|café|中文|🙂){3,5}"),
    "schema": StructuredOutputs(json=SCHEMA),
    "object": StructuredOutputs(json_object=True),
    "grammar": StructuredOutputs(grammar=SUM),
    "gbnf": StructuredOutputs(grammar='root ::= item ("," item)*\nitem ::= "apple" | "pear" | "plum"'),
}
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
def bundles(
    trained_bundles: Callable[..., Path],
    drafter_bundles: Callable[..., Path],
    self_export: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Outrider]:
    options: dict[str, Any] = {"capacity": 256, "max_prompt_chunk": 16, "k": list(K)}

    class Loaded(dict[str, Outrider]):
        def __missing__(self, name: str) -> Outrider:
            if name == "trained":
                bundle = trained_bundles("fp32", **options)
            elif name == "openvino":
                bundle = trained_bundles("fp32", backend="openvino", **options)
            elif name == "self":
                bundle = build(self_export, tmp_path_factory.mktemp("grammar") / "bundle", **options)
            else:
                bundle = drafter_bundles("int4" if name == "random head" else "fp32", name, **options)
            self[name] = Outrider.load(bundle)
            return self[name]

    return Loaded()


def run(outrider: Outrider, name: str, k: int | str, **params: Any) -> list[Event]:
    chosen = SamplingParams(max_new_tokens=90, structured_outputs=GRAMMARS[name], **params)
    if k == "at random":
        usual, outrider.policy = outrider.policy, RandomPolicy(outrider.adaptive_policy())
        events = list(outrider.generate(PROMPT, chosen))
        outrider.policy = usual
        return events
    if k == "ngram":
        return list(outrider.generate(PROMPT, chosen, k=K[-1], drafter="ngram"))
    return list(outrider.generate(PROMPT, chosen, k=k))


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events)


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


@pytest.mark.parametrize("k", [4, "auto", "ngram"])
def test_forced_tokens_are_drafted_for_free_in_batches(trained_bundles: Callable[..., Path], k: int | str) -> None:
    """In rounds of their own, and beside proposals for other requests."""
    bundle = trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K), batch=4)
    batched = Outrider.load(bundle, slots=4)
    named = {"k": K[-1], "drafter": "ngram"} if k == "ngram" else {"k": k}
    for others in (["forces"] * 3, ["none"] * 3) if k == "ngram" else (["forces"] * 3,):
        scheduler = Scheduler(batched, **named)
        prompt = batched.text.encode(PROMPT + " a coffee, a coffee, a coffee,", chat=False)
        params = [SamplingParams(max_new_tokens=40, structured_outputs=GRAMMARS.get(name)) for name in ("forces", *others)]
        first, *_ = scheduler.submit_all([(prompt, each) for each in params])
        while scheduler.busy:
            for _, event in scheduler.step():
                assert not isinstance(event, OutriderError)
        forced = first.stats.rounds_by_drafter["grammar"]
        assert forced >= first.stats.rounds - 1  # of the last one, the end is all that is left


def test_requests_with_and_without_grammars_share_rounds(trained_bundles: Callable[..., Path]) -> None:
    bundle = trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K), batch=4)
    alone, batched = Outrider.load(bundle), Outrider.load(bundle, slots=4)
    chosen = [
        SamplingParams(max_new_tokens=60, structured_outputs=GRAMMARS.get(name), temperature=heat, seed=5, rule="exact-match")
        for name in (*GRAMMARS, "none")
        for heat in (0.0, 0.8)
    ]
    want = [tokens(list(alone.generate(PROMPT, params, k=0))) for params in chosen]
    for k in (0, 4, "auto"):
        scheduler = Scheduler(batched, k=k)
        requests = scheduler.submit_all([(batched.text.encode(PROMPT, chat=False), params) for params in chosen])
        answers: dict[Request, list[int]] = {request: [] for request in requests}
        while scheduler.busy:
            for request, event in scheduler.step():
                assert not isinstance(event, OutriderError)
                answers[request] += event.token_ids
        assert [answers[request] for request in requests] == want


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


NOTHING = "NOTHING: /x/ & /y/"  # what follows this rule cannot be reached, which llguidance finds when it is there


def dead_ends(outrider: Outrider) -> tuple[str, list[str]]:
    """What the target says, and ten or so of its beginnings that the draft would have gone on with otherwise."""
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
        make(self, lambda: (begun.update(["anew"]), compiled())[1], vocab_rows, end_ids)

    monkeypatch.setattr(LocalMatcher, "__init__", counting)
    ways = [dead, *([each] for each in dead)]
    plain = [answer(0, *each) for each in ways]
    assert plain.count(want) > len(dead) / 2  # and in the others, the target goes there itself
    usual = begun["anew"]
    begun.clear()
    modes = (2, 8, "auto")
    for k in modes:
        assert [answer(k, *each) for each in ways] == plain
    assert begun["anew"] > usual * len(modes)  # some answers needed more than one matcher
    # The control: no row behind such a token is masked.
    masks = LocalMatcher.masks
    monkeypatch.setattr(LocalMatcher, "masks", lambda self, drafted: (masks(self, drafted)[0], 1 + K[-1]))
    assert [answer(4, *each) for each in ways] != plain


CHOICES = [" I", " We", " The", " Yes", " No"]
CHOSEN = {
    "choices": StructuredOutputs(choice=CHOICES),
    "a dead end": StructuredOutputs(grammar=f'start: " I" | " We" NOTHING | " The" | " Yes" | " No"\n{NOTHING}'),
}
FAILED = "(a dead end)"
BEFORE, HEAT = "the quick", 0.2  # the tiny pair is random: at a higher temperature the choices would be nearly as likely


def distribution(outrider: Outrider, k: int, structured: StructuredOutputs, heat: float = HEAT) -> list[int]:
    """How often each choice is drawn with 600 seeds, and how often none is."""
    drawn = []
    for seed in range(600):
        params = SamplingParams(temperature=heat, max_new_tokens=12, seed=seed, rule="rejection", structured_outputs=structured)
        try:
            drawn.append(text(list(outrider.generate(BEFORE, params, k=k))))
        except GrammarError:
            drawn.append(FAILED)
    return [drawn.count(each) for each in [*CHOICES, FAILED]]


def expected(outrider: Outrider, structured: StructuredOutputs) -> list[float]:
    """The probability of each choice under the mask, and of none: the product of its tokens' masked probabilities, over all
    spellings."""
    state = SamplingState(SamplingParams(temperature=HEAT), [], [], outrider.vocab_rows)
    prompt = outrider.text.encode(BEFORE, chat=False)
    session = outrider.engines.sessions(1)["target"]
    chances = dict.fromkeys([*CHOICES, FAILED], 0.0)
    waiting: list[tuple[list[int], float]] = [([], 1.0)]
    ends = outrider.manifest.generation.eos_token_ids
    while waiting:
        answer, chance = waiting.pop()
        matcher = outrider.grammars.begin(structured)
        try:
            matcher.advance(answer)
            (allowed,), _ = matcher.masks([])
        except GrammarError:
            chances[FAILED] += chance
            continue
        prefill(session, (prompt + answer)[:-1], 16)
        last = np.array([(prompt + answer)[-1:]], dtype=np.int64)
        logits = session.run(last, np.array([len(prompt + answer) - 1]))[0, 0].astype(np.float64)
        p = warp(np.where(allowed, logits, -np.inf), named_settings(state.settings[0]))
        for token in np.flatnonzero(p > 0).tolist():
            if token in ends:
                chances[outrider.text.decode(answer)] += chance * p[token]
            else:
                waiting.append(([*answer, token], chance * p[token]))
    return [*chances.values()]


def likely(seen: list[int], want: list[float]) -> float:
    """How likely counts are that differ from their expectation as much."""
    assert sum(want) == pytest.approx(1, abs=1e-5)
    drawn = [(each, chance) for each, chance in zip(seen, want, strict=True) if chance]
    assert sum(each for each, _ in drawn) == sum(seen)
    return float(
        scipy.stats.chisquare([each for each, _ in drawn], [chance / sum(want) * sum(seen) for _, chance in drawn]).pvalue
    )


@pytest.mark.in_turn(runs=lambda case: case["k"] == 4)
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("k", [0, 1, 4])
def test_sampled_choices_have_the_targets_distribution_under_the_mask(tiny: Outrider, k: int, name: str) -> None:
    want = expected(tiny, CHOSEN[name])
    assert (want[-1] > 0) == (name == "a dead end")
    assert likely(distribution(tiny, k, CHOSEN[name]), want) > 1e-4


@pytest.mark.parametrize("name", CHOSEN)
def test_the_test_of_the_distribution_notices_a_wrong_one(tiny: Outrider, name: str) -> None:
    """The negative control: at another temperature the same test must fail."""
    want = expected(tiny, CHOSEN[name])
    assert likely(distribution(tiny, 4, CHOSEN[name], heat=0.5 * HEAT), want) < 1e-4


def test_logprobs_are_among_the_tokens_that_the_grammar_allows(bundles: dict[str, Outrider]) -> None:
    events = run(bundles["trained"], "branches", 4, logprobs=20)
    for event in events:
        for token, logprobs in zip(event.token_ids, event.logprobs or (), strict=True):
            assert np.isfinite(logprobs.logprob)
            assert token in [each for each, _ in logprobs.top]
            assert sum(np.exp(value) for _, value in logprobs.top) == pytest.approx(1, abs=1e-3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "0 kinds"),
    "two": ({"regex": "a", "choice": ["b"]}, "2 kinds"),
    "a regex that does not parse": ({"regex": "(a"}, r"invalid regex.*\(a: unclosed group"),
    "a pattern that does not parse": ({"json": {"type": "string", "pattern": "(a"}}, r"parse error: \(a: unclosed group"),
    "a number that is rounded": ({"json": {"const": 2**53 + 1}}, "const"),
    "a schema that is not JSON": ({"json": "{"}, "is not valid"),
    "a keyword that is not supported": ({"json": {"type": "string", "not": {"const": "a"}}}, r"\bnot\b"),
    "a keyword that is not known": ({"json": {"type": "string", "maxlength": 3}}, "maxlength"),
    "a bound that is rounded": ({"json": {"type": "integer", "minimum": 1e20, "maximum": 2e20}}, "minimum"),
    "a reference to itself": ({"json": {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}}}, "leads to itself"),
    "a chain of references": ({"json": {"$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(2000)}}}, "too deeply"),
    "no further name": (
        {"json": {"properties": {"a": {}}, "additionalProperties": False, "patternProperties": {"^[a]$": {}}}},
        "may match no more names",
    ),
    "a type that does not exist": ({"json": {"type": "text"}}, "text"),
    "a token that does not exist": ({"grammar": "start: <nothing>"}, "names <nothing>, which is not a special token"),
    "a rule that does not exist": ({"grammar": "start: other"}, "other"),
    "a grammar in no syntax": ({"grammar": "root ::= ("}, "is not valid"),
    "no choice": ({"choice": []}, "0 kinds|not a list"),
    "an empty choice": ({"choice": ["a", ""]}, "not a list"),
    "a choice of numbers": ({"choice": [1]}, "not a list"),
    "a regex that is a number": ({"regex": 5}, "wrong type"),
    "a long grammar": ({"regex": "a" * 300_000}, "300,000 characters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compiled_is_refused(bundles: dict[str, Outrider], case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(UsageError, match=message) as refusal:
        bundles["trained"].generate(PROMPT, SamplingParams(structured_outputs=StructuredOutputs(**given)))
    assert refusal.value.param == "structured_outputs"
    assert "\n" not in str(refusal.value)


def test_a_minimum_length_contradicts_a_grammar() -> None:
    with pytest.raises(UsageError, match="min_new_tokens"):
        SamplingParams(min_new_tokens=5, structured_outputs=StructuredOutputs(choice=["a"]))


HOSTILE = {
    "states": StructuredOutputs(regex="(a{1000}){1000}b"),
    "ambiguous": StructuredOutputs(grammar='start: s\ns: s s s | s s | "a" | ""'),
    "doubling": StructuredOutputs(
        grammar="start: a0\n" + "".join(f'a{i}: a{i + 1} a{i + 1} | "x"\n' for i in range(2000)) + 'a2000: "y"'
    ),
    "nested": StructuredOutputs(regex="(" * 5000 + "a" + ")" * 5000),
    "length": StructuredOutputs(json={"type": "string", "minLength": 10**6, "maxLength": 10**7}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_harmless(bundles: dict[str, Outrider], name: str) -> None:
    grammars = bundles["trained"].grammars
    assert isinstance(grammars, LocalGrammars)
    try:
        rehearse(grammars.compile(HOSTILE[name]).matcher, 32)
    except UsageError:
        return
    params = SamplingParams(max_new_tokens=12, structured_outputs=HOSTILE[name])
    with suppress(GrammarError):  # a limit may end it
        assert tokens(list(bundles["trained"].generate(PROMPT, params, k=4)))


class LateMatcher(LocalMatcher):
    """A matcher whose masks are late every third time that they are asked for, and behind drafted tokens every second time."""

    asked = 0

    def ready(self, patient: bool = True) -> bool:
        """See `Matcher.ready`."""
        type(self).asked += 1
        return self.asked % 3 > 0

    def masks(self, drafted: Sequence[int]) -> tuple[list[npt.NDArray[np.bool_]], int]:
        """See `Matcher.masks`."""
        type(self).asked += 1
        masks, rows = super().masks(drafted)
        if self.asked % 2:
            rows = 1
        return masks[:rows], rows


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_masks_that_are_late_change_nothing(
    trained_bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Their answers sit out rounds, and others go on."""
    outrider = Outrider.load(trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K), batch=4), slots=4)
    prompt = outrider.text.encode(PROMPT, chat=False)
    grammars = [GRAMMARS["schema"], GRAMMARS["branches"], None]
    params = [SamplingParams(max_new_tokens=40, structured_outputs=each, seed=7, temperature=1.0) for each in grammars]
    want = [tokens(list(outrider.generate(prompt, each, k=0))) for each in params]
    monkeypatch.setattr("outrider.runtime.grammar.compiler.LocalMatcher", LateMatcher)
    scheduler = Scheduler(outrider, k=4, drafter=drafter)
    requests = scheduler.submit_all([(prompt, each) for each in params])
    answers: dict[Request, list[int]] = {request: [] for request in requests}
    while scheduler.busy:
        for request, event in scheduler.step():
            assert isinstance(event, Event)
            answers[request] += event.token_ids
    assert [*answers.values()] == want
    assert LateMatcher.asked > 0


class StuckMatcher(LocalMatcher):
    """A matcher that is not ready while the class is stuck."""

    stuck = False

    def ready(self, patient: bool = True) -> bool:
        """See `Matcher.ready`."""
        return not self.stuck


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_an_answer_whose_masks_do_not_come_gives_its_slot_to_another_request(
    trained_bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """It goes on later from the tokens that it has, in any slot, and gets the same text."""
    outrider = Outrider.load(trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K), batch=4), slots=2)
    prompt = outrider.text.encode(PROMPT, chat=False)
    structured = [GRAMMARS["schema"], GRAMMARS["branches"], None, None]
    params = [SamplingParams(max_new_tokens=40, structured_outputs=each, seed=7, temperature=1.0) for each in structured]
    want = [tokens(list(outrider.generate(prompt, each, k=0))) for each in params]
    monkeypatch.setattr("outrider.runtime.grammar.compiler.LocalMatcher", StuckMatcher)
    now = [0.0]
    scheduler = Scheduler(outrider, k=4, drafter=drafter, clock=lambda: now[0])
    late = scheduler.submit_all([(prompt, each) for each in params[:2]], "late")
    answers: dict[Request, list[int]] = {request: [] for request in late}

    def step() -> None:
        for request, event in scheduler.step():
            assert isinstance(event, Event)
            answers[request] += event.token_ids

    while not all(answers.values()):
        step()
    cached = [request.stats.cached_tokens for request in late]
    monkeypatch.setattr(StuckMatcher, "stuck", True)
    others = scheduler.submit_all([(prompt, each) for each in params[2:]], "other")
    answers |= {request: [] for request in others}
    for _ in range(3):
        step()
    assert [request.running for request in others] == [False, False]
    now[0] += MAX_LATE
    step()
    assert [request.running for request in (*late, *others)].count(True) == 2
    assert any(request.running for request in others)
    while any(request.finish_reason is None for request in others):
        step()
    assert all(request.finish_reason is None for request in late)
    monkeypatch.setattr(StuckMatcher, "stuck", False)
    while scheduler.busy:
        step()
    assert [*answers.values()] == want
    assert [request.stats.cached_tokens for request in late] == cached
    assert [request.stats.emitted for request in late] == [len(answers[request]) for request in late]


def test_answers_do_not_end_by_what_others_have_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those by one grammar share the states of its lexer, and so their limit."""
    monkeypatch.setattr("outrider.runtime.grammar.compiler.LIMITS", LLParserLimits(max_lexer_states=600))
    grammars = LocalGrammars(tokenizer(), tokenizer().get_vocab_size(), [0])
    structured = StructuredOutputs(regex="(a|b)*a(a|b){12}")
    letters = np.random.default_rng(0).choice(["a", "b"], size=2000)
    first, second = grammars.begin(structured), grammars.begin(structured)
    second.advance(tokenizer().encode("ab").ids)
    with pytest.raises(GrammarError, match="too complex"):
        for letter in letters:
            first.masks([])
            first.advance(tokenizer().encode(str(letter)).ids)
    for matcher in (second, grammars.begin(structured)):
        for letter in letters[:10]:
            assert matcher.masks([])[0][0].any()
            matcher.advance(tokenizer().encode(str(letter)).ids)


def test_a_grammar_may_name_an_added_token() -> None:
    made = tokenizer()
    made.add_special_tokens(["<think>", "</think>"])
    matcher = LocalGrammars(made, made.get_vocab_size(), [0]).begin(StructuredOutputs(grammar='start: <think> "a" </think>'))
    said: list[int] = []
    while step := matcher.forced(8):
        matcher.advance(step)
        said += step
    assert said == [made.token_to_id("<think>"), *made.encode("a").ids, made.token_to_id("</think>")]


@pytest.mark.parametrize("spelled", ["<think>", "a <|im_start|> b", "<call>ab</call>", "</think> ok"])
def test_a_grammar_may_spell_an_added_token(spelled: str) -> None:
    """The text of a special token is written in ordinary ones."""
    made = tokenizer()
    made.add_special_tokens(["<think>", "</think>", "<|im_start|>"])
    special: list[int] = [made.token_to_id(each) or 0 for each in ("<think>", "</think>", "<|im_start|>")]
    made.add_tokens(["<call>", "</call>"])
    matcher = LocalGrammars(made, made.get_vocab_size(), [0]).begin(StructuredOutputs(choice=[spelled]))
    said: list[int] = []
    while not (allowed := matcher.masks([])[0][0])[0]:
        assert not allowed[special].any()
        step = matcher.forced(8) or np.flatnonzero(allowed)[:1].tolist()
        assert matcher.valid(step) == len(step)
        matcher.advance(step)
        said += step
    assert made.decode(said, skip_special_tokens=False) == spelled


def test_strings_may_be_spelled_by_single_characters() -> None:
    """As in many grammars of JSON. Where any of them may come, all texts of a vocabulary are walked."""
    grammars = LocalGrammars(tokenizer(), tokenizer().get_vocab_size(), [0])
    matcher = grammars.begin(StructuredOutputs(grammar='start: "\\"" char* "\\""\nchar: /[^"\\\\]/ | "\\\\" /["nrt]/'))
    for token in tokenizer().encode('"a\\"b"').ids:
        assert matcher.masks([])[0][0][token]
        matcher.advance([token])
