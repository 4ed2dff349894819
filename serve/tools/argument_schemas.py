"""Reads from a tool's schema which arguments a call may have, for families that write some arguments as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from outrider.errors import UsageError
from outrider.runtime.grammar.schemas import resolved

MOST_NESTED = 8  # depth of alternatives within alternatives of a schema
MOST_VALUES = 1000  # values of an enum of plain texts
MOST_STEPS = 50_000  # see `Work`
MOST_SHAPES = 64  # alternatives of a tool's arguments, or of a text
# Supported keywords of the schema of a tool's arguments. A tool that is not strict may have those in IGNORED, too. Keywords for
# properties that the schema does not list have no effect, because such properties are never written.
OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$anchor"}
ALTERNATIVES = {"anyOf", "allOf", "$ref"}
IGNORED = {"patternProperties", "minProperties", "maxProperties"}
OF_TEXT = {"type", "enum", "const", "minLength", "maxLength", "oneOf", "$defs", "definitions", "$anchor"} | ALTERNATIVES


class Work:
    """Limits the work for the tools of one request, which the server's event loop does."""

    def __init__(self) -> None:
        """Start. A step is a visit to a subschema, or to a property or an enum's value in one combination of alternatives."""
        self._left = MOST_STEPS

    def do(self, steps: int = 1) -> None:
        """Count steps.

        Raises:
            UsageError: there were too many.
        """
        self._left -= steps
        if self._left < 0:
            raise UsageError("the schemas of the tools take too many steps to read", "simplify them", param="tools")


class Parameters(NamedTuple):
    """The schemas of the arguments that a call may have, and the names of the required ones."""

    properties: dict[str, Any]
    required: frozenset[str]


def shapes_of(name: str, schema: dict[str, Any], strict: bool, work: Work) -> list[Parameters]:
    """Return the alternatives for the arguments of a tool.

    Raises:
        UsageError: the schema is not that of an object, or has an unsupported keyword; or see `Work.do`.
    """

    def alternatives(each: Any, depth: int) -> list[list[dict[str, Any]]]:
        """Return the alternatives of a schema. Each is a list of schemas that all apply and have no alternatives themselves."""
        if each is True:
            return [[]]
        kinds = each.get("type", "object") if isinstance(each, dict) else None
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise UsageError(
                f"the parameters of {name} are not a schema of type object", "list them as its properties", param="tools"
            )
        unknown = next((key for key in each if key not in OF_ARGUMENTS | ALTERNATIVES and (strict or key not in IGNORED)), None)
        if unknown is not None:
            raise UsageError(
                f"{unknown} in the parameters of {name} cannot be enforced in this model's calls", "leave it out", param="tools"
            )
        work.do()
        if depth > MOST_NESTED:
            raise UsageError(
                f"the parameters of {name} are nested too deeply", "list them as properties of one object", param="tools"
            )
        found = [[each]]
        groups = [[inner] for inner in _list(each, "allOf")] + ([_list(each, "anyOf")] if "anyOf" in each else [])
        if "$ref" in each:
            groups.append([target(each, schema)])
        for group in groups:
            others = [made for inner in group for made in alternatives(inner, depth + 1)]
            if not 0 < len(found) * len(others) <= MOST_SHAPES:
                raise UsageError(
                    f"the parameters of {name} have too many alternatives, or none", "simplify the schema", param="tools"
                )
            found = [one + other for one in found for other in others]
        return found

    shapes = [_shape(name, parts, work) for parts in alternatives(schema, 0)]
    if not (possible := [shape for shape in shapes if shape is not None]):
        raise UsageError(f"no call of {name} has valid parameters", "correct its schema", param="tools")
    return possible


def _shape(name: str, parts: Sequence[dict[str, Any]], work: Work) -> Parameters | None:
    """Return the arguments to which all of these schemas apply; None if no arguments satisfy them all."""
    keys: dict[str, None] = {}
    required: set[str] = set()
    for part in parts:
        properties, needed = part.get("properties", {}), part.get("required", [])
        work.do(len(properties) if isinstance(properties, dict) else 0)
        known = isinstance(properties, dict) and all(isinstance(each, dict | bool) for each in properties.values())
        if not known or not isinstance(needed, list) or not all(isinstance(each, str) for each in needed):
            raise UsageError(
                f"the parameters of {name} are not a schema of type object", "list them as its properties", param="tools"
            )
        keys |= dict.fromkeys(properties)
        required.update(needed)
    if not required <= keys.keys():
        raise UsageError(f"{name} requires parameters that it does not list", "list them as its properties", param="tools")
    if any(character in key for key in keys for character in "<>\n"):
        raise UsageError(f"the name of a parameter of {name} has an angle bracket or a line break", "rename it", param="tools")
    work.do(len(keys) * len(parts))
    schemas = {}
    for key in keys:
        every = [part.get("properties", {}).get(key, part.get("additionalProperties", True)) for part in parts]
        if False not in every:
            more = [each for each in every if each is not True and each != {}]
            schemas[key] = more[0] if len(more) == 1 else {"allOf": more} if more else {}
    return Parameters(schemas, frozenset(required)) if required <= schemas.keys() else None


