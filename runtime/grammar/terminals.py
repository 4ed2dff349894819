"""Find the rules of a grammar that can become terminals, by FIRST and FOLLOW sets.

llguidance follows terminals fast, but matches them greedily: white space would take the line end after it, and a name the
keyword in its place. A rule for which that could matter must stay a rule. Sets of characters are coarse, so a rule may stay a
rule needlessly.
"""

from __future__ import annotations

import functools

from outrider.runtime.grammar.gbnf_parser import ANY, CharacterSets, Node

MAX_PASSES = 10  # over all rules, to propagate sets; for longer chains of rules the worst is assumed
UNKNOWN = CharacterSets(True, ANY, ANY, ANY)


def terminals(rules: dict[str, Node]) -> set[str]:
    """Return the names of the rules that can become terminals: they refer to other terminals at most.

    Set the character sets of all expressions.
    """
    _set_characters(rules)
    follow = _follow(rules)
    uses = {name: {each.text for each in node.walk() if each.kind == "name"} for name, node in rules.items()}
    found: set[str] = set()
    for _ in range(MAX_PASSES):
        before = len(found)
        for name in reversed(rules):
            sets = rules[name].sets
            swallows = sets.more | (sets.first if sets.nullable else 0)
            if name != "root" and not swallows & follow[name] and uses[name] <= found:
                found.add(name)
        if len(found) == before:
            break
    for _ in range(MAX_PASSES):
        if not (clashing := _clashing(rules, found, uses)):
            return found
        found -= clashing
    return set()


def _set_characters(rules: dict[str, Node]) -> None:
    known = dict.fromkeys(rules, CharacterSets())

    def update(node: Node) -> CharacterSets:
        inner = [update(each) for each in node.inner]
        if node.kind == "name":
            node.sets = known[node.text]
        elif node.kind == "sequence":
            node.sets = CharacterSets(True)
            for left in reversed(inner):
                node.sets = _concatenated(left, node.sets)
        elif node.kind == "choice":
            node.sets = functools.reduce(_either, inner)
        elif node.kind == "repeated":
            (least, most), (sets,) = node.counts, inner
            more = sets.more | (sets.first if most is None or most > least else 0)
            node.sets = CharacterSets(sets.nullable or least == 0, sets.first, sets.any, more)
        return node.sets

    for _ in range(MAX_PASSES):
        before = dict(known)
        for name in reversed(rules):
            known[name] = update(rules[name])
        if known == before:
            return
    known = dict.fromkeys(rules, UNKNOWN)
    for node in rules.values():
        update(node)


def _concatenated(left: CharacterSets, right: CharacterSets) -> CharacterSets:
    more = right.more | ((left.more | right.first) if right.nullable else 0)
    first = left.first | (right.first if left.nullable else 0)
    return CharacterSets(left.nullable and right.nullable, first, left.any | right.any, more)


def _either(one: CharacterSets, other: CharacterSets) -> CharacterSets:
    longer = (one.first if other.nullable else 0) | (other.first if one.nullable else 0)
    longer |= one.any | other.any if one.first & other.first else 0
    nullable, more = one.nullable or other.nullable, one.more | other.more | longer
    return CharacterSets(nullable, one.first | other.first, one.any | other.any, more)


def _follow(rules: dict[str, Node]) -> dict[str, int]:
    """Return the characters that may follow each rule."""
    follow = dict.fromkeys(rules, 0)

    def walk(node: Node, after: int) -> None:
        if node.kind == "name":
            follow[node.text] |= after
        elif node.kind == "repeated":
            walk(node.inner[0], after | (node.sets.first if node.counts[1] != 1 else 0))
        elif node.kind == "choice":
            for inner in node.inner:
                walk(inner, after)
        for inner in reversed(node.inner if node.kind == "sequence" else ()):
            walk(inner, after)
            after = inner.sets.first | (after if inner.sets.nullable else 0)

    for _ in range(MAX_PASSES):
        before = dict(follow)
        for name, node in rules.items():
            walk(node, follow[name])
        if follow == before:
            return follow
    return dict.fromkeys(rules, ANY)


def _clashing(rules: dict[str, Node], found: set[str], uses: dict[str, set[str]]) -> set[str]:
    """Return the terminals that start like other characters or terminals in rules, or that refer to a rule."""
    remaining = [name for name in rules if name not in found]
    started = twice = 0
    for name in remaining:
        for node in rules[name].walk():
            if node.kind in ("text", "set"):
                started |= node.sets.any
    used = {each for name in remaining for each in uses[name]} & found
    for name in used:
        twice |= started & rules[name].sets.first
        started |= rules[name].sets.first
    return {name for name in found if (name in used and rules[name].sets.first & twice) or not uses[name] <= found}
