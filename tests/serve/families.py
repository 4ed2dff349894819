"""A chat template and a tokenizer for each family of `serve.tools`, small, in the form that the family's own have."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from outrider.runtime.text.chat_template import ChatTemplate
from outrider.runtime.text.text import Text
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
