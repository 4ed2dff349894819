"""A chat template and a tokenizer for each family of `serve.tools`, small, in the form of the family's own; calls in it."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any, NamedTuple

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from outrider.runtime.text.chat_template import Chat, ChatTemplate
from outrider.runtime.text.stream import TextStream
from outrider.runtime.text.text import Text
from outrider.serve.tools import family_of
from outrider.serve.tools.base import Family, Part, Reader
from outrider.tests.support import tokenizer

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}CALL{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)
HERMES = (
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
QWEN_XML = (
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% else %}{{ m.content }}{% endfor %}'
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}</s>{% else %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% endif %}{% endfor %}"
)
MISTRAL_2025 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    "{{ m.content }}{% for c in m.tool_calls %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}</s>{% endif %}{% endfor %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>{% elif m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>{% else %}{% for c in m.tool_calls %}{% if m.content %}<|start|>assistant<|channel|>commentary"
    "<|message|>{{ m.content }}"
    "<|end|>{% endif %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


class Example(NamedTuple):
    """What a model of a family has."""

    template: str
    special: str  # tokens
    others: str = ""  # tokens that are not marked as special
    end: str = "<|im_end|>"  # behind an answer
    before: str = "<|im_start|>assistant\n"  # behind a prompt


CHATML_TOKENS = "<|im_start|> <|im_end|>", "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
EXAMPLES = {
    "hermes": Example(CHATML.replace("CALL", HERMES), *CHATML_TOKENS),
    "qwen_xml": Example(CHATML.replace("CALL", QWEN_XML), *CHATML_TOKENS),
    "llama": Example(
        LLAMA,
        "<|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>",
        end="<|eot_id|>",
        before="assistant<|end_header_id|>\n\n",
    ),
    "mistral": Example(
        MISTRAL, "</s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]", end="</s>", before="[/INST]"
    ),
    "mistral 2025": Example(MISTRAL_2025, "</s> [INST] [/INST] [TOOL_CALLS] [CALL_ID] [ARGS]", end="</s>", before="[/INST]"),
    "gpt_oss": Example(
        GPT_OSS,
        "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|> <|return|>",
        end="<|call|>",
        before="<|start|>assistant",
    ),
}


def tokenizer_of(name: str) -> Tokenizer:
    """Return a tokenizer with the tokens of a family, the first of which is the token that ends a text."""
    made, example = tokenizer(), EXAMPLES[name]
    made.add_special_tokens(example.special.split())
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in example.others.split()])
    return made


@functools.cache
def text_of(name: str) -> Text:
    """Return the tokenizer and the chat template of a family."""
    return Text(tokenizer_of(name), ChatTemplate(EXAMPLES[name].template, {}))


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
