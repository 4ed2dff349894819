"""Which grammars are compiled, which are refused, and what the compiled ones allow."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from outrider.errors import UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.compiler import LocalGrammars, rehearse
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.tests.runtime.grammar.grammars import PROMPT, tokens
from outrider.tests.support import tokenizer

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
