"""Structured outputs: what an answer must match, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llguidance import LLMatcher

from outrider.errors import UsageError
from outrider.runtime.grammar.errors import first_line, refused
from outrider.runtime.grammar.gbnf import is_lark, to_lark
from outrider.runtime.grammar.schemas import enforced

ANSWER, SAID = "outrider_answer", "outrider_said"  # names of nested grammars, distinct from the names that clients give
MAX_SOURCE = 256 << 10  # characters of a grammar
# Allow one space or one indented line between the parts of JSON: an unsure model would otherwise write spaces forever.
SPACES: Any = {"whitespace_flexible": True, "whitespace_pattern": r" ?|\r?\n[ \t]{0,40}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What an answer must match: exactly one of these. The names are vLLM's.

    Raises:
        UsageError: none or several are given, or the one given has the wrong type or is too long.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON Schema, as text or parsed
    regex: str | None = None  # in the syntax of Rust's regex crate; it matches the whole answer
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # context-free, in llguidance's extension of Lark's syntax, or in GBNF
    json_object: bool | None = None  # true: any JSON object

    def __post_init__(self) -> None:
        given = [*self.arguments()]
        if len(given) != 1:
            names = ", ".join(each.name for each in fields(self))
            raise refused(f"{len(given)} kinds of structured outputs are given", f"give exactly one of {names}")
        value = getattr(self, given[0])
        if given[0] == "json" and isinstance(value, Mapping):
            object.__setattr__(self, "json", _schema_text(value))
        elif given[0] == "choice":
            object.__setattr__(self, "choice", _choices(value))
        elif not isinstance(value, bool if given[0] == "json_object" else str):
            raise refused(f"{given[0]} has the wrong type", "see the documentation of StructuredOutputs")
        size = len(value) if isinstance(value, str) else sum(map(len, self.choice or ())) + len(str(self.json or ""))
        if size > MAX_SOURCE:
            raise refused(f"{given[0]} has {size:,} characters; the limit is {MAX_SOURCE:,}", "shorten it")

    def arguments(self) -> dict[str, Any]:
        """Return the argument that makes an equal object, in JSON types."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value is not None and value is not False}

    def after_reasoning(self, opening: int, closing: int, opened: bool) -> StructuredOutputs:
        """Return the same structured output after a model's reasoning, which is free text between two tokens.

        The model may skip the reasoning, unless the prompt has `opened` it.

        Raises:
            UsageError: see `source`.
        """
        thought = f"THOUGHT <[{closing}]> SPACES"
        thought = thought if opened else f"(<[{opening}]> {thought})?"
        main = rf"""start: {thought} @{ANSWER}
THOUGHT: /(.|\n)*/
SPACES: /[ \n]{{0,4}}/
"""
        return self.within(main, ANSWER)

    def within(self, main: str, name: str) -> StructuredOutputs:
        """Return a grammar whose `main` part, in llguidance's Lark, may refer to this one as `@name`.

        Raises:
            UsageError: see `source`.
        """
        source = self.source().strip()
        first, *others = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
        grammars = [{"name": "main", "lark_grammar": main}, {**first, "name": name}, *others]
        return StructuredOutputs(grammar=json.dumps({"grammars": grammars}))

    def source(self) -> str:
        """Return the grammar in llguidance's own form.

        Raises:
            UsageError: the schema or the grammar is not valid.
        """
        try:
            if self.json_object:
                return str(LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=SPACES))
            if self.json is not None:
                schema = json.dumps(enforced(json.loads(str(self.json)), strict=True))
                return str(LLMatcher.grammar_from_json_schema(schema, defaults=SPACES))
            if self.regex is not None:
                return str(LLMatcher.grammar_from_regex(self.regex))
            if self.choice is not None:
                return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in self.choice)))
            assert self.grammar is not None
            if self.grammar.lstrip().startswith("{"):  # llguidance's own form already
                return self.grammar
            source = self.grammar if is_lark(self.grammar) else to_lark(self.grammar)
            return str(LLMatcher.grammar_from_lark(source))
        except UsageError:
            raise
        except Exception as error:  # llguidance raises plain ones
            raise refused(f"the grammar is not valid: {first_line(error)}", "correct it") from error


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise refused(f"the schema is not JSON: {error}", "pass a schema that json.dumps accepts") from error


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise refused("choice is not a list of texts", "pass at least one text, none of them empty")
    return tuple(value)
