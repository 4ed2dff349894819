"""GBNF, the grammars of llama.cpp, as llguidance's Lark.

A rule that refers to no others, or only to such rules, becomes a terminal, which llguidance follows fast. But its terminals are
greedy: one takes all that it can, as white space would take the line end behind it, and a name the keyword in its place. A
rule of which this could matter stays a rule, and what is in no terminal is written as single characters. Sets of characters are
bits: one for each of ASCII, and one for all others, so a rule may stay one needlessly.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_NESTED = 100  # parentheses
PASSES = 10  # over all rules, to learn what follows what; of a longer chain of rules the worst is assumed
OTHERS = 1 << 128
ALL = (OTHERS << 1) - 1
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)|(?P<define>::=)|(?P<name>[\w-]+)|(?P<text>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<count>\{[ ]*[0-9]{1,9}[ ]*(?:,[ ]*[0-9]{0,9}[ ]*)?\})"""
    r"""|(?P<repeat>[*+?])|(?P<any>\.)|(?P<mark>[|()])""",
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[\"\\\[\]nrt^-]|[^\\]", re.DOTALL)
_NAMED = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}


class Facts(NamedTuple):
    """What is known of the texts of an expression, as sets of characters."""

    empty: bool = False  # whether one is empty
    first: int = 0  # their first ones
    any: int = 0  # all in them
    more: int = 0  # those by which one of them may become another


UNKNOWN = Facts(True, ALL, ALL, ALL)


@dataclass(eq=False, slots=True)
class Node:
    """An expression: characters, a reference, or others in sequence, as alternatives or repeated."""

    kind: str  # text, set, name, sequence, choice, repeated
    text: str = ""  # in Lark, or the name
    inner: list[Node] = field(default_factory=list)
    counts: tuple[int, int | None] = (1, 1)  # how often it is repeated
    facts: Facts = field(default_factory=Facts)


def is_lark(source: str) -> bool:
    """Return whether a grammar is in Lark's syntax."""
    return any(re.match(r"%llguidance\b|start\s*(\[[^\]]*\]\s*)?:(?!:=)", line.lstrip()[:100]) for line in source.splitlines())


def to_lark(source: str) -> str:
    """Return a grammar of GBNF in Lark's syntax, in time that grows as its length does.

    Raises:
        ValueError: it cannot be read.
    """
    rules = _parse(source)
    _learn(rules)
    terminals = _terminals(rules)
    names = {}
    for at, name in enumerate(rules):
        plain = f"r{at}_{re.sub('[^a-z0-9]', '_', name.lower())}"
        names[name] = "start" if name == "root" else plain.upper() if name in terminals else plain
    lines = [f"{names[name]}: {_written(node, names, name in terminals)}" for name, node in rules.items()]
    return "\n".join(["%llguidance {}", *lines])


def _parse(source: str) -> dict[str, Node]:
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
        if text == "(" and len(stack) < MOST_NESTED:
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
    return ValueError(f"line {line} has {source[at : at + 30]!r} where this cannot be")


def _counts(text: str) -> tuple[int, int | None]:
    if text in ("*", "+", "?"):
        return int(text == "+"), 1 if text == "?" else None
    least, comma, most = text[1:-1].partition(",")
    return int(least), int(most) if most.strip() else None if comma else int(least)


def _characters(text: str, source: str, at: int) -> Node:
    """Return a literal, a set of characters, or the dot, which is any."""
    if text == ".":
        return Node("set", "/(?s:.)/", facts=Facts(False, ALL, ALL))
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
        first = _bits(codes[0], codes[0]) if codes else 0
        literal = json.dumps("".join(map(chr, codes)), ensure_ascii=False)
        return Node(
            "text",
            literal,
            facts=Facts(not codes, first, functools.reduce(int.__or__, (_bits(each, each) for each in codes), 0)),
        )
    ranges, index = [], 0
    while index < len(codes):
        last = index + 2 if index + 1 in dashes and index + 2 < len(codes) else index
        ranges.append((codes[index], codes[last]))
        index = last + 1
    if any(last < first for first, last in ranges) or not ranges:
        raise _error(source, at)
    mask = functools.reduce(int.__or__, (_bits(*each) for each in ranges))
    mask = (ALL & ~mask) | OTHERS if negated else mask
    written = "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in ranges)
    return Node("set", f"/[{'^' * negated}{written}]/", facts=Facts(False, mask, mask))


def _code(written: str) -> int:
    if len(written) == 1:
        return ord(written)
    return int(written[2:], 16) if written[1] in "xuU" else ord(_NAMED.get(written, written[1]))


def _is_text(code: int) -> bool:
    return code < 0xD800 or 0xDFFF < code < 0x110000


def _bits(first: int, last: int) -> int:
    """Return the set of characters of a range."""
    ascii = ((2 << min(last, 127)) - 1) & ~((1 << first) - 1) if first < 128 else 0
    return ascii | (OTHERS if last > 127 else 0)


