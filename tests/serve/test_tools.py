"""Tool calls of each family: what its template writes, its grammar accepts and its reader reads are the same."""

from __future__ import annotations

import functools
import itertools
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
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.request import Event
from outrider.runtime.stats import Stats
from outrider.runtime.text.chat_template import Chat
from outrider.runtime.text.stream import TextStream
from outrider.serve.api.answer import AnswerFormat
from outrider.serve.api.chat_protocol import Function
from outrider.serve.api.errors import ApiError
from outrider.serve.api.reasoning import MARKS
from outrider.serve.tools import family_of
from outrider.serve.tools.base import Family, OfferedTools, Part, Parts, Reader, mark
from outrider.tests.serve.families import EXAMPLES, text_of
from outrider.tests.support import END

PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}, "required": ["city"]}
ITEMS = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "urgent": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "maxLength": 30}, {"type": "null"}]},
    },
    "required": ["list"],
    "$defs": {"item": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": PLACE, "order.items-1": ITEMS, "now": {"type": "object", "properties": {}}}
Call = tuple[str, dict[str, Any]]
WEATHER: Call = ("get_weather", {"city": 'São "Paulo"\\\n{[', "unit": "C"})
ORDER: Call = (
    "order.items-1",
    {"list": [{"name": "}]"}, {"name": "é"}], "urgent": True, "note": "</parameter> 7"},
)
NOW: Call = ("now", {})
SEVERAL = ("hermes", "qwen_xml", "mistral", "mistral 2025")  # families whose answers may have several calls
every = pytest.mark.parametrize("name", EXAMPLES)


def family(name: str) -> Family:
    found = family_of(text_of(name))
    assert found is not None
    return found


def answer(name: str, content: str, *calls: Call) -> str:
    """What a template writes between the prompt and the end of the answer."""
    of_message = [
        {"id": f"abcdefgh{at}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for at, (tool, arguments) in enumerate(calls)
    ]
    question: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    message = {"role": "assistant", "content": content, "tool_calls": of_message}
    rendered = text_of(name).render(Chat([*question, message], add_generation_prompt=False))
    return rendered.split(EXAMPLES[name].before, 1)[1].strip("\n").removesuffix(EXAMPLES[name].end).removesuffix("<|end|>")


def accepted(name: str, grammar: str, text: str) -> tuple[bool, bool]:
    """Whether a grammar accepts all tokens of a text, and whether the text may end there."""
    tokenizer = text_of(name).tokenizer
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokenizer.to_str(), eos_token=0), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids), matcher.is_accepting()


def read(
    name: str, text: str, cuts: list[int] | None = None, tools: dict[str, dict[str, Any]] = TOOLS
) -> tuple[list[Part], bool]:
    """The parts of an answer whose tokens come in pieces, each joined, and whether a call is cut."""
    of = family(name)
    reader = Reader(lambda reader: of.read(reader, tools))
    tokenizer = text_of(name).tokenizer
    stream, ids = TextStream(tokenizer, [], (), of.shown), tokenizer.encode(text, add_special_tokens=False).ids
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts or [])})
    parts = []
    for begin, end in itertools.pairwise(places):
        piece = "".join(each for token in ids[begin:end] for each, _ in stream.push(token, False))
        parts += reader.push(piece, False)
    parts += reader.push("".join(each for each, _ in stream.finish()), True)
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind and part.kind != "name":
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined, reader.calling


def calls_in(parts: list[Part]) -> list[tuple[str, Any]]:
    texts = [part.text for part in parts if part.kind in ("name", "arguments")]
    return [(tool, json.loads(arguments)) for tool, arguments in zip(texts[::2], texts[1::2], strict=True)]


@every
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("call", [WEATHER, ORDER, NOW], ids=lambda call: call[0])
def test_a_call_of_the_template_is_accepted_and_read(name: str, required: bool, call: Call) -> None:
    written = answer(name, "", call)
    assert accepted(name, family(name).grammar(OfferedTools(TOOLS, [0], required)), written) == (True, True)
    parts, cut = read(name, written)
    assert ([part.kind for part in parts], calls_in(parts), cut) == (["name", "arguments"], [call], False)


