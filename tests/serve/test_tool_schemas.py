"""What the arguments of calls may be: the grammars of each family keep to the schemas, or these are refused."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import UsageError
from outrider.runtime.grammar.schemas import enforced
from outrider.serve.api.answer import AnswerFormat
from outrider.serve.api.chat_protocol import Function
from outrider.serve.api.errors import ApiError
from outrider.serve.tools.base import OfferedTools
from outrider.tests.serve.families import accepted, answer, calls_in, every, family, read, text_of


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"$ref": "x"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}},
        {"type": "object", "properties": {"a>": {}}},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": {}, "required": ["b"]},
        {"type": "object", "properties": {}, "required": 3},
        {"type": "object", "properties": {}, "required": [["a"]]},
        {"type": "array"},
    ],
    ids=str,
)
def test_a_schema_that_calls_in_xml_cannot_keep_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        family("qwen_xml").grammar(OfferedTools({"f": parameters}, [0]))
    assert caught.value.param == "tools"
    assert caught.value.hint


REFERENCE = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    "parameters",
    [
        {
            "$defs": {"a": {"enum": [str(each) for each in range(1000)]}},
            "properties": {"x": {"anyOf": [REFERENCE] * 64, "allOf": [REFERENCE] * 400}},
        },
        {"properties": {f"{each:x}": {} for each in range(1000)}, "anyOf": [{}] * 64},
    ],
)
def test_schemas_that_take_long_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="too many steps"):
        family("qwen_xml").grammar(OfferedTools({"f": parameters}, [0]))


def test_many_tools_of_many_parameters_are_read() -> None:
    parameters = {"properties": {f"parameter {each}": {"type": "string", "enum": ["a", "b"]} for each in range(25)}}
    assert family("qwen_xml").grammar(OfferedTools({f"tool{each}": parameters for each in range(128)}, [0]))


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": 3, "type": 5, "enum": 1},
        {"type": "string", "minLength": "1})(?s:.*)/ x"},
        {"anyOf": [{"anyOf": []}]},
    ],
)
def test_a_schema_that_means_nothing_is_the_grammars_to_refuse(schema: dict[str, Any]) -> None:
    grammar = family("qwen_xml").grammar(OfferedTools({"f": {"type": "object", "properties": {"a": schema}}}, [0]))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(text_of("qwen_xml").tokenizer.to_str(), eos_token=0), grammar)
    assert matcher.is_error()


def constrained(name: str, schema: dict[str, Any], strict: bool) -> str:
    """The grammar of an answer that calls a tool with such parameters."""
    call = Function(name="f", parameters=schema, strict=strict)
    structured = AnswerFormat(text_of(name), [0], [call], "required", False).constraint([5])
    assert structured is not None
    return structured.source()


def drawn(name: str, source: str, choices: random.Random) -> str | None:
    """An answer of random tokens that a grammar allows; None if it cannot be compiled or comes to no end."""
    tokenizer = text_of(name).tokenizer
    matcher = llguidance.LLMatcher(vocabulary(name), source, log_level=0)
    began = "<|channel|>commentary to=functions.f" * (name == "gpt_oss")  # it could think for long
    ids: list[int] = tokenizer.encode(began, add_special_tokens=False).ids
    matcher.consume_tokens(ids)
    while not matcher.is_error() and len(ids) < 120:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        assert not matcher.is_error(), matcher.get_error()
        if 0 in allowed:
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        token = int(choices.choice([*allowed]))
        matcher.consume_token(token)
        ids.append(token)
    return None


@functools.cache
def vocabulary(name: str) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(text_of(name).tokenizer.to_str(), eos_token=0)


LEAVES: list[Any] = [
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": ["string", "null"], "maxLength": 2},
    {"type": "string", "pattern": "^[ab]+$", "maxLength": 5},
    {"type": "string", "format": "ipv4"},
    {"enum": ["x", "yy", 3, None]},
    {"const": "yy"},
    {"type": "integer", "minimum": 3, "maximum": 40},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    {"type": ["integer", "boolean"]},
    {"type": ["string", "integer"], "enum": [1, 2]},
    {"type": "array", "items": {"enum": [1, "a"]}, "minItems": 1, "maxItems": 2},
    {"$ref": "#/$defs/shared"},
    {"$ref": "#/properties/b"},
    {"$ref": "#/$defs/shared", "maxLength": 1},
    {"not": {"const": "x"}},
    {"maxLength": 2},
    {},
    True,
    False,
]
NAMES = st.sampled_from(["a", "b", "c"])


def groups(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=2)
    combined = st.builds(
        lambda key, each, more: {key: each} | (more if isinstance(more, dict) else {}),
        st.sampled_from(["anyOf", "allOf", "oneOf"]),
        several,
        st.sampled_from([{}, {"type": "string"}, {"maxLength": 2}, {"enum": ["x", "yy"]}]),
    )
    return combined | objects(inner)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    optional = {
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": st.booleans() | inner,
        "anyOf": st.lists(st.builds(lambda name: {"required": [name]}, NAMES), min_size=1, max_size=2),
        "allOf": st.lists(st.builds(lambda name, each: {"properties": {name: each}}, NAMES, inner), min_size=1, max_size=2),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(1, 3),
        "patternProperties": st.builds(lambda each: {"^[bx]": each}, inner),
        "propertyNames": st.just({"maxLength": 1}),
        "dependentRequired": st.just({"a": ["b"]}),
    }
    kept = st.fixed_dictionaries({"properties": st.dictionaries(NAMES, inner, max_size=3)}, optional=optional)
    few = st.lists(st.sampled_from([*optional]), max_size=2, unique=True)
    return st.builds(
        lambda schema, keys: {"type": "object"} | {key: schema[key] for key in ("properties", *keys) if key in schema},
        kept,
        few,
    )


@every
@settings(max_examples=40, deadline=None)
@given(
    schema=objects(st.recursive(st.sampled_from(LEAVES), groups, max_leaves=4)),
    shared=st.sampled_from(LEAVES[:12]),
    choices=st.randoms(use_true_random=False),
)
def test_what_the_mask_of_a_call_allows_is_valid(
    name: str, schema: dict[str, Any], shared: Any, choices: random.Random
) -> None:
    schema["$defs"] = {"shared": shared}
    try:
        source = constrained(name, schema, strict=True)
    except ApiError:
        return
    for _ in range(3):
        if (written := drawn(name, source, choices)) is not None:
            parts = read(name, written, tools={"f": enforced(schema, strict=True)})[0]
            jsonschema.Draft202012Validator(schema).validate(calls_in(parts)[0][1])


TWO: dict[str, Any] = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "anyOf of required": ({"properties": TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {}),
    "$ref": ({"$ref": "#/$defs/R", "$defs": {"R": {"properties": TWO, "required": ["a"]}}}, {"b": 1}),
    "allOf": ({"allOf": [{"properties": TWO}, {"required": ["a"]}]}, {"b": 1}),
    "allOf that forbids": (
        {"allOf": [{"properties": TWO}, {"properties": {"a": True}, "additionalProperties": False}]},
        {"b": 1},
    ),
    "minProperties": ({"properties": TWO, "minProperties": 1}, {}),
    "patternProperties": (
        {"properties": {"a": {"type": "integer"}, "b": {}}, "patternProperties": {"^b$": {"maximum": 1}}, "required": ["a"]},
        {"a": 1, "b": 2},
    ),
}
VALUES: dict[str, tuple[dict[str, Any], Any]] = {
    "format": ({"type": "string", "format": "date"}, "not a date"),
    "pattern": ({"type": "string", "pattern": "^a"}, "ba"),
    "maxLength beside $ref": ({"$ref": "#/$defs/S", "maxLength": 2}, "longer"),
    "maxLength beside anyOf": ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 2}, "longer"),
    "maxLength beside enum": ({"enum": ["ab", "longer"], "maxLength": 2}, "longer"),
    "const in anyOf": ({"type": "string", "anyOf": [{"const": "ab"}, {"const": "cd"}]}, "zz"),
    "enum in allOf": ({"type": "string", "allOf": [{"enum": ["ab", "cd"]}]}, "zz"),
    "enum behind $ref": ({"type": "string", "$ref": "#/$defs/E"}, "zz"),
    "enum of numbers": ({"type": ["string", "integer"], "enum": [1, 2]}, "zz"),
    "$ref to a property": ({"$ref": "#/$defs/P/properties/x"}, {"y": "zz"}),
}
DEFINED = {
    "S": {"type": "string"},
    "E": {"enum": ["ab", "cd"]},
    "P": {"properties": {"x": {"type": "object", "properties": {"y": {"type": "integer"}}, "additionalProperties": False}}},
}


@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
@pytest.mark.parametrize("case", [*ARGUMENTS, *VALUES])
def test_a_call_keeps_to_each_keyword(name: str, case: str) -> None:
    if case in ARGUMENTS:
        schema, wrong = ARGUMENTS[case]
        right = {"a": 1}
    else:
        value, inner = VALUES[case]
        schema, wrong = {"type": "object", "properties": {"q": value}, "required": ["q"], "$defs": DEFINED}, {"q": inner}
        right = {}
    assert not jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid(wrong)
    for strict in (False, True):
        source = constrained(name, schema, strict)
        assert not all(accepted(name, source, answer(name, "", ("f", wrong))))
        assert not right or all(accepted(name, source, answer(name, "", ("f", right))))


def test_an_optional_text_is_not_json() -> None:
    """As pydantic writes it."""
    value = {"anyOf": [{"type": "string", "maxLength": 5, "title": "T"}, {"type": "null"}], "default": None, "format": "x"}
    color = {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"q": value, "c": color}, "$defs": {"Color": {"type": "string", "enum": ["red"]}}}
    call = ("f", {"q": "a b", "c": "red"})
    assert accepted("qwen_xml", constrained("qwen_xml", schema, strict=True), answer("qwen_xml", "", call)) == (True, True)


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"anyOf": [{"type": "integer"}, {"const": "auto"}]}, [7, "auto"]),
        ({"enum": ["a", 1, None]}, ["a", 1, None]),
        ({"anyOf": [{"enum": ["none", "1"]}, {"type": "array", "items": {"type": "string"}}]}, ["none", "1", ["x"]]),
        ({"anyOf": [{"$ref": "#/$defs/E"}, {"type": "object", "properties": {"n": {}}}]}, ["ab", {"n": 1}]),
        ({"anyOf": [{"enum": ["a", ""]}, {"type": "string", "minLength": 4}]}, ["a", "", "abcd"]),
    ],
    ids=str,
)
def test_what_may_stand_beside_a_listed_text_is_possible(schema: dict[str, Any], values: list[Any]) -> None:
    whole = {"type": "object", "properties": {"q": schema}, "required": ["q"], "$defs": DEFINED}
    source = constrained("qwen_xml", whole, strict=True)
    for value in values:
        written = answer("qwen_xml", "", ("f", {"q": value if isinstance(value, str) else json.dumps(value)}))
        assert accepted("qwen_xml", source, written) == (True, True)
        for cuts in ([], [*range(60)]):
            assert calls_in(read("qwen_xml", written, cuts, {"f": enforced(whole, strict=True)})[0]) == [("f", {"q": value})]
    for wrong in ("b", "2.5", "[1]"):
        assert not all(accepted("qwen_xml", source, answer("qwen_xml", "", ("f", {"q": wrong}))))


UNENFORCED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"required": ["a"]}}, "not"),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"minProperties": 2}, "minProperties"),
    ({"nullable": True}, "nullable"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"properties": {"a": {"type": "string", "not": {"const": ""}}}}, "not"),
    ({"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}}, "pattern"),
    ({"properties": {"a": {"type": "integer", "maximum": 1e20}}}, "maximum"),
    ({"properties": {"a": {"const": 2**53 + 1}}}, "const"),
    ({"properties": {"a": {"enum": ["x", [-(2**63)]]}}}, "enum"),
    ({"properties": {"a": {"type": "string", "maxlength": 3}}}, "maxlength"),
]


@every
@pytest.mark.parametrize(("more", "keyword"), UNENFORCED, ids=lambda each: each if isinstance(each, str) else "")
def test_what_is_not_enforced_is_refused_if_the_tool_is_strict(name: str, more: dict[str, Any], keyword: str) -> None:
    schema = {"type": "object", "properties": TWO} | more
    assert not llguidance.LLMatcher(vocabulary(name), constrained(name, schema, strict=False)).is_error()
    with pytest.raises(ApiError, match=rf"\b{keyword}\b"):
        constrained(name, schema, strict=True)
