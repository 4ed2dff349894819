"""Which tokens a grammar allows next in an answer.

A mask applies to a position after the confirmed tokens and some drafted ones. A draft row and the target's row for the same
position therefore have the same mask. Masked logits are minus infinity, and that is enough to keep speculation exact: p and q
are then distributions over what the grammar allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from outrider.runtime.grammar.errors import GrammarError, first_line
from outrider.runtime.matching import matching

Returned = TypeVar("Returned")
Bools = npt.NDArray[np.bool_]


class Matcher(Protocol):
    """The state of one answer in its grammar: what may follow its confirmed tokens and the drafted ones after them."""

    def ready(self, patient: bool = True) -> bool:
        """Return whether the answer can take part in a round now. If `patient`, wait a moment for the masks.

        An answer that is not ready skips the round.
        """

    def masks(self, drafted: Sequence[int]) -> tuple[list[Bools], int]:
        """Return what may follow the confirmed tokens and the drafted ones.

        Returns:
            masks, and the number of valid rows. Mask i, bool [V], says which tokens may follow the first i drafted ones. The
            list ends where a drafted token leaves the grammar or ends the text, and always has the first mask. There is one
            valid row more than drafted tokens, or fewer if the matcher did not follow all of them.

        Raises:
            GrammarError: a limit is exceeded, or no token may follow the confirmed ones.
        """

    def forced(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that the grammar forces next: the spelling of forced text, or the only allowed token.

        The list is empty if the grammar leaves a choice or the text may end.
        """

    def valid(self, tokens: list[int]) -> int:
        """Return how many of the tokens, from the first on, the grammar allows after the confirmed ones."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Accept the tokens that a round confirmed, up to one that ends the text.

        Raises:
            GrammarError: a token is not allowed, or the grammar cannot be followed after it.
        """


@dataclass(eq=False, slots=True)
class Compiled:
    """A compiled grammar at its start. Copies of its matcher share the lexer's states, and therefore its limits."""

    matcher: LLMatcher
    spoilt: bool = False  # whether an answer has failed with it; others may fail too, so new answers recompile the grammar


class LocalMatcher(Matcher):
    """A matcher in this process.

    Drafted tokens may lead to a state from which the grammar cannot be followed, even if the target would choose others. After
    such a failure the answer restarts from its confirmed tokens and follows no drafted ones, as in plain decoding. It also
    restarts if other answers have exhausted the limits of the compiled grammar that they share.
    """

    def __init__(self, compiled: Callable[[], Compiled], vocab_rows: int, end_ids: Sequence[int]):
        """Start at the beginning of the grammar that `compiled` returns, for logits [vocab_rows]."""
        self._start: Callable[[], _Place] = lambda: _Place(compiled(), vocab_rows, end_ids)
        self._place = self._start()
        self._confirmed: list[int] = []
        self._plain = False  # whether drafted tokens are no longer followed

    def ready(self, patient: bool = True) -> bool:
        return True

    def masks(self, drafted: Sequence[int]) -> tuple[list[Bools], int]:
        masks = self._try(lambda place: place.masks(drafted), bool(drafted)) or self._place.masks([])
        return masks, 1 if self._plain else len(drafted) + 1

    def forced(self, limit: int) -> list[int]:
        return (self._try(lambda place: place.forced()) or [])[:limit]

    def valid(self, tokens: list[int]) -> int:
        return self._try(lambda place: place.valid(tokens)) or 0

    def advance(self, tokens: Sequence[int]) -> None:
        if self._try(lambda place: place.advance(tokens), ahead=False) is None:
            self._place.advance(tokens)
        self._confirmed += tokens

    def _try(self, work: Callable[[_Place], Returned], ahead: bool = True) -> Returned | None:
        """Run work that may fail for reasons other than the answer itself: the work looks `ahead` of the confirmed tokens, or
        other answers have exhausted the shared limits.

        Returns:
            the result; None after a failure, now or earlier. Then the matcher is in a new state after the confirmed tokens.

        Raises:
            GrammarError: that state cannot be reached, or a confirmed token is not in the grammar.
        """
        if self._plain:
            return None
        try:
            return work(self._place)
        except GrammarError:
            if not ahead and not self._place.failed:
                raise
            self._place.compiled.spoilt = self._plain = True
            place = self._start()
            place.advance(self._confirmed)  # two microseconds a token
            self._place = place
            return None


class _Place:
    """A position in a compiled grammar: after the confirmed tokens, and looking ahead over drafted ones.

    Its methods do what those of `Matcher` with the same names do.
    """

    def __init__(self, compiled: Compiled, vocab_rows: int, end_ids: Sequence[int]):
        self.compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._vocab_rows = vocab_rows
        self._end_ids = frozenset(end_ids)
        self._ahead: list[int] = []  # drafted tokens that the matcher has consumed
        self._masks: list[Bools] = []  # after the first 0, 1, ... of these

    @property
    def failed(self) -> bool:
        """Whether llguidance has given up, because a limit was reached or nothing can follow."""
        return bool(self._matcher.is_error())

    def masks(self, drafted: Sequence[int]) -> list[Bools]:
        self._rewind(matching(self._ahead, drafted))
        self._fill()
        for token in drafted[len(self._ahead) :]:
            if not self._consume(token):
                self._check()
                break
            self._fill()
        return self._masks[: len(self._ahead) + 1]

    def _fill(self) -> None:
        """Compute the mask for the matcher's position, unless it is known."""
        if len(self._masks) > len(self._ahead):
            return
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(packed, bitorder="little", count=self._vocab_rows).view(np.bool_)
        if not mask.any():
            raise GrammarError("the grammar allows no further token", "change the grammar")
        self._masks.append(mask)

    def forced(self) -> list[int]:
        self._rewind(0)
        tokens: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        if tokens:
            return tokens
        self._fill()
        allowed = np.flatnonzero(self._masks[0])
        return [] if len(allowed) > 1 or allowed[0] in self._end_ids else allowed.tolist()

    def valid(self, tokens: list[int]) -> int:
        self._rewind(0)
        count: int = self._matcher.validate_tokens(tokens)
        self._check()
        return count

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume confirmed tokens, and return their number."""
        self._rewind(matching(self._ahead, tokens))
        for token in tokens[len(self._ahead) :]:
            if token in self._end_ids:
                break
            if not self._consume(token):
                self._check()
                raise GrammarError("a confirmed token is not in the grammar", "please report this as a bug")
        self._ahead, self._masks = [], self._masks[len(self._ahead) :][:1]
        return len(tokens)

    def _consume(self, token: int) -> bool:
        if token in self._end_ids or self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._ahead.append(token)
        return True

    def _rewind(self, count: int) -> None:
        """Keep only the first `count` of the drafted tokens that were consumed."""
        if count < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - count)
            del self._ahead[count:]
            del self._masks[count + 1 :]

    def _check(self) -> None:
        if self.failed:
            self.compiled.spoilt = True
            raise GrammarError(f"the grammar is too complex: {first_line(self._matcher.get_error())}", "simplify it")
