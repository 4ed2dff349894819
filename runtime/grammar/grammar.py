"""Grammars of answers: which tokens may come next. llguidance compiles them and computes the masks.

A mask holds for a position after the confirmed tokens and some drafted ones, so a draft row and the target's row in the same
place have the same one. Masked logits are minus infinity, which is all that speculation needs to stay exact: p and q are then
distributions over what the grammar allows.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from outrider.errors import EngineError
from outrider.runtime.grammar.structured import StructuredOutputs, first_line, refused
from outrider.runtime.matching import matching
from outrider.runtime.text.special_tokens import unspelled

MAX_COMPILED = 64  # grammars that are kept compiled
# A step of a hostile grammar may take as much as these allow, some three seconds. Those of llguidance are two to ten times
# higher. A grammar of JSON that spells strings by single characters takes up to 15,000 items, with a vocabulary of 150,000.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
)

# What is not a name in Lark: comments, texts and expressions; then a token's name.
NAME = re.compile(r"""//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(<[^\s<>"\[\]]+>)""")

Returned = TypeVar("Returned")
Bools = npt.NDArray[np.bool_]


class GrammarError(EngineError):
    """The tokens that a grammar allows cannot be computed, or there are none."""


class Matcher(Protocol):
    """One answer's grammar: what may follow its confirmed tokens, and drafted ones behind them."""

    def ready(self, patient: bool = True) -> bool:
        """Return whether the answer can take part in a round now, after a moment's patience. One that is not sits it out."""

    def masks(self, drafted: Sequence[int]) -> tuple[list[Bools], int]:
        """Return what may follow the confirmed tokens and the drafted ones.

        Returns:
            which tokens, bool [V], may follow the first 0, 1, ... of the drafted ones, as far as these are in the grammar and
            do not end the text; the first is always there. And how many rows of the round count: one more than are drafted,
            or fewer where some of these were not followed.

        Raises:
            GrammarError: a limit is exceeded, or no token may follow the confirmed ones.
        """

    def forced(self, limit: int) -> list[int]:
        """Return up to so many tokens that spell what the grammar forces next, or the one that its mask leaves; none where it
        leaves a choice, or where the text may end."""

    def valid(self, tokens: list[int]) -> int:
        """Return how many of the tokens, from the first on, the grammar allows after the confirmed ones."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the tokens that a round confirmed, up to one that ends the text.

        Raises:
            GrammarError: one of them is not allowed, or leads to where the grammar cannot be followed.
        """


class Grammars(Protocol):
    """What begins answers by grammars."""

    def begin(self, structured: StructuredOutputs, owner: Hashable = None) -> Matcher:
        """Return a new answer's place in a grammar; `owner` is whose request it is.

        Raises:
            UsageError: the grammar cannot be compiled.
        """


class LocalGrammars(Grammars):
    """Compiles grammars for one tokenizer, and computes their masks in this process. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_rows: int, end_ids: Sequence[int]):
        """Take a tokenizer, the width of the logits, and the tokens that end a text."""
        self._source, self._vocab_rows, self._end_ids = tokenizer, vocab_rows, list(end_ids)
        self._lock = threading.Lock()
        self._compiled: LRUCache[StructuredOutputs, Compiled] = LRUCache(MAX_COMPILED)

    @functools.cached_property
    def tokenizer(self) -> LLTokenizer:
        """The texts of all tokens as a tree, which takes a second for 150,000 tokens, and the interpreter's lock."""
        count = max(self._vocab_rows, self._source.get_vocab_size(with_added_tokens=True))
        known = LLTokenizer(self._source.to_str(), n_vocab=count, eos_token=self._end_ids)
        return LLTokenizer(unspelled(self._source, known.is_special_token), n_vocab=count, eos_token=self._end_ids)

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        return {token.content: index for index, token in self._source.get_added_tokens_decoder().items()}

    def compile(self, structured: StructuredOutputs) -> Compiled:
        """Return a grammar at its start, which is kept.

        Raises:
            UsageError: it cannot be compiled, or no token can end a text.
        """
        if not self._end_ids:
            raise refused("this bundle has no token that ends a text", "export a checkpoint that names its eos_token_id")
        with self._lock:
            kept = self._compiled.get(structured)
        if kept is None or kept.spoilt:
            source = _numbered(structured.source(), self._special)
            matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise refused(f"the grammar cannot be compiled: {first_line(matcher.get_error())}", "simplify it")
            rehearse(matcher, 1)
            kept = Compiled(matcher)
            with self._lock:
                self._compiled[structured] = kept
        return kept

    def forget(self) -> None:
        """Keep no grammar any longer."""
        with self._lock:
            self._compiled.clear()

    def begin(self, structured: StructuredOutputs, owner: Hashable = None) -> LocalMatcher:
        """Return a new answer's place in a grammar; see `compile`."""
        return LocalMatcher(lambda: _Place(self.compile(structured), self._vocab_rows, self._end_ids))


