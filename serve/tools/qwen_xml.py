"""Calls as Qwen3-Coder and Qwen 3.5 write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import UsageError
from outrider.serve.tools.base import Family, Offer, Part, Parts, Reader, json_value, mark, one_of, quoted, text_then_calls

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, END, LINE_END = "\n<function=", "</function>\n", "\n</parameter>\n", "\n"
MOST_NESTED = 8  # alternatives within alternatives of a schema


class QwenXml(Family):
    r"""Each call is `<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>`. A
    value that may be text is text, as it is, and all others are JSON."""

    tokens = (OPENING, CLOSING)

    @staticmethod
    def recognizes(template: str) -> bool:
        """Return whether a template writes such calls."""
        return "<function=" in template and "<parameter=" in template

    def grammar(self, offer: Offer) -> str:
        """Return any text, then calls, whose arguments have the order of the schema.

        Raises:
            UsageError: arguments are no object, or a keyword cannot be kept in text.
        """
        opening, closing = map(self.token, self.tokens)
        line_end = quoted("\n")
        more = f"({line_end} one)*" if offer.parallel else ""
        lines = [text_then_calls(offer, opening), f"calls: one {more}"]
        tools = []
        for name, schema in offer.tools.items():
            expressions = [quoted(f"{name}>\n")]
            for key, each in _properties(name, schema).items():
                rule = f"value_{len(lines)}"
                lines.append(_value(rule, each, schema))
                optional = "" if key in schema.get("required", ()) else "?"
                expressions.append(f"({quoted(f'<parameter={key}>{LINE_END}')} {rule}){optional}")
            tools.append(" ".join(expressions))
        lines.append(f"one: <[{opening}]> {quoted(FUNCTION)} {one_of(tools)} {quoted(FUNCTION_END)} <[{closing}]>")
        return "\n".join(lines)

    def read(self, reader: Reader, tools: Mapping[str, dict[str, Any]]) -> Parts:
        """Yield the parts of an answer, the arguments as JSON."""
        while (yield from reader.until(mark(OPENING), "content")):
            if not (yield from reader.until(FUNCTION, None)) or (name := (yield from reader.word(">\n"))) is None:
                return
            yield Part("name", name)
            schema, before = tools.get(name, {}), "{"
            while (head := (yield from reader.word(">\n"))) is not None and head != "</function":
                key = head.removeprefix("<parameter=")
                yield Part("arguments", f"{before}{json.dumps(key, ensure_ascii=False)}: ")
                before = ", "
                text = _text(schema.get("properties", {}).get(key, {}), schema) is not None
                if not (yield from reader.text(END) if text else reader.until(END, "arguments")):
                    return
            if head is None:
                return
            yield Part("arguments", "{}" if before == "{" else "}")
            reader.calling = False
            yield from reader.until(mark(CLOSING), None)


def _properties(name: str, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of a tool's arguments."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    known = isinstance(properties, dict) and all(isinstance(each, dict) for each in properties.values())
    listed = known and isinstance(required, list) and all(isinstance(each, str) and each in properties for each in required)
    if not listed or schema.get("type", "object") != "object":
        raise UsageError(f"the parameters of {name} are not those of an object", "list them as its properties", param="tools")
    if any(character in key for key in properties for character in "<>\n"):
        raise UsageError(f"a parameter of {name} has an angle bracket or a line end", "rename it", param="tools")
    return dict(properties)


def _text(schema: Any, root: dict[str, Any], depth: int = 0) -> dict[str, Any] | None:
    """Return the part of a schema that is about text, or None if a value of it cannot be text."""
    if not isinstance(schema, dict) or depth > MOST_NESTED:
        return None
    kind = schema.get("type")
    if kind == "string" or "string" in _list(schema, "type"):
        return schema
    if kind is None and any(isinstance(value, str) for value in _values(schema)):
        return schema
    alternatives = [each for key in ("anyOf", "oneOf", "allOf") for each in _list(schema, key)]
    if isinstance(reference := schema.get("$ref"), str):
        *_, group, name = ["", *reference.split("/")]
        shared = root.get(group)
        alternatives.append(shared.get(name) if isinstance(shared, dict) else None)
    found = (_text(each, root, depth + 1) for each in alternatives)
    return next((each for each in found if each is not None), None)


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _values(schema: dict[str, Any]) -> list[Any]:
    """Return the only values that a schema allows; none if it does not list them."""
    return [schema["const"]] if "const" in schema else _list(schema, "enum")


def _value(rule: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
    """Return the rules for a value and the end of its parameter."""
    text, end = _text(schema, root), quoted(END)
    if text is None:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{rule}: {json_value(shared | schema)} {end}"
    if values := _values(text):
        return f"{rule}: {one_of(quoted(value) for value in values if isinstance(value, str))} {end}"
    least, most = text.get("minLength", 0), text.get("maxLength", "")
    if "pattern" in text or not all(isinstance(bound, int) or bound == "" for bound in (least, most)):
        raise UsageError("this model's calls cannot keep to a pattern", "leave it out of the schema", param="tools")
    name = rule.upper()
    return f"{name}: (/(?s:.{{{least},{most}}})/ & ~/(?s:.*)\\n<\\/parameter>(?s:.*)/) {end}\n{rule}: {name}"
