"""Tools that tests offer to servers, a template that shows them, and the calls in answers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jsonschema
import openai

from outrider.tests.serve.server import Reached, fetch

# The calls of Llama 3, whose form needs no tokens of its own.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}{% for m in messages %}"
    "{{ {'user': 'Customer: ', 'tool': 'Result: '}.get(m.role, 'Agent: ') }}{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% else %}{{ m.content }}{% endfor %}'
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}Agent:{% endif %}"
)
ORDER = {
    "type": "object",
    "properties": {
        "drink": {"type": "string", "enum": ["coffee", "tea", "hot chocolate"]},
        "cups": {"type": "integer", "minimum": 1, "maximum": 12},
        "sugar": {"type": "boolean"},
    },
    "required": ["drink", "cups", "sugar"],
}
BOOK = {"type": "object", "properties": {"table": {"enum": ["window", "garden"]}}, "required": ["table"]}
SCHEMAS: dict[str, dict[str, Any]] = {"order": ORDER, "book": BOOK, "leave": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"{name} something", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
HI: list[Any] = [{"role": "user", "content": "Hi, I would like to order a coffee."}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS} | function}]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    asked: Any = {"model": "target", "messages": HI, "temperature": 0, "tools": TOOLS}
    return client.chat.completions.create(**(asked | options))


def check(call: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a call that is valid."""
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMAS[call.function.name] | {"additionalProperties": False})
    assert (call.type, bool(call.id)) == ("function", True)
    return call.function.name, arguments


def streamed(chunks: Any) -> tuple[list[dict[str, Any]], str, str | None]:
    """The calls of a stream, its content and its finish reason."""
    calls: list[dict[str, Any]] = []
    content, reason = "", None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or ():
            if delta.index == len(calls):
                assert delta.id
                assert delta.type == "function"
                calls.append({"name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments
    return calls, content, reason


def prompt_of(server: Reached, *messages: Any) -> str:
    """The text of messages behind a first one in the template."""
    status, _, tokens = fetch(f"{server.url}/tokenize", json.dumps({"messages": [*HI, *messages]}).encode())
    assert status == 200, tokens
    _, _, text = fetch(f"{server.url}/detokenize", json.dumps({"tokens": json.loads(tokens)["tokens"]}).encode())
    return str(json.loads(text)["prompt"]).partition("coffee.\n")[2]


def process(server: Reached, script: str) -> Any:
    done = subprocess.run([sys.executable, "-c", script, server.url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {}
