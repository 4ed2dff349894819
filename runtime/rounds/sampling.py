"""The samplers' inputs for one request: settings, random numbers, and edits of logits."""

from __future__ import annotations

import secrets

import numpy as np

from outrider.engines.arrays import Floats, Int64s
from outrider.engines.samplers import CANDIDATES, EDITS, SETTINGS
from outrider.runtime.grammar.matcher import Matcher
from outrider.runtime.params import SamplingParams

DRAWS = 64  # positions to draw random numbers for at once
DRAFTING, ACCEPTING, DRAWING = slice(0, 2), slice(2, 3), slice(3, 5)  # the uses of a position's five numbers


class SamplingState:
    """The samplers' state of one request."""

    def __init__(
        self, params: SamplingParams, prompt: list[int], end_ids: list[int], vocab_rows: int, grammar: Matcher | None = None
    ):
        """Start a request whose text ends at any of `end_ids`. They are banned before `min_new_tokens`."""
        self.params = params
        self.grammar = grammar
        self.end_ids = frozenset(end_ids)
        self.settings = np.array([[params.setting(name, vocab_rows) for name in SETTINGS]], dtype=np.float32)
        self.exact = params.exact
        self.candidates = 1
        if self.setting("top_k") > 0:
            self.candidates = int(self.setting("top_k"))
        elif self.setting("top_p") < 1:
            self.candidates = min(CANDIDATES[0], vocab_rows)
        self.emitted = 0
        seed = secrets.randbits(63) if params.seed is None else int(params.seed)
        # The raw numbers of a bit generator are the same in every release of NumPy; those of its Generator are not.
        self._random = np.random.Philox(key=seed % 2**64)
        self._uniforms = np.empty((0, 5), dtype=np.float32)
        self._edits: dict[int, list[float]] = {}
        self._table: tuple[Int64s, Floats] | None = None
        for token, bias in params.biases.items():
            self._edit(token, "bias", bias)
        if params.min_new_tokens:
            for token in end_ids:
                self._edit(token, "banned_rows", params.min_new_tokens)
        self._penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        if self._penalized:
            for token in prompt:
                self._edit(token, "seen", 1)
        self.greedy = params.temperature == 0 and not self._edits  # whether it takes the argmax of unchanged logits

    def setting(self, name: str) -> float:
        """Return one of `contract.SETTINGS`."""
        return float(self.settings[0, SETTINGS.index(name)])

    def advance(self, tokens: list[int]) -> None:
        """Note the tokens that a round confirmed.

        Raises:
            GrammarError: they leave the grammar, or it is too complex.
        """
        if self.grammar is not None:
            self.grammar.advance(tokens)
        self.emitted += len(tokens)
        if self._penalized:
            for token in tokens:
                self._edit(token, "seen", 1)
                self._edit(token, "count", self._edits[token][EDITS.index("count")] + 1)
        if self.params.min_new_tokens:
            self._table = None  # the ban now ends in an earlier row

    def uniforms(self, first: int, count: int) -> Floats:
        """Return random numbers, float32 [count, 5] in [0, 1), for the answer's tokens from index `first` on.

        They depend on nothing but the seed and the index, so a token depends neither on how many tokens were drafted and
        rejected before it nor on other requests. An index may be drafted more than once, but what an earlier round drew
        for it had no influence on the tokens emitted before it.
        """
        while len(self._uniforms) < first + count:
            bits = self._random.random_raw(5 * DRAWS) >> np.uint64(40)
            drawn = (bits.astype(np.float32) * np.float32(2**-24)).reshape(DRAWS, 5)
            self._uniforms = np.concatenate([self._uniforms, drawn])
        return self._uniforms[first : first + count]

    def table(self) -> tuple[Int64s, Floats]:
        """Return `edit_ids` [1, N] and `edits` [1, N, 4], with one entry that changes nothing if there are no edits."""
        if self._table is None:
            rows = np.array(list(self._edits.values()) or [[0.0] * len(EDITS)], dtype=np.float32)
            rows[:, EDITS.index("banned_rows")] -= self.emitted
            self._table = np.array([list(self._edits) or [0]], dtype=np.int64), rows[None]
        return self._table

    def _edit(self, token: int, kind: str, value: float) -> None:
        self._edits.setdefault(token, [0.0] * len(EDITS))[EDITS.index(kind)] = value
        self._table = None
