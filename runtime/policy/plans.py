"""How sequences can draft, and how many tokens that is worth."""

from __future__ import annotations

from typing import NamedTuple

from outrider.runtime.drafters.base import Reading
from outrider.runtime.policy.costs import expected_tokens
from outrider.runtime.policy.policy import SequenceView

Rates = list[tuple[float, int, int]]
"""Of the sequences that draft: their rate, the most tokens that they can draft, and their number."""


class DraftPlan(NamedTuple):
    """How a sequence can draft."""

    reading: Reading
    late: float  # milliseconds to read
    wait: int  # rounds until it has read
    rate: float  # acceptance
    saved: float = 0.0  # milliseconds that it will probably save


def best_plan(sequence: SequenceView, options: list[DraftPlan], k: int, share: float) -> DraftPlan:
    """Return the option that saves the most time, for a sequence whose share of a round is `share`."""
    if len(options) == 1 and not options[0].late:
        return options[0]
    limit, expected = min(k, sequence.remaining - 1), sequence.expected
    gains = [share * (1 - 1 / expected_tokens(option.rate, limit)) for option in options]
    saved = [max(expected - option.wait, 0) * gain - option.late for option, gain in zip(options, gains, strict=True)]
    at = max(range(len(options)), key=saved.__getitem__)
    return options[at]._replace(saved=saved[at])


def emitted(size: int, rates: Rates, k: int) -> float:
    """Return the expected number of tokens that a round of `size` sequences emits."""
    tokens = float(size)
    for rate, limit, count in rates:
        tokens += count * (expected_tokens(rate, k if k < limit else limit) - 1)
    return tokens