def _learn(rules: dict[str, Node]) -> None:
    """Set the facts of all expressions."""
    facts = dict.fromkeys(rules, Facts())

    def learn(node: Node) -> Facts:
        each = [learn(inner) for inner in node.inner]
        if node.kind == "name":
            node.facts = facts[node.text]
        elif node.kind == "sequence":
            node.facts = Facts(True)
            for right in reversed(each):
                node.facts = _before(right, node.facts)
        elif node.kind == "choice":
            node.facts = functools.reduce(_either, each)
        elif node.kind == "repeated":
            least, most = node.counts
            known = each[0]
            more = known.more | (known.first if most is None or most > least else 0)
            node.facts = Facts(known.empty or least == 0, known.first, known.any, more)
        return node.facts

    for _ in range(PASSES):
        before = dict(facts)
        for name in reversed(rules):
            facts[name] = learn(rules[name])
        if facts == before:
            return
    facts = dict.fromkeys(rules, UNKNOWN)
    for node in rules.values():
        learn(node)


def _before(left: Facts, right: Facts) -> Facts:
    """Return what is known of one expression before another."""
    more = right.more | ((left.more | right.first) if right.empty else 0)
    return Facts(left.empty and right.empty, left.first | (right.first if left.empty else 0), left.any | right.any, more)


def _either(one: Facts, other: Facts) -> Facts:
    longer = (one.first if other.empty else 0) | (other.first if one.empty else 0)
    longer |= one.any | other.any if one.first & other.first else 0
    return Facts(one.empty or other.empty, one.first | other.first, one.any | other.any, one.more | other.more | longer)


def _terminals(rules: dict[str, Node]) -> set[str]:
    """Return the rules that become terminals."""
    follow = _follow(rules)
    uses = {name: _names(node) for name, node in rules.items()}
    found: set[str] = set()
    for _ in range(PASSES):
        before = len(found)
        for name in reversed(rules):
            facts = rules[name].facts
            swallows = facts.more | (facts.first if facts.empty else 0)
            if name != "root" and not swallows & follow[name] and uses[name] <= found:
                found.add(name)
        if len(found) == before:
            break
    for _ in range(PASSES):
        if not (clashing := _clashing(rules, found, uses)):
            return found
        found -= clashing
    return set()


def _clashing(rules: dict[str, Node], terminals: set[str], uses: dict[str, set[str]]) -> set[str]:
    """Return the terminals that begin as something else outside of terminals does, or refer to what is none."""
    outside = [name for name in rules if name not in terminals]
    begun = twice = 0
    for each in itertools.chain.from_iterable(_nodes(rules[name]) for name in outside):
        if each.kind in ("text", "set"):
            begun |= each.facts.any
    used = {each for name in outside for each in uses[name]} & terminals
    for name in used:
        twice |= begun & rules[name].facts.first
        begun |= rules[name].facts.first
    return {name for name in terminals if (name in used and rules[name].facts.first & twice) or not uses[name] <= terminals}


def _nodes(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        waiting += each.inner
        yield each


def _names(node: Node) -> set[str]:
    return {each.text for each in _nodes(node) if each.kind == "name"}


def _follow(rules: dict[str, Node]) -> dict[str, int]:
    """Return the characters that may come after each rule."""
    follow = dict.fromkeys(rules, 0)

    def walk(node: Node, after: int) -> None:
        if node.kind == "name":
            follow[node.text] |= after
        elif node.kind == "repeated":
            walk(node.inner[0], after | (node.facts.first if node.counts[1] != 1 else 0))
        elif node.kind == "choice":
            for inner in node.inner:
                walk(inner, after)
        for inner in reversed(node.inner if node.kind == "sequence" else ()):
            walk(inner, after)
            after = inner.facts.first | (after if inner.facts.empty else 0)

    for _ in range(PASSES):
        before = dict(follow)
        for name, node in rules.items():
            walk(node, follow[name])
        if follow == before:
            return follow
    return dict.fromkeys(rules, ALL)


def _written(node: Node, names: dict[str, str], terminal: bool) -> str:
    """Return an expression in Lark, of a terminal or of single characters."""
    inner = [_written(each, names, terminal) for each in node.inner]
    if node.kind == "text" and not terminal:
        characters = [json.dumps(each, ensure_ascii=False) for each in json.loads(node.text)]
        return f"({' '.join(characters or [node.text])})"
    if node.kind == "name":
        return names[node.text]
    if node.kind == "sequence":
        return " ".join(inner) or '""'
    if node.kind == "choice":
        return f"({' | '.join(inner)})"
    if node.kind == "repeated":
        least, most = node.counts
        return f"{inner[0]}{{{least},{'' if most is None else most}}}"
    return node.text
