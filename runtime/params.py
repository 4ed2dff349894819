"""Request parameters, with the names, ranges and meanings of the OpenAI and vLLM APIs."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from outrider.errors import UsageError
from outrider.runtime.grammar.structured import StructuredOutputs

RULES = ("rejection", "exact-match")
NO_TRUNCATION = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0}
MAX_STOP = 1000  # characters of a stop string: searching for it delays other requests

# For each number: its type, a check, and the check in words. The command line uses types and words.
# Where the APIs set no bound, ours is what fp32 can distinguish.
RANGES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (float, lambda value: value == 0 or 1e-5 <= value <= 100, "0, or from 0.00001 to 100"),
    "top_k": (int, lambda value: value >= -1, "-1 or more"),
    "top_p": (float, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (float, lambda value: 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (float, lambda value: 0.01 <= value <= 100, "from 0.01 to 100"),
    "presence_penalty": (float, lambda value: -2 <= value <= 2, "from -2 to 2"),
    "frequency_penalty": (float, lambda value: -2 <= value <= 2, "from -2 to 2"),
    "seed": (int, lambda value: -(2**63) <= value < 2**64, "a whole number of 64 bits"),
    "max_new_tokens": (int, lambda value: value >= 1, "at least 1"),
    "min_new_tokens": (int, lambda value: value >= 0, "from 0 to max_new_tokens"),
    "logprobs": (int, lambda value: 0 <= value <= 20, "from 0 to 20"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when the text ends. The same applies to draft and target.

    Order of application: the mask of structured_outputs, logit bias and bans, penalties, temperature, min_p, top_k, top_p.

    Raises:
        UsageError: a value is out of range; the message names the range.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # keep the k most likely tokens; 0 or -1 keeps all
    top_p: float = 1.0  # keep the fewest tokens whose probabilities reach this sum; 1 keeps all
    min_p: float = 0.0  # keep tokens at least this likely, compared with the most likely one; 0 keeps all
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or answer
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the answer
    logit_bias: Mapping[int, float] | None = None  # by token id: added to the logit, -100 to 100
    seed: int | None = None  # fixes the answer; None draws one
    # Which drafted tokens are accepted: one of RULES. None is exact-match with a seed, so that the answer equals plain
    # decoding's whatever was drafted. Without a seed it is rejection, which accepts more.
    rule: str | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0  # until then, end-of-text and stop tokens are banned and stop strings are ignored
    stop: str | Iterable[str] | None = ()  # strings that end the text; the answer excludes them
    stop_token_ids: Iterable[int] | None = ()  # tokens that end the text, besides the model's own
    logprobs: int | None = None  # report each token's logprob and those of this many most likely tokens
    structured_outputs: StructuredOutputs | None = None  # what the answer must match; other tokens are masked
    memory: bool = True  # if the bundle has a memory: draft from earlier requests, and remember this one

    # Checked copies: the arguments may be any collections, even iterators.
    stop_strings: tuple[str, ...] = field(init=False)
    stop_tokens: tuple[int, ...] = field(init=False)
    biases: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        for name in RANGES:
            value, (kind, fits, requirement) = getattr(self, name), RANGES[name]
            unset = value is None and name in ("seed", "logprobs")
            _check(name, value, unset or (_is_number(value, kind) and fits(value)), requirement)
        _check("min_new_tokens", self.min_new_tokens, self.min_new_tokens <= self.max_new_tokens, "from 0 to max_new_tokens")
        grammar = self.structured_outputs
        _check(
            "structured_outputs", grammar, grammar is None or isinstance(grammar, StructuredOutputs), "StructuredOutputs(...)"
        )
        if grammar is not None:  # it determines where the text may end
            _check("min_new_tokens", self.min_new_tokens, self.min_new_tokens == 0, "0 with structured_outputs")
        _check("memory", self.memory, isinstance(self.memory, bool), "true or false")
        _check("rule", self.rule, self.rule is None or self.rule in RULES, " or ".join(RULES))
        strings = (self.stop,) if isinstance(self.stop, str) else _copy("stop", self.stop, tuple)
        for text in strings:
            _check("stop", text, isinstance(text, str) and 0 < len(text) <= MAX_STOP, f"text of 1 to {MAX_STOP:,} characters")
        biases = _copy("logit_bias", self.logit_bias, dict)
        for bias in biases.values():
            _check("logit_bias", bias, _is_number(bias, float) and -100 <= bias <= 100, "from -100 to 100")
        object.__setattr__(self, "stop_strings", strings)
        object.__setattr__(self, "stop_tokens", _copy("stop_token_ids", self.stop_token_ids, tuple))
        object.__setattr__(self, "biases", biases)

    @property
    def exact(self) -> bool:
        """Whether the rule is exact-match."""
        return self.rule == "exact-match" or (self.rule is None and self.seed is not None)

    @property
    def varies_with_drafts(self) -> bool:
        """Whether the answer to the seed depends on what is drafted: a sampled one by the rejection rule does."""
        return self.seed is not None and self.temperature > 0 and not self.exact

    def setting(self, name: str, vocab_rows: int) -> float:
        """Return one of `contract.SETTINGS`, for logits [vocab_rows]."""
        if self.temperature == 0 and name in NO_TRUNCATION:
            return NO_TRUNCATION[name]  # truncation never removes the most likely token
        if name == "exact_match":
            return self.exact
        if name == "top_k":
            return min(max(self.top_k, 0), vocab_rows)
        value: float = getattr(self, name)
        return value

    def check_tokens(self, vocab_rows: int) -> None:
        """Raise `UsageError` if a token id is not below `vocab_rows`, the number of rows of the target's logits."""
        requirement = f"one of the token ids 0 to {vocab_rows - 1}"
        for name, tokens in (("logit_bias", self.biases), ("stop_token_ids", self.stop_tokens)):
            for token in tokens:
                _check(name, token, _is_number(token, int) and 0 <= token < vocab_rows, requirement)


def _copy(name: str, value: Any, kind: type) -> Any:
    try:
        return kind(value or ())
    except (TypeError, ValueError):
        raise _wrong(name, value, "a mapping of token ids to numbers" if kind is dict else "a collection") from None


def _is_number(value: Any, kind: type) -> bool:
    """Return whether a value is a finite number, NumPy's included, and an integer if `kind` is int."""
    known = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return known and value - value == 0  # false for NaN and infinity


def _check(name: str, value: object, fits: bool, requirement: str) -> None:
    if not fits:
        raise _wrong(name, value, requirement)


def _wrong(name: str, value: object, requirement: str) -> UsageError:
    shown = reprlib.repr(value)  # shortened
    return UsageError(f"{name} is {shown}; it must be {requirement}", f"use a {name} that is {requirement}", param=name)


DEFAULTS = SamplingParams()
