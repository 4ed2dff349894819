"""Translate GBNF, the grammars of llama.cpp, into llguidance's Lark.

Rules that can become terminals do, because llguidance follows terminals fast; see `terminals`. Everything else is written as
single characters.
"""

from __future__ import annotations

import json
import re

from outrider.runtime.grammar.gbnf_parser import Node, parse
from outrider.runtime.grammar.terminals import terminals


def is_lark(source: str) -> bool:
    """Return whether a grammar is in Lark's syntax."""
    return any(re.match(r"%llguidance\b|start\s*(\[[^\]]*\]\s*)?:(?!:=)", line.lstrip()[:100]) for line in source.splitlines())


def to_lark(source: str) -> str:
    """Translate a grammar from GBNF to Lark, in time linear in its length.

    Raises:
        ValueError: the grammar is not valid GBNF.
    """
    rules = parse(source)
    found = terminals(rules)
    names = {}
    for at, name in enumerate(rules):
        plain = f"r{at}_{re.sub('[^a-z0-9]', '_', name.lower())}"
        names[name] = "start" if name == "root" else plain.upper() if name in found else plain
    lines = [f"{names[name]}: {_lark(node, names, name in found)}" for name, node in rules.items()]
    return "\n".join(["%llguidance {}", *lines])


def _lark(node: Node, names: dict[str, str], terminal: bool) -> str:
    """Return an expression of a terminal, or of a rule in single characters."""
    inner = [_lark(each, names, terminal) for each in node.inner]
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