@every
def test_text_may_come_before_a_call_or_instead_of_one(name: str) -> None:
    tool = family(name)
    free, required = tool.grammar(OfferedTools(TOOLS, [0])), tool.grammar(OfferedTools(TOOLS, [0], required=True))
    written = answer(name, 'It is {"name": 7}, [x] or <b>.')
    assert accepted(name, free, written) == (True, True)
    assert accepted(name, required, written)[0] is False
    assert read(name, written)[0] == [Part("content", 'It is {"name": 7}, [x] or <b>.')]
    if name != "llama":
        written = answer(name, "Let me see.", WEATHER)
        assert accepted(name, free, written) == (True, True)
        assert read(name, written)[0][0] == Part("content", "Let me see.")
        assert calls_in(read(name, written)[0]) == [WEATHER]


@every
def test_a_call_spelled_by_other_tokens_is_text(name: str) -> None:
    """A user can have a model repeat it. Its tokens are no call to the grammar, so nothing made it a valid one."""
    text = text_of(name)
    end = text.tokenizer.token_to_id(EXAMPLES[name].end)
    calls = [Function(name=tool, parameters=schema) for tool, schema in TOOLS.items()]
    answers = AnswerFormat(text, [end], calls, "auto", True)
    written = "<|python_tag|>" * (name == "llama") + answer(name, "", ("delete_all", {"path": "/"})) + "</think>"
    opening = "<|channel|>final<|message|>" * (name == "gpt_oss")  # it says nothing outside of a channel
    ids = [token for each in (opening, *written) for token in text.tokenizer.encode(each, add_special_tokens=False).ids]
    stats, stream, reader = Stats(prompt_tokens=1), TextStream(text.tokenizer, [1], (), answers.shown), answers.reader([1])
    pieces = [tuple(stream.extend([token], 0)) for token in [*ids, end]]
    events = [Event((), (), each, stats) for each in pieces] + [Event((end,), (False,), (), stats, "stop")]
    parts = [part for event in events for part in reader.read(event)]
    assert ({part.kind for part in parts}, "".join(part.text for part in parts)) == ({"content"}, written)
    assert reader.finish_reason(events[-1]) == "stop"


