"""Compile grammars with llguidance, and check that their masks stay within limits."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
from cachetools import LRUCache
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from outrider.runtime.grammar.errors import first_line, refused
from outrider.runtime.grammar.matcher import Compiled, LocalMatcher, Matcher
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.text.special_tokens import unspelled

MAX_COMPILED = 64  # grammars that are kept compiled
# A hostile grammar may spend all of this in one step, about three seconds. llguidance's defaults are two to ten times higher.
# A JSON grammar that spells strings character by character takes up to 15,000 items with a vocabulary of 150,000.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
)

# Comments, strings and regular expressions in Lark, which contain no names; then the name of a token.
NAME = re.compile(r"""//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(<[^\s<>"\[\]]+>)""")


class Grammars(Protocol):
    """Starts the matchers of answers."""

    def begin(self, structured: StructuredOutputs, owner: Hashable = None) -> Matcher:
        """Return a matcher for a new answer of an owner's request.

        Raises:
            UsageError: the grammar cannot be compiled.
        """


class LocalGrammars(Grammars):
    """Compiles grammars for one tokenizer, and computes their masks in this process. It may be used from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_rows: int, end_ids: Sequence[int]):
        """Take a tokenizer, the width of the logits, and the tokens that end a text."""
        self._source, self._vocab_rows, self._end_ids = tokenizer, vocab_rows, list(end_ids)
        self._lock = threading.Lock()
        self._compiled: LRUCache[StructuredOutputs, Compiled] = LRUCache(MAX_COMPILED)

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """All tokens as a prefix tree. Building it takes a second for 150,000 tokens, and holds the interpreter's lock."""
        count = max(self._vocab_rows, self._source.get_vocab_size(with_added_tokens=True))
        known = LLTokenizer(self._source.to_str(), n_vocab=count, eos_token=self._end_ids)
        return LLTokenizer(unspelled(self._source, known.is_special_token), n_vocab=count, eos_token=self._end_ids)

    def compile(self, structured: StructuredOutputs) -> Compiled:
        """Return a compiled grammar, from a cache if possible.

        Raises:
            UsageError: the grammar cannot be compiled, or the bundle has no token that ends a text.
        """
        if not self._end_ids:
            raise refused("this bundle has no token that ends a text", "export a checkpoint that names its eos_token_id")
        with self._lock:
            kept = self._compiled.get(structured)
        if kept is None or kept.spoilt:
            special = {token.content: index for index, token in self._source.get_added_tokens_decoder().items()}
            source = _numbered(structured.source(), special)
            matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise refused(f"the grammar cannot be compiled: {first_line(matcher.get_error())}", "simplify it")
            rehearse(matcher, 1)
            kept = Compiled(matcher)
            with self._lock:
                self._compiled[structured] = kept
        return kept

    def forget(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._compiled.clear()

    def begin(self, structured: StructuredOutputs, owner: Hashable = None) -> LocalMatcher:
        return LocalMatcher(lambda: self.compile(structured), self._vocab_rows, self._end_ids)


def rehearse(matcher: LLMatcher, steps: int, opening: Sequence[int] = ()) -> None:
    """Follow several paths of some steps into a compiled grammar, to check that its masks stay within the limits.

    Args:
        opening: tokens to consume first, which end an answer's free text.

    Raises:
        UsageError: a mask exceeds a limit, or a step cannot be rolled back.
    """
    for share in (0.5, 0.0, 1.0):  # take the middle one of the allowed tokens, the first, or the last
        ahead = matcher.deep_copy()
        ahead.try_consume_tokens([*opening])
        for step in range(steps):
            mask = np.unpackbits(np.frombuffer(ahead.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(mask)
            consumed = 0
            if not ahead.is_stopped() and len(allowed):
                token = [int(allowed[int(share * (len(allowed) - 1))])]
                consumed = ahead.try_consume_tokens(token)
                if consumed and not step:
                    ahead.rollback(1)
                    ahead.try_consume_tokens(token)
            if ahead.is_error():
                raise refused(f"the grammar is too complex: {first_line(ahead.get_error())}", "simplify it")
            if not consumed:
                break


def _numbered(source: str, special: dict[str, int]) -> str:
    """Replace the names of special tokens in a grammar by their ids, because llguidance's tokenizer has no names for them."""

    def number(found: re.Match[str]) -> str:
        if (name := found[1]) is None:
            return found[0]
        if name not in special:
            raise refused(f"the grammar names {name[:100]}, which is not a special token of this model", "write it in quotes")
        return f"<[{special[name]}]>"

    def numbered(lark: str) -> str:
        return NAME.sub(number, lark)

    if not source.lstrip().startswith("{"):
        return numbered(source)
    try:
        document = json.loads(source)
    except (ValueError, RecursionError):  # llguidance refuses it
        return source
    grammars = document.get("grammars")
    for each in grammars if isinstance(grammars, list) else ():
        if isinstance(each, dict) and isinstance(lark := each.get("lark_grammar"), str):
            each["lark_grammar"] = numbered(lark)
    return json.dumps(document)
