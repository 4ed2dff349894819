"""Chat templates: Jinja programs that come with a checkpoint, run in a sandbox."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from outrider.errors import UsageError, reason_of

Messages = Sequence[dict[str, Any]]  # the arguments of tool calls are parsed
Tools = Sequence[dict[str, Any]]
TURNS: Messages = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "0"}}, "required": ["a"]}
TOOLS: Tools = [{"type": "function", "function": {"name": "f", "description": "0", "parameters": PARAMETERS}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "2"}}}  # Mistral's ids are so long
CALLING: Messages = [
    TURNS[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "name": "f", "content": "3"},
    {"role": "assistant", "content": "4"},
    TURNS[2],
]
MARK = "seekable"  # the content of probes, followed by the role
CORRECT = "correct the checkpoint's template, or remove it, and export again"


class Chat(NamedTuple):
    """The input of a chat template."""

    messages: Messages
    tools: Tools = ()  # definitions of the tools that the model may call
    add_generation_prompt: bool = True  # whether the assistant's turn begins after the messages
    variables: Mapping[str, Any] = MappingProxyType({})  # of this template only, such as `enable_thinking`


# Many templates reject system messages, and many ignore tools.
SAMPLES = Chat(TURNS), Chat([{"role": "system", "content": "0"}, *TURNS]), Chat(CALLING, TOOLS)


def with_tools(default: str, tools: str) -> str:
    """Return a template that applies `tools` to requests with tools and `default` to others, as transformers does."""
    # A template loses one trailing newline and keeps spaces; these tags lose the newline after them and keep spaces before.
    first, second = (each.removesuffix("\n") for each in (tools, default))
    return f"{{% if tools %}}\n{first}{{%+ else %}}\n{second}{{%+ endif %}}"


class ChatTemplate:
    """A bundle's chat template. It may run forever, so `serve` runs it in a process that it can end."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        """Take a template, and its variables other than the chat, such as `bos_token`."""
        self.source, self.special_tokens = source, special_tokens

    def render(self, chat: Chat) -> str:
        """Return a chat in the template.

        Raises:
            UsageError: the template rejects the messages or omits what users say, or a variable's name is reserved.
        """
        tools = bool(chat.tools)
        self.check(tools)
        return self._render(chat._replace(messages=[self._formed(each, tools) for each in chat.messages]))

    def check(self, tools: bool = False) -> None:
        """Check that the template compiles, and shows what users say in chats with or without tools.

        Raises:
            UsageError: it does not.
        """
        try:
            self._template  # noqa: B018  # compiles it
        except Exception as error:
            raise UsageError(f"the chat template is not valid: {reason_of(error)}", CORRECT, param="chat") from error
        if self._forms[tools].get("user") == "":
            where = " in chats with tools" if tools else ""
            message = f"the chat template does not show what users say{where}, neither as text nor as a list of parts"
            raise UsageError(message, CORRECT, param="chat")

    def _formed(self, message: dict[str, Any], tools: bool) -> dict[str, Any]:
        """Return a message with its content in the form that the template reads."""
        text, role = message.get("content"), message["role"]
        if isinstance(text, str) and self._forms[tools].get(role, self._forms[not tools].get(role)) == "parts":
            return message | {"content": _parts(text)}
        return message

    @functools.cached_property
    def _forms(self) -> Mapping[bool, Mapping[str, str]]:
        """The form in which the template shows each role's content, with tools and without: "text", or else a list of "parts",
        or "" for neither. Roles that it rejects are absent."""
        forms = {}
        for tools in (False, True):
            text = self._shown(lambda said: said, tools)
            parts = {} if text and all(text.values()) else self._shown(_parts, tools)
            forms[tools] = {role: "text" if text.get(role) else "parts" if parts.get(role) else "" for role in text | parts}
        return forms

    def _shown(self, form: Callable[[str], Any], tools: bool) -> dict[str, bool]:
        """Return for each role whether sample chats show its content in this form. Rejected samples are ignored."""
        shown: dict[str, bool] = {}
        for messages in (TURNS[:1], *(sample.messages for sample in SAMPLES if tools or not sample.tools)):
            roles = {message["role"] for message in messages}
            said = [each | {"content": form(MARK + each["role"])} for each in messages]
            try:
                written = self._render(Chat(said, TOOLS if tools else ())).lower()
            except UsageError:
                continue
            shown |= {role: shown.get(role, False) or MARK + role in written for role in roles}
        return shown

    def _render(self, chat: Chat) -> str:
        turns = {"messages": list(chat.messages), "add_generation_prompt": chat.add_generation_prompt}
        variables = {**self.special_tokens, **turns, "tools": list(chat.tools) or None, "documents": None}
        if reserved := sorted(chat.variables.keys() & variables.keys()):
            raise UsageError(f"{reserved[0]} is a reserved template variable", "leave it out", param="template_kwargs")
        try:
            return self._template.render({**chat.variables, **variables})
        except Exception as error:  # a template is a program and may fail in any way
            raise UsageError(
                f"the chat template rejects the messages: {reason_of(error)}",
                "change them, or write the prompt without a template",
                param="chat",
            ) from error

    def samples(self) -> str:
        """Return sample chats in the template, without those that it rejects."""
        rendered = ""
        for sample in SAMPLES:
            with suppress(UsageError):
                rendered += self.render(sample)
        return rendered

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """The compiled template, cached because compiling takes longer than most renderings."""
        return _environment().from_string(self.source)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return a sandbox with the extensions, filters and functions that transformers gives to chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """Ignores the tag `{% generation %}`, which marks the assistant's text for training, and keeps its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 requires a set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