@every
def test_an_answer_is_structured_output_or_a_call(name: str) -> None:
    text = text_of(name)
    calls = [Function(name=tool, parameters=schema) for tool, schema in TOOLS.items()]
    asked = StructuredOutputs(json={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    end = text.tokenizer.token_to_id(EXAMPLES[name].end)
    if name == "llama":
        with pytest.raises(ApiError, match="cannot be told"):
            AnswerFormat(text, [end], calls, "auto", True, asked).constraint([1])
        return
    free, required = (AnswerFormat(text, [end], calls, choice, True, asked).constraint([1]) for choice in ("auto", "required"))
    assert free is not None
    assert required is not None
    for written, fits in ((answer(name, "", WEATHER), True), (answer(name, '{"name": "x"}'), False)):
        assert accepted(name, free.source(), written) == (True, True)
        assert all(accepted(name, required.source(), written)) is fits
    for wrong in ("Hi", '{"name": 7}', '{"name": "x"} Hi'):
        assert not all(accepted(name, free.source(), answer(name, wrong)))
    assert not all(accepted(name, free.source(), answer(name, "", ("now", {"zone": "UTC"}))))
    assert read(name, answer(name, '{"name": "x"}'))[0] == [Part("content", '{"name": "x"}')]


@every
def test_calls_are_tried_after_the_text_before_them(name: str) -> None:
    """Trying follows the first tokens of a grammar: masks of free text would say nothing about those of calls."""
    text, calls = text_of(name), [Function(name=tool, parameters=schema) for tool, schema in TOOLS.items()]
    end = text.tokenizer.token_to_id(EXAMPLES[name].end)
    answers = AnswerFormat(text, [end], calls, "auto", True)
    assert answers.grammar is not None
    assert accepted(name, answers.grammar.source(), answer(name, "Hi"))[0]
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(text.tokenizer.to_str(), eos_token=0), answers.grammar.source())
    marks = [text.tokenizer.token_to_id(mark) for mark in MARKS[0]] if EXAMPLES[name].others else []
    opening = answers.before_grammar([1])
    assert (opening[: len(marks)], len(opening) > len(marks)) == (marks, True)
    assert matcher.consume_tokens(opening[len(marks) :])
    assert not matcher.validate_tokens(text.tokenizer.encode("Hi", add_special_tokens=False).ids)


@pytest.mark.parametrize("name", SEVERAL)
def test_what_follows_a_call_is_no_content_and_may_be_a_cut_call(name: str) -> None:
    """After any token."""
    tokenizer, end = text_of(name).tokenizer, len(answer(name, "", NOW))
    ids = tokenizer.encode(answer(name, "", NOW, NOW), add_special_tokens=False).ids
    begun = False
    for count in range(len(ids)):
        text = tokenizer.decode(ids[:count], skip_special_tokens=False)
        parts, cut = read(name, text)
        assert not any(part.kind == "content" for part in parts)
        names = sum(part.kind == "name" for part in parts)
        begun |= cut and names == 1 and len(text) > end
        assert cut or names != 1 or text.count(family(name).tokens[0]) < 2
    assert begun


@every
def test_several_calls(name: str) -> None:
    calls = (WEATHER, NOW, ORDER)
    if name not in SEVERAL:
        assert (
            accepted(
                name, family(name).grammar(OfferedTools(TOOLS, [0])), answer(name, "", NOW) + "\n" + answer(name, "", NOW)
            )[0]
            is False
        )
        return
    written = answer(name, "", *calls)
    assert accepted(name, family(name).grammar(OfferedTools(TOOLS, [0])), written) == (True, True)
    assert calls_in(read(name, written)[0]) == [*calls]
    assert accepted(name, family(name).grammar(OfferedTools(TOOLS, [0], parallel=False)), written)[0] is False


@every
@pytest.mark.parametrize("schema", [{}, {"description": "nothing"}, {"properties": {}}], ids=str)
def test_arguments_are_an_object_even_if_the_schema_does_not_say_so(name: str, schema: dict[str, Any]) -> None:
    grammar = family(name).grammar(OfferedTools({"now": enforced(schema, strict=False)}, [0], required=True))
    assert accepted(name, grammar, answer(name, "", NOW)) == (True, True)
    for wrong in ('"x"', "[]", "7"):
        assert not all(accepted(name, grammar, answer(name, "", NOW).replace("{}", wrong))) or name == "qwen_xml"


@every
@pytest.mark.parametrize(
    "call",
    [
        ("get_time", {}),
        ("get_weather", {"unit": "C"}),
        ("get_weather", {"city": "Paris", "unit": "K"}),
        ("get_weather", {"city": "Paris", "country": "France"}),
        ("order.items-1", {"list": [{"name": 3}]}),
        ("order.items-1", {"list": [], "urgent": "yes"}),
        ("order.items-1", {"list": [], "note": "x" * 31}),
        ("now", {"zone": "UTC"}),
    ],
    ids=str,
)
def test_a_wrong_call_is_not_accepted(name: str, call: Call) -> None:
    for required in (False, True):
        assert not all(accepted(name, family(name).grammar(OfferedTools(TOOLS, [0], required)), answer(name, "", call)))


@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
@pytest.mark.parametrize("opened", [False, True])
def test_what_the_model_thinks_is_free_and_comes_first(name: str, opened: bool) -> None:
    tokenizer = text_of(name).tokenizer
    opening, closing = (tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    thought = ("" if opened else "<think>") + 'A {"x"</think>\n\n'
    for required in (False, True):
        grammar = StructuredOutputs(grammar=family(name).grammar(OfferedTools(TOOLS, [0, opening], required)))
        source = grammar.after_reasoning(opening, closing, opened).source()
        assert accepted(name, source, thought + answer(name, "", WEATHER)) == (True, True)
        assert accepted(name, source, thought + "Hi")[1] is not required
        assert accepted(name, source, answer(name, "", WEATHER))[0] is not opened
        assert accepted(name, source, "Hi" if opened else "<think>Hi")[1] is False
        assert accepted(name, source, ("Hi" if opened else "<think>Hi") + END)[0] is False


@every
@given(cuts=st.lists(st.integers(0, 500), max_size=12))
def test_the_parts_do_not_depend_on_the_pieces(name: str, cuts: list[int]) -> None:
    for calls in ((WEATHER,), (ORDER, NOW)):
        written = answer(name, "Well,  now.\n", *calls[: None if name in SEVERAL else 1])
        assert read(name, written, cuts) == read(name, written)


def test_a_string_may_be_cut_behind_a_backslash() -> None:
    """Each piece is a character; what follows the arguments is none of them."""

    def whole(reader: Reader) -> Parts:
        yield from reader.value()

    for value in (r'{"a": "\\\"}"}', r'{"a": "\\", "b": {"c": "\""}}'):
        reader = Reader(whole)
        parts = [part for character in value + " more" for part in reader.push(character, False)]
        assert ("".join(part.text for part in parts), {part.kind for part in parts}) == (value, {"arguments"})


@every
def test_a_call_that_is_cut_is_the_beginning_of_the_whole(name: str) -> None:
    """After any token: no more than the whole has is shown, and the reader says that the call is not complete."""
    written = answer(name, "", ORDER)
    tokenizer = text_of(name).tokenizer
    ids = tokenizer.encode(written, add_special_tokens=False).ids
    whole = {part.kind: part.text for part in read(name, written)[0]}
    states = set()
    for end in range(len(ids)):
        parts, cut = read(name, tokenizer.decode(ids[:end], skip_special_tokens=False).rstrip("\ufffd"))
        shown = {part.kind: part.text for part in parts}
        if "name" in shown:
            assert whole["arguments"].startswith(shown.get("arguments", ""))
            assert cut is (shown.get("arguments") != whole["arguments"])
            states.add((cut, bool(shown.get("arguments"))))
    assert (True, True) in states


def test_gpt_oss_thinks_in_a_channel() -> None:
    written = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant"
    written += "<|channel|>commentary<|message|>So.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{ }"
    final = "<|channel|>final<|message|>Hi."
    for required in (False, True):
        grammar = family("gpt_oss").grammar(OfferedTools(TOOLS, [0], required))
        assert accepted("gpt_oss", grammar, written + call) == (True, True)
        assert accepted("gpt_oss", grammar, written + final)[0] is not required
    before = [Part("reasoning_content", "Well."), Part("content", "So.")]
    assert read("gpt_oss", written + call) == ([*before, Part("name", "now"), Part("arguments", "{ }")], False)
    assert read("gpt_oss", written + final)[0] == [before[0], Part("content", "So.Hi.")]
    assert read("gpt_oss", written + call, tools={})[0] == [before[0], Part("content", "So.{ }")]
    assert read("gpt_oss", "Hello")[0] == [Part("content", "Hello")]
    reader = Reader(lambda reader: family("gpt_oss").read(reader, TOOLS))
    parts = [*reader.push("Hel", False), *reader.push(f"lo{mark('<|message|>')}you", True)]
    assert "".join(part.text for part in parts) == f"Hello{mark('<|message|>')}you"


def test_llama_may_begin_with_its_tag() -> None:
    written = "<|python_tag|>" + answer("llama", "", NOW)
    assert accepted("llama", family("llama").grammar(OfferedTools(TOOLS, [0], required=True)), written) == (True, True)
    assert calls_in(read("llama", written)[0]) == [NOW]


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


def test_a_template_of_another_family_is_not_taken_for_one_of_these() -> None:
    for template in ("{{ messages }}", "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>", "<tool_calls>"):
        assert not any(kind.recognizes(template) for kind in {type(family(name)) for name in EXAMPLES})


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