class TextSet(NamedTuple):
    """A set of texts: a list of values, or all texts within a range of lengths."""

    values: dict[str, None] | None = None
    least: int = 0
    most: float = float("inf")

    def intersection(self, other: TextSet) -> TextSet | None:
        """Return the texts in both sets; None if there are none."""
        least, most = max(self.least, other.least), min(self.most, other.most)
        values = other.values if self.values is None else self.values
        if values is None:
            return TextSet(None, least, most) if least <= most else None
        others = values if other.values is None else other.values
        values = {value: None for value in values if value in others and least <= len(value) <= most}
        return TextSet(values, least, most) if values else None


class TextArgument(NamedTuple):
    """The texts that an argument may be, and whether it may be a value of another type instead. A text that is not listed
    cannot be told from other values."""

    texts: list[TextSet]
    others: bool


def texts_of(shapes: Sequence[Parameters], root: dict[str, Any], end: str, work: Work) -> dict[str, list[TextArgument]]:
    """Return, for each argument that is written as text, the texts that it may be in each shape. `end` ends such a text.

    Raises:
        UsageError: a reference is not found; or see `Work.do`.
    """

    def others(schema: Any, depth: int = 0) -> bool:
        """Return whether a value may be something other than text."""
        work.do()
        if not isinstance(schema, dict) or depth > MOST_NESTED:
            return schema is not False
        kinds = schema.get("type")
        listed = [schema["const"]] if "const" in schema else _list(schema, "enum")
        if kinds in ("string", ["string"]) or (listed and all(isinstance(each, str) for each in listed)):
            return False
        some = all(any(others(each, depth + 1) for each in _list(schema, key)) for key in ("anyOf", "oneOf") if key in schema)
        every = [*_list(schema, "allOf"), *([target(schema, root)] if "$ref" in schema else [])]
        return some and all(others(each, depth + 1) for each in every)

    def any_of(schemas: list[Any], depth: int) -> list[TextSet] | None:
        each = [texts(schema, depth + 1) for schema in schemas]
        return None if None in each else [text for found in each for text in found or ()]

    def texts(schema: Any, depth: int = 0) -> list[TextSet] | None:
        """Return the texts that a value may be; None if the schema has a restriction that only JSON can enforce."""
        work.do()
        if schema is False:
            return []
        if not isinstance(schema, dict) or depth > MOST_NESTED:
            return None
        kinds = schema.get("type")
        if isinstance(kinds, str | list) and "string" not in ([kinds] if isinstance(kinds, str) else kinds):
            return []
        least, most = schema.get("minLength", 0), schema.get("maxLength", 0)
        if not schema.keys() <= OF_TEXT or type(least) is not int or type(most) is not int:
            return None
        parts: list[list[TextSet] | None] = [[TextSet()]] if kinds is not None else []
        for listed in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(listed, list):
                values = {value: None for value in listed if isinstance(value, str)}
                parts.append([TextSet(values)] if values and len(values) <= MOST_VALUES else None if values else [])
        parts += [any_of(_list(schema, key), depth) for key in ("anyOf", "oneOf") if key in schema]
        if "oneOf" in schema and sum(texts(each, depth + 1) != [] for each in _list(schema, "oneOf")) > 1:
            return None
        parts += [texts(each, depth + 1) for each in _list(schema, "allOf")]
        parts += [texts(target(schema, root), depth + 1)] if "$ref" in schema else []
        found = [TextSet(None, least, most if "maxLength" in schema else float("inf"))]
        for part in parts:
            if part is None or len(found) * len(part) > MOST_SHAPES:
                return None
            work.do(sum(len(one.values or other.values or ()) for one in found for other in part))
            found = [common for one in found for other in part if (common := one.intersection(other)) is not None]
        return found if parts else None

    known: dict[str, list[TextArgument]] = {}
    for shape in shapes:
        for key, schema in shape.properties.items():
            known.setdefault(key, []).append(TextArgument(texts(schema) or [], others(schema)))
    written = {}
    for key, found in known.items():
        every = [text for each in found for text in each.texts]
        if all(each.texts for each in found) and not any(end in value for text in every for value in text.values or ()):
            free = any(text.values is None for text in every)
            written[key] = [each._replace(others=each.others and not free) for each in found]
    return written


def target(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """Return the schema that a `$ref` refers to.

    Raises:
        UsageError: there is no such schema.
    """
    if (found := resolved(root, str(schema["$ref"]))) is None:
        raise UsageError(f"the reference {str(schema['$ref'])[:100]!r} is not found", "correct the schema", param="tools")
    return found


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