def _numbered(source: str, special: dict[str, int]) -> str:
    """Return a grammar in llguidance's own form that names special tokens by their ids, since its tokenizer has no names."""

    def number(found: re.Match[str]) -> str:
        if (name := found[1]) is None:
            return found[0]
        if name not in special:
            raise refused(f"the grammar names {name[:100]}, which is no special token of this model", "write it in quotes")
        return f"<[{special[name]}]>"

    def numbered(lark: str) -> str:
        return NAME.sub(number, lark)

    if not source.lstrip().startswith("{"):
        return numbered(source)
    try:
        described = json.loads(source)
    except (ValueError, RecursionError):  # a client's, which is refused where it is compiled
        return source
    grammars = described.get("grammars")
    for each in grammars if isinstance(grammars, list) else ():
        if isinstance(each, dict) and isinstance(lark := each.get("lark_grammar"), str):
            each["lark_grammar"] = numbered(lark)
    return json.dumps(described)


@dataclass(eq=False, slots=True)
class Compiled:
    """A grammar at its start. Copies of its matcher share the states of their lexer, and so they share its limits, too."""

    matcher: LLMatcher
    spoilt: bool = False  # whether an answer has failed by it: others may then as well, and it is compiled anew for new ones


class LocalMatcher(Matcher):
    """A matcher in this process.

    Drafted tokens may lead to where a grammar cannot be followed, though the target would go another way. When that has
    happened, no drafted token of the answer is followed any more: it goes on as in plain decoding, and ends where that would. A
    grammar that other answers have brought to its limits is begun anew as well.
    """

    def __init__(self, begin: Callable[[], _Place]):
        """Begin at the start of the answer, which `begin` returns."""
        self._begin = begin
        self._place = begin()
        self._confirmed: list[int] = []
        self._plain = False  # whether no drafted token is followed any more

    def ready(self, patient: bool = True) -> bool:
        """See `Matcher.ready`."""
        return True

    def masks(self, drafted: Sequence[int]) -> tuple[list[Bools], int]:
        """See `Matcher.masks`."""
        masks = self._try(lambda place: place.masks(drafted), bool(drafted)) or self._place.masks([])
        return masks, 1 if self._plain else len(drafted) + 1

    def forced(self, limit: int) -> list[int]:
        """See `Matcher.forced`."""
        return (self._try(lambda place: place.forced()) or [])[:limit]

    def valid(self, tokens: list[int]) -> int:
        """See `Matcher.valid`."""
        return self._try(lambda place: place.valid(tokens)) or 0

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Matcher.advance`."""
        if self._try(lambda place: place.advance(tokens), ahead=False) is None:
            self._place.advance(tokens)
        self._confirmed += tokens

    def _try(self, work: Callable[[_Place], Returned], ahead: bool = True) -> Returned | None:
        """Compute something that may fail for reasons that are not the answer's own: it is `ahead` of the confirmed tokens, or
        other answers by the same grammar have brought it to its limits.

        Returns:
            None if it failed now, and the place is a new one at the confirmed tokens; or if that was so before.

        Raises:
            GrammarError: that place cannot be reached, or a confirmed token is not in the grammar.
        """
        if self._plain:
            return None
        try:
            return work(self._place)
        except GrammarError:
            if not ahead and not self._place.failed:
                raise
            self._place.compiled.spoilt = self._plain = True
            anew = self._begin()
            anew.advance(self._confirmed)  # two microseconds a token
            self._place = anew
            return None


class _Place:
    """Where an answer is in a compiled grammar: after its confirmed tokens, and looking ahead over drafted ones."""

    def __init__(self, compiled: Compiled, vocab_rows: int, end_ids: Sequence[int]):
        self.compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._vocab_rows = vocab_rows
        self._end_ids = frozenset(end_ids)
        self._ahead: list[int] = []  # drafted tokens that the matcher has taken
        self._masks: list[Bools] = []  # after the first 0, 1, ... of these

    @property
    def failed(self) -> bool:
        """Whether llguidance has given up, for a limit or because nothing can follow."""
        return bool(self._matcher.is_error())

    def masks(self, drafted: Sequence[int]) -> list[Bools]:
        """See `Matcher.masks`."""
        self._retreat(matching(self._ahead, drafted))
        self._fill()
        for token in drafted[len(self._ahead) :]:
            if not self._take(token):
                self._check()
                break
            self._fill()
        return self._masks[: len(self._ahead) + 1]

    def _fill(self) -> None:
        """Compute the mask for the position that the matcher is at, if that was not done before."""
        if len(self._masks) > len(self._ahead):
            return
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(packed, bitorder="little", count=self._vocab_rows).view(np.bool_)
        if not mask.any():
            raise GrammarError("the grammar leaves no token", "change the grammar")
        self._masks.append(mask)

    def forced(self) -> list[int]:
        """See `Matcher.forced`."""
        self._retreat(0)
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        if tokens:
            return tokens
        self._fill()
        left = np.flatnonzero(self._masks[0])
        return [] if len(left) > 1 or left[0] in self._end_ids else left.tolist()

    def valid(self, tokens: list[int]) -> int:
        """See `Matcher.valid`."""
        self._retreat(0)
        count: int = self._matcher.validate_tokens(tokens)
        self._check()
        return count

    def advance(self, tokens: Sequence[int]) -> int:
        """Take confirmed tokens; see `Matcher.advance`. Return how many there are."""
        self._retreat(matching(self._ahead, tokens))
        for token in tokens[len(self._ahead) :]:
            if token in self._end_ids:
                break
            if not self._take(token):
                self._check()
                raise GrammarError("a confirmed token is not in the grammar", "please report this as a bug")
        self._ahead, self._masks = [], self._masks[len(self._ahead) :][:1]
        return len(tokens)

    def _take(self, token: int) -> bool:
        if token in self._end_ids or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._ahead.append(token)
        return True

    def _retreat(self, count: int) -> None:
        """Look ahead over no more than the first `count` of the tokens that were taken."""
        if count < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - count)
            del self._ahead[count:]
            del self._masks[count + 1 :]

    def _check(self) -> None:
        if self.failed:
            self.compiled.spoilt = True
            raise GrammarError(f"the grammar is too complex: {first_line(self._matcher.get_error())}", "simplify it")


def rehearse(matcher: LLMatcher, steps: int) -> None:
    """Go some steps into a compiled grammar, by several ways, to learn whether its masks stay within the limits.

    Raises:
        UsageError: they do not, or the grammar cannot be looked ahead in.
    """
    for way in (0.5, 0.0, 1.0):  # which of the allowed tokens is taken
        ahead = matcher.deep_copy()
        for step in range(steps):
            mask = np.unpackbits(np.frombuffer(ahead.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(mask)
            going_on = not ahead.is_stopped() and len(allowed)
            if going_on:
                token = [int(allowed[int(way * (len(allowed) - 1))])]
                going_on = ahead.try_consume_tokens(token)
                if going_on and not step:
                    ahead.rollback(1)
                    ahead.try_consume_tokens(token)
            if ahead.is_error():
                raise refused(f"the grammar is too complex: {first_line(ahead.get_error())}", "simplify it")
            if not going_on:
                break
