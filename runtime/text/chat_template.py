"""Chat templates: programs of a checkpoint's author, run in a sandbox."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from outrider.errors import UsageError

Messages = Sequence[dict[str, Any]]  # a tool call's arguments are values, not JSON
Tools = Sequence[dict[str, Any]]
NOTHING: Mapping[str, Any] = MappingProxyType({})
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
# Many templates accept no system message, and many know no tools.
SAMPLES: Sequence[tuple[Messages, Tools]] = (
    (TURNS, ()),
    ([{"role": "system", "content": "0"}, *TURNS], ()),
    (CALLING, TOOLS),
)
MARK = "seekable"  # what probes say, with the role behind it
CORRECT = "correct the checkpoint's template, or remove it, and export again"


def with_tools(default: str, tools: str) -> str:
    """Return a template that is the one of `tools` where a request has tools, and else `default`, as transformers chooses."""
    # A template loses one line end behind it, and no spaces; these tags lose a line end behind them, and no spaces before.
    first, second = (each.removesuffix("\n") for each in (tools, default))
    return f"{{% if tools %}}\n{first}{{%+ else %}}\n{second}{{%+ endif %}}"


class ChatTemplate:
    """A bundle's chat template. Nothing bounds how long one runs: `serve` runs it in a process that it can end."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        """Keep a template with the variables it may use besides the messages, such as `bos_token`."""
        self.source, self.special_tokens = source, special_tokens

    def render(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        add_generation_prompt: bool = True,
        further: Mapping[str, Any] = NOTHING,
    ) -> str:
        """Return the messages in the template, ready for the assistant's turn if `add_generation_prompt`.

        Args:
            tools: the definitions of tools that the model may call.
            further: variables of this template's own, such as `enable_thinking`.

        Raises:
            UsageError: the template rejects the messages or does not show what users say, or a variable has another meaning
                in every template.
        """
        self.check(bool(tools))
        return self._render([self._formed(each, bool(tools)) for each in messages], tools, add_generation_prompt, further)

    def check(self, tools: bool = False) -> None:
        """Check that the template is one, and shows what users say in chats with or without tools.

        Raises:
            UsageError: it is not or does not.
        """
        try:
            self._template  # noqa: B018  # compiles it
        except Exception as error:
            raise UsageError(f"the chat template is not one: {_reason(error)}", CORRECT, param="chat") from error
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
        """How the template reads what each role says, with tools and without: as "text" if it shows that, or else as a list of
        "parts", or in neither form. Roles that it rejects are absent."""
        forms = {}
        for tools in (False, True):
            text = self._shown(lambda said: said, tools)
            parts = {} if text and all(text.values()) else self._shown(_parts, tools)
            forms[tools] = {role: "text" if text.get(role) else "parts" if parts.get(role) else "" for role in text | parts}
        return forms

    def _shown(self, form: Callable[[str], Any], tools: bool) -> dict[str, bool]:
        """Return for each role whether small conversations show what it says in this form; rejected ones count for nothing."""
        shown: dict[str, bool] = {}
        for messages in (TURNS[:1], *(messages for messages, known in SAMPLES if tools or not known)):
            roles = {message["role"] for message in messages}
            said = [each | {"content": form(MARK + each["role"])} for each in messages]
            try:
                written = self._render(said, TOOLS if tools else ()).lower()
            except UsageError:
                continue
            shown |= {role: shown.get(role, False) or MARK + role in written for role in roles}
        return shown

    def _render(
        self, messages: Messages, tools: Tools, add_generation_prompt: bool = True, further: Mapping[str, Any] = NOTHING
    ) -> str:
        turns = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        variables = {**self.special_tokens, **turns, "tools": list(tools) or None, "documents": None}
        if taken := sorted(further.keys() & variables.keys()):
            raise UsageError(f"{taken[0]} cannot be a variable of the template's own", "leave it out", param="template_kwargs")
        try:
            return self._template.render({**further, **variables})
        except Exception as error:  # a template is a program and may fail in any way
            raise UsageError(
                f"the chat template rejects the messages: {_reason(error)}",
                "change them, or write the prompt without a template",
                param="chat",
            ) from error

    def samples(self) -> str:
        """Return small conversations in the template, those that it does not reject."""
        rendered = []
        for messages, tools in SAMPLES:
            try:
                rendered.append(self.render(messages, tools))
            except UsageError:
                continue
        return "".join(rendered)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """The compiled template, made when it is first needed: compiling takes longer than most renderings."""
        return _environment().from_string(self.source)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return a sandbox with what transformers offers to chat templates, since those of checkpoints rely on it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """Ignore `{% generation %}`, which marks the assistant's part for training, and keep its contents."""

    tags = {"generation"}  # noqa: RUF012  # the form that jinja2 asks for

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
