"""The calls of Qwen3-Coder and Qwen 3.5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import UsageError
from outrider.runtime.grammar.schemas import over
from outrider.runtime.grammar.structured import MAX_SOURCE
from outrider.serve.tools.argument_schemas import TextSet, Work, shapes_of, target, texts_of
from outrider.serve.tools.base import (
    AnswerParts,
    Family,
    OfferedTools,
    Part,
    Reader,
    json_value,
    mark,
    one_of,
    quoted,
    text_then_calls,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, LINE_END = "\n<function=", "</function>\n", "\n"
VALUE_END = "\n</parameter>"  # cannot occur in a text
END = f"{VALUE_END}\n"
ENDING = r"/(?s:.*)\n<\/parameter>(?s:.*)/"
NO_TEXT = ["integer", "number", "boolean", "null", "array", "object"]  # types


class QwenXml(Family):
    r"""Each call is `<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>`. A
    value that may be text is written as plain text, and any other value as JSON. Texts are JSON, too, if their schema restricts
    more than their length or their values."""

    tokens = (OPENING, CLOSING)

    @staticmethod
    def recognizes(template: str) -> bool:
        """Return whether a template writes such calls."""
        return "<function=" in template and "<parameter=" in template

    def grammar(self, offer: OfferedTools) -> str:
        """Return the grammar: any text, then calls, whose arguments have the order of the schema.

        Raises:
            UsageError: see `shapes_of`; or the schemas are too long.
        """
        opening, closing = map(self.token, self.tokens)
        more = f"({quoted(LINE_END)} one)*" if offer.parallel else ""
        lines, tools, size = [text_then_calls(offer, opening), f"calls: one {more}"], [], 0
        work = Work()
        for name, schema in offer.tools.items():
            shapes = shapes_of(name, schema, name in offer.strict, work)
            texts = texts_of(shapes, schema, VALUE_END, work)
            for shape in shapes:
                expressions = [quoted(f"{name}>\n")]
                for key, each in shape.properties.items():
                    rule = f"value_{len(lines)}"
                    found = texts[key].pop(0) if key in texts else None
                    value = None
                    if found is None or found.others:
                        kept = each if found is None else {"allOf": [each, {"type": NO_TEXT}]}
                        value = f"{json_value(_closed(kept, schema))} {quoted(END)}"
                    lines.append(f"{rule}: {value}" if found is None else _text(rule, found.texts, value))
                    if (size := size + len(lines[-1])) > MAX_SOURCE:
                        raise UsageError("the schemas of the tools are too long", "shorten them", param="tools")
                    optional = "" if key in shape.required else "?"
                    expressions.append(f"({quoted(f'<parameter={key}>{LINE_END}')} {rule}){optional}")
                tools.append(" ".join(expressions))
        lines.append(f"one: <[{opening}]> {quoted(FUNCTION)} {one_of(tools)} {quoted(FUNCTION_END)} <[{closing}]>")
        return "\n".join(lines)

    def read(self, reader: Reader, tools: Mapping[str, dict[str, Any]]) -> AnswerParts:
        """Yield the parts of an answer, the arguments as JSON."""
        while (yield from reader.call(mark(OPENING))):
            if not (yield from reader.until(FUNCTION, None)) or (name := (yield from reader.word(">\n"))) is None:
                return
            yield Part("name", name)
            schema, before = tools.get(name, {}), "{"
            work = Work()
            texts = texts_of(shapes_of(name, schema, strict=False, work=work), schema, VALUE_END, work)
            while (head := (yield from reader.word(">\n"))) is not None and head != "</function":
                key = head.removeprefix("<parameter=")
                yield Part("arguments", f"{before}{json.dumps(key, ensure_ascii=False)}: ")
                before = ", "
                if any(found.others for found in texts.get(key, ())):
                    if (value := (yield from reader.word(END))) is None:
                        return
                    listed = any(value in (text.values or ()) for found in texts[key] for text in found.texts)
                    yield Part("arguments", json.dumps(value, ensure_ascii=False) if listed else value)
                elif not (yield from reader.text(END) if key in texts else reader.until(END, "arguments")):
                    return
            if head is None:
                return
            yield Part("arguments", "{}" if before == "{" else "}")
            reader.complete()
            yield from reader.until(mark(CLOSING), None)


def _text(rule: str, texts: list[TextSet], other: str | None) -> str:
    """Return the rules for a text and the end of its parameter; `other` is an expression for values that are not text."""
    # Each text and its end form one lexeme: the lexer does not return to a shorter one after it has continued in a longer one.
    listed = [quoted(value + END) for text in texts for value in text.values or ()]
    lengths = [f".{{{text.least},{'' if text.most == float('inf') else text.most}}}" for text in texts if text.values is None]
    if not lengths:
        return f"{rule}: {' | '.join([*listed, *([other] if other is not None else [])])}"
    name = rule.upper()
    line = f"{name}: (/(?s:{'|'.join(dict.fromkeys(lengths))})/ & ~{ENDING}) {quoted(END)}"
    return f"{line}\n{rule}: {' | '.join([name, *listed])}"


def _closed(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return a self-contained schema, with the schemas that it refers to.

    Raises:
        UsageError: see `target`.
    """
    names: dict[str, str] = {}

    def moved(inner: Any) -> Any:
        if not isinstance(inner, dict):
            return inner
        made = over({key: value for key, value in inner.items() if key not in ("$defs", "definitions")}, moved)
        if "$ref" in inner:
            made["$ref"] = f"#/$defs/{names.setdefault(str(inner['$ref']), str(len(names)))}"
        return made

    made = {"$schema": root["$schema"]} if "$schema" in root else {}
    made |= {"allOf": [schema]} if isinstance(schema, bool) else moved(schema)
    shared: dict[str, Any] = {}
    while len(shared) < len(names):
        reference = [*names][len(shared)]
        shared[names[reference]] = moved(target({"$ref": reference}, root))
    return made | ({"$defs": shared} if shared else {})
