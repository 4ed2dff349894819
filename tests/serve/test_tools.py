"""Tool calls of each family: what its template writes, its grammar accepts and its reader reads are the same."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.grammar.schemas import enforced
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.request import Event
from outrider.runtime.stats import Stats
from outrider.runtime.text.stream import TextStream
from outrider.serve.api.answer import AnswerFormat
from outrider.serve.api.chat_protocol import Function
from outrider.serve.api.errors import ApiError
from outrider.serve.api.reasoning import MARKS
from outrider.serve.tools.base import AnswerParts, OfferedTools, Part, Reader, mark
from outrider.tests.serve.families import (
    EXAMPLES,
    NOW,
    ORDER,
    SEVERAL,
    TOOLS,
    WEATHER,
    Call,
    accepted,
    answer,
    calls_in,
    every,
    family,
    read,
    text_of,
)
from outrider.tests.support import END


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
    assert ("{}" in answer(name, "", NOW)) == (name != "qwen_xml")  # which writes one element for each argument
    for wrong in ('"x"', "[]", "7") if name != "qwen_xml" else ():
        assert not all(accepted(name, grammar, answer(name, "", NOW).replace("{}", wrong)))


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

    def whole(reader: Reader) -> AnswerParts:
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


def test_a_template_of_another_family_is_not_taken_for_one_of_these() -> None:
    for template in ("{{ messages }}", "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>", "<tool_calls>"):
        assert not any(kind.recognizes(template) for kind in {type(family(name)) for name in EXAMPLES})
