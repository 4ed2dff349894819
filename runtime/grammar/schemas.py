"""JSON schemas: which keywords are enforced. llguidance compiles schemas, and ignores keywords that it does not know."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from outrider.runtime.grammar.errors import refused

# fmt: off
# Keywords whose values contain schemas.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_PLACES = frozenset({"anyOf", "allOf", "oneOf", "items", "prefixItems", "additionalItems", "additionalProperties"})
_VALUES = frozenset({
    "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$ref", "$anchor",
})
_ANNOTATIONS = frozenset({
    "title", "description", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "$dynamicAnchor", "$recursiveAnchor",
})
# Removed, or refused if the schema is strict; docs/reference/http-api.md lists them.
_NOT_ENFORCED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
})
# fmt: on
_REFUSED = frozenset({"$id", "$schema", "$dynamicRef", "$recursiveRef", "$vocabulary"})  # below the root
# Other formats are annotations.
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_MAX_EXACT = 2**53  # larger integers are rounded
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_MAX_STEPS = 64  # of a reference
_MAX_NAMES = 32  # optional properties, if minProperties requires one of them


def enforced(schema: Any, strict: bool, root: bool = True) -> Any:
    """Return a schema without keywords that are not enforced: annotations and, unless it is `strict`, some assertions and
    unknown keywords.

    Raises:
        UsageError: a keyword cannot be enforced.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS or key.startswith("x-") or _is_trivial(schema, key, value) or (root and key == "$id"):
            continue
        if key in _MAPS or key in _PLACES or key in _VALUES or (root and key == "$schema"):
            if _is_enforced(schema, key, value):
                kept[key] = value
                continue
        elif key in _REFUSED:
            raise refused(f"the schema keyword {key} is not supported there", "remove it")
        elif key not in _NOT_ENFORCED and isinstance(value, dict) and not strict:
            kept[key] = value  # a $ref may point there
        if strict:
            raise refused(f"the schema keyword {key} {_reason(key)}", "remove it, or change it")
    made = over(kept, lambda inner: enforced(inner, strict, root=False))
    _exhaust_patterns(made)
    added = [*made["allOf"]] if isinstance(made.get("allOf"), list) else []
    if made.get("minProperties") == 1 and isinstance(names := made.get("properties"), dict) and 0 < len(names) <= _MAX_NAMES:
        del made["minProperties"]
        added.append({"anyOf": [{"required": [name]} for name in names]})
    if not strict and "oneOf" in made:
        added.append({"anyOf": made.pop("oneOf")})
    made |= {"allOf": added} if added else {}
    if root:
        _refuse_cycles(made)
    return made


def over(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with a change applied to each of its direct subschemas."""
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            made[key] = {name: change(inner) for name, inner in value.items()}
        elif key in _PLACES and isinstance(value, list):
            made[key] = [change(inner) for inner in value]
        else:
            made[key] = value if key in _VALUES else change(value)
    return made


def resolved(root: Any, reference: str) -> Any:
    """Return the schema that a reference within the document points to; None if there is none."""
    found, parts = root, reference.split("/", _MAX_STEPS)
    for part in parts[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if re.fullmatch("[0-9]{1,6}", name) and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found if parts[0] == "#" else None


def _refuse_cycles(root: Any) -> None:
    """Check that no reference leads back to itself without entering a value.

    Raises:
        UsageError: one does, or references are nested too deeply.
    """
    done: dict[str, bool] = {}
    followed: set[int] = set()  # ids of schemas

    def follow(schema: Any) -> None:
        if not isinstance(schema, dict) or id(schema) in followed:
            return
        for key in ("anyOf", "allOf", "oneOf"):
            for inner in schema[key] if isinstance(schema.get(key), list) else ():
                follow(inner)
        if isinstance(reference := schema.get("$ref"), str) and not done.get(reference):
            if reference in done:
                raise refused(f"the schema reference {reference[:100]!r} leads to itself", "correct it")
            done[reference] = False
            follow(resolved(root, reference))
            done[reference] = True
        followed.add(id(schema))

    def everywhere(schema: Any) -> None:
        if isinstance(schema, dict):
            follow(schema)
            over(schema, everywhere)

    try:
        everywhere(root)
    except RecursionError as error:
        raise refused("the references of a schema are nested too deeply", "reduce the nesting") from error


def _is_trivial(schema: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether every value satisfies a keyword."""
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    if key == "minProperties":
        names = schema.get("required")
        return type(value) is int and value <= (len(set(map(str, names))) if isinstance(names, list) else 0)
    if key == "propertyNames":
        return value is True or value == {} or value == {"type": "string"}
    return (key == "uniqueItems" and value is False) or (key.startswith("unevaluated") and value is True)


def _is_enforced(schema: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether a supported keyword can be enforced with this value, beside the schema's other keywords."""
    if key == "pattern":
        return not isinstance(value, str) or _LOOKAROUND.search(value) is None
    if key in _BOUNDS:
        return not isinstance(value, int | float) or abs(value) <= _MAX_EXACT
    if key in ("const", "enum"):
        return not _has_rounded(value)
    if key in ("minProperties", "maxProperties"):
        names, required = schema.get("properties"), schema.get("required")
        named = set(names) if isinstance(names, dict) else set()
        return (key == "minProperties" and value == 1 and len(named) <= _MAX_NAMES) or named <= set(
            map(str, required if isinstance(required, list) else ())
        )
    return True


def _has_rounded(value: Any) -> bool:
    """Return whether a constant contains an integer that would be rounded."""
    if isinstance(value, dict | list):
        return any(map(_has_rounded, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > _MAX_EXACT


def _reason(key: str) -> str:
    if key == "pattern":
        return "uses lookaround, which is not supported"
    if key in _BOUNDS:
        return f"is beyond {_MAX_EXACT:,}"
    if key in ("const", "enum"):
        return f"contains a number beyond {_MAX_EXACT:,}"
    if key in ("minProperties", "maxProperties"):
        return "is not supported beside optional properties"
    return "is not supported" if key in _NOT_ENFORCED else "is not known"


def _exhaust_patterns(schema: dict[str, Any]) -> None:
    """Remove patternProperties patterns that only match named properties: a grammar cannot express that no other name is left.

    Raises:
        UsageError: a pattern is anchored on both sides and has a limited length, so it might be such a pattern.
    """
    patterns, named = schema.get("patternProperties"), schema.get("properties")
    if not isinstance(patterns, dict) or not isinstance(named, dict) or not named:
        return
    for pattern, value in [*patterns.items()]:
        plain = re.sub(r"(?s)\\.|\[[^\]]*(?:\]|$)", "", pattern)
        if (alone := re.fullmatch(r"\^([\w -]*)\$", pattern)) is not None:
            if (name := alone[1]) in named:
                named[name] = {"allOf": [named[name], value]}
                del patterns[pattern]
        elif "^" in plain and "$" in plain and not any(each in plain for each in ("*", "+", ",}")):
            message = f"the pattern {pattern[:100]!r} of patternProperties may match no more names than properties has"
            raise refused(message, "name them in properties instead")
    if not patterns:
        del schema["patternProperties"]
