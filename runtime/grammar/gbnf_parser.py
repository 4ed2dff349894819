"""Parse GBNF, the grammars of llama.cpp, into expressions."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_NESTING = 100  # parentheses
NON_ASCII = 1 << 128
ANY = (NON_ASCII << 1) - 1
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)|(?P<define>::=)|(?P<name>[\w-]+)|(?P<text>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<count>\{[ ]*[0-9]{1,9}[ ]*(?:,[ ]*[0-9]{0,9}[ ]*)?\})"""
    r"""|(?P<repeat>[*+?])|(?P<any>\.)|(?P<mark>[|()])""",
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[\"\\\[\]nrt^-]|[^\\]", re.DOTALL)
_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}


class CharacterSets(NamedTuple):
    """What is known of the strings that match an expression. Sets of characters are bits: one for each ASCII character, and
    one for all others."""

    nullable: bool = False  # whether the empty string matches
    first: int = 0  # the characters that a match may start with
    any: int = 0  # the characters that a match may contain
    more: int = 0  # the characters that may extend a match to a longer one


@dataclass(eq=False, slots=True)
class Node:
    """An expression: characters, a reference to a rule, or a sequence, choice or repetition of other expressions."""

    kind: str  # text, set, name, sequence, choice, repeated
    text: str = ""  # in Lark's syntax; the name of a reference
    inner: list[Node] = field(default_factory=list)
    counts: tuple[int, int | None] = (1, 1)  # least and most repetitions
    sets: CharacterSets = field(default_factory=CharacterSets)

    def walk(self) -> Iterator[Node]:
        """Yield this expression and all within it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            waiting += node.inner
            yield node


def parse(source: str) -> dict[str, Node]:
    """Return the rules of a grammar by name.

    Raises:
        ValueError: the grammar is not valid GBNF.
    """
    tokens: list[tuple[str, str, int]] = []
    at = 0
    while at < len(source):
        if (found := _TOKEN.match(source, at)) is None:
            raise _error(source, at)
        if found.lastgroup != "space":
            tokens.append((str(found.lastgroup), found[0], at))
        at = found.end()
    rules: dict[str, Node] = {}
    used: dict[str, None] = {}
    stack: list[Node] = []  # choices, the innermost last
    index = 0
    while index < len(tokens):
        kind, text, at = tokens[index]
        index += 1
        if kind == "name" and len(stack) < 2 and index < len(tokens) and tokens[index][0] == "define":
            rules[text] = Node("choice", inner=[Node("sequence")])
            stack = [rules[text]]
            index += 1
            continue
        if not stack:
            raise _error(source, at)
        items = stack[-1].inner[-1].inner
        if text == "(" and len(stack) < MAX_NESTING:
            items.append(Node("choice", inner=[Node("sequence")]))
            stack.append(items[-1])
        elif text == ")" and len(stack) > 1:
            stack.pop()
        elif text == "|":
            stack[-1].inner.append(Node("sequence"))
        elif kind in ("count", "repeat") and items and items[-1].kind != "repeated":
            items[-1] = Node("repeated", inner=[items[-1]], counts=_counts(text))
        elif kind == "name":
            used[text] = None
            items.append(Node("name", text))
        elif kind in ("text", "set", "any"):
            items.append(_characters(text, source, at))
        else:
            raise _error(source, at)
    if len(stack) > 1:
        raise ValueError("a parenthesis is not closed")
    for name in [*used, "root"]:
        if name not in rules:
            raise ValueError(f"there is no rule {name[:50]!r}")
    return rules


def _error(source: str, at: int) -> ValueError:
    line = source.count("\n", 0, at) + 1
    return ValueError(f"line {line}: unexpected {source[at : at + 30]!r}")


def _counts(text: str) -> tuple[int, int | None]:
    if text in ("*", "+", "?"):
        return int(text == "+"), 1 if text == "?" else None
    least, comma, most = text[1:-1].partition(",")
    return int(least), int(most) if most.strip() else None if comma else int(least)


def _characters(text: str, source: str, at: int) -> Node:
    """Return the expression for a literal, a set of characters, or the dot, which matches any character."""
    if text == ".":
        return Node("set", "/(?s:.)/", sets=CharacterSets(False, ANY, ANY))
    negated = text.startswith("[^")
    begin, end = 1 + negated, len(text) - 1
    codes: list[int] = []
    dashes: set[int] = set()
    while begin < end:
        if (found := _CHARACTER.match(text, begin, end)) is None or not _is_text(code := _code(found[0])):
            raise _error(source, at + begin)
        if found[0] == "-":
            dashes.add(len(codes))
        codes.append(code)
        begin = found.end()
    if text[0] == '"':
        bits = [_bits(code, code) for code in codes]
        sets = CharacterSets(not codes, bits[0] if bits else 0, functools.reduce(int.__or__, bits, 0))
        return Node("text", json.dumps("".join(map(chr, codes)), ensure_ascii=False), sets=sets)
    ranges, index = [], 0
    while index < len(codes):
        last = index + 2 if index + 1 in dashes and index + 2 < len(codes) else index
        ranges.append((codes[index], codes[last]))
        index = last + 1
    if any(last < first for first, last in ranges) or not ranges:
        raise _error(source, at)
    mask = functools.reduce(int.__or__, (_bits(*each) for each in ranges))
    mask = (ANY & ~mask) | NON_ASCII if negated else mask
    written = "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in ranges)
    return Node("set", f"/[{'^' * negated}{written}]/", sets=CharacterSets(False, mask, mask))


def _code(written: str) -> int:
    if len(written) == 1:
        return ord(written)
    return int(written[2:], 16) if written[1] in "xuU" else ord(_ESCAPES.get(written, written[1]))


def _is_text(code: int) -> bool:
    return code < 0xD800 or 0xDFFF < code < 0x110000


def _bits(first: int, last: int) -> int:
    """Return the set of the characters in a range."""
    ascii = ((2 << min(last, 127)) - 1) & ~((1 << first) - 1) if first < 128 else 0
    return ascii | (NON_ASCII if last > 127 else 0)
