"""Grammars of llama.cpp: what they allow is what they say, whichever of their rules become terminals."""

from __future__ import annotations

import random
import time

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.runtime.grammar.gbnf import is_lark, to_lark

ARITHMETIC = r"""root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*"""
JSON = r"""# comment
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}"""
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "arithmetic": (ARITHMETIC, ["a+1= 2\n", "a+1= 2\n\n\t\n", "(a1 *2)=x\nb=3\n"], ["a+1= 2", "a+=2\n"]),
    "json": (JSON, ['{"a": [1, "x\\n\\u00e9é", -2.5e3, true],"b":{}}'], ["{a: 1}", '{"a": 01x}', '{"a": "\n"}']),
    "a literal in letters": ('root ::= [a-z]+ "ab"', ["xab", "abab"], ["ab", "xa"]),
    "a longer literal": ('root ::= a b\na ::= "x" | "xy"\nb ::= "yz"?', ["xyz", "xyyz", "x"], ["yz"]),
    "a keyword": ('root ::= "if " x | x "="\nx ::= [a-z]+', ["if a", "if=", "iff="], ["if "]),
    "a rule that may be empty": ('root ::= "a" x\nx ::= "b" x |', ["a", "abb"], ["ab" * 2]),
    "lines": ('root ::= "a" |\n  "b" # c\n\n\nx-y_Z ::= [c]', ["a", "b"], ["c"]),
    "times": ('root ::= "ab"{2} [c]{1,} . {0,1}', ["ababc", "ababccé"], ["abab", "ababc12"]),
    "escapes": (
        r'root ::= "\x41\u00e9\U0001F642\t\\\"" [\]\-\^a-c/] [-^]',
        ['Aé🙂\t\\"]-', 'Aé🙂\t\\"b^', 'Aé🙂\t\\"/^'],
        ["A"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_grammar_allows(case: str) -> None:
    grammar, right, wrong = CASES[case]
    at_start = LLMatcher(LLTokenizer("byte"), to_lark(grammar), log_level=0)
    assert not at_start.is_error(), at_start.get_error()
    for text in right + wrong:
        matcher = at_start.deep_copy()
        assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) is (text in right), text


Language = set[str]  # of texts up to a length
LONGEST = 4


def written(choices: random.Random, known: dict[str, Language], depth: int = 0) -> tuple[str, Language]:
    """A random expression over two letters, and its texts."""
    kind = choices.choice(
        ("text", "set", "name", "sequence", "sequence", "choice", "choice", "repeated") if depth < 3 else ("text", "set")
    )
    if kind == "name" and known:
        name = choices.choice([*known])
        return name, known[name]
    if kind in ("text", "set", "name"):
        letters = choices.choice(("a", "b", "ab", "ba", "aa"))
        return (f"[{letters}]", {*letters}) if kind == "set" else (f'"{letters}"', {letters})
    parts = [written(choices, known, depth + 1) for _ in range(1 if kind == "repeated" else 2)]
    sources, languages = [source for source, _ in parts], [language for _, language in parts]
    if kind == "choice":
        return f"({' | '.join(sources)})", set.union(*languages)
    if kind == "sequence":
        return f"({' '.join(sources)})", joined(*languages)
    sign = choices.choice("?*+")
    times: list[Language] = [{""}]
    for _ in range(1 if sign == "?" else LONGEST):
        times.append(joined(times[-1], languages[0]))
    return f"({sources[0]}){sign}", set.union(*times[sign == "+" :])


def joined(first: Language, second: Language) -> Language:
    return {one + other for one in first for other in second if len(one + other) <= LONGEST}


def test_random_grammars_allow_what_they_say() -> None:
    """Whatever begins alike."""
    choices, texts = random.Random(0), [""]
    for _ in range(LONGEST):
        texts += [text + letter for text in texts for letter in "ab" if text + letter not in texts]
    for _ in range(150):
        rules: dict[str, Language] = {}
        lines = []
        for name in ("z", "y", "x", "root"):
            source, rules[name] = written(choices, rules)
            lines.append(f"{name} ::= {source}")
        at_start = LLMatcher(LLTokenizer("byte"), to_lark("\n".join(lines)), log_level=0)
        assert not at_start.is_error(), (lines, at_start.get_error())
        for text in texts:
            matcher = at_start.deep_copy()
            allowed = (not text or matcher.consume_tokens([*text.encode()])) and matcher.is_accepting()
            assert allowed is (text in rules["root"]), (lines, text)


def test_a_long_chain_of_rules_takes_as_long_as_its_length() -> None:
    """Though each one clashes only once the one that it refers to is no terminal."""
    chain = "\n".join(f"r{at} ::= r{at + 1}" for at in range(15_000))
    began = time.process_time()
    to_lark(f'root ::= q r0\nq ::= r15000 [a] q | "x"\n{chain}\nr15000 ::= "ab"')
    assert time.process_time() - began < 10  # a hundred times as long if its square


def test_a_rule_stays_a_terminal_where_it_cannot_take_too_much() -> None:
    """By single characters, the masks within a string would take a hundred times as long."""
    assert {name for name in ("STRING", "NUMBER", "WS") if f"_{name}:" in to_lark(JSON)} == {"STRING", "NUMBER", "WS"}


@pytest.mark.parametrize(
    "grammar",
    [
        *(
            "",
            "root",
            "root ::= (",
            'root ::= "a',
            "root ::= a",
            "a ::= [b]",
            "root ::= *",
            "root ::= [b-a]",
            "root ::= )",
            "::=",
        ),
        *('root ::= "\\ud800"', 'root ::= "\\q"', "root ::= []", "root ::= " + "(" * 200_000, "root ::= [a]" + "*" * 200_000),
    ],
    ids=lambda grammar: grammar[:20],
)
def test_what_cannot_be_read_is_refused(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"line 1|no rule|not closed"):
        to_lark(grammar)


def test_the_syntax_is_told_apart() -> None:
    lark = "%llguidance {}", "\n  start : a", "start[lazy]: a", "start[max_tokens=3] : a"
    assert all(map(is_lark, lark))
    assert not any(map(is_lark, ("start::= a", "root ::= start", " " * 200_000)))
