"""How long rounds take here and now: the costs of their passes, corrected by the pace of recent rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.engines.arrays import Doubles
from outrider.runtime import drafters
from outrider.runtime.drafters.base import Reading
from outrider.runtime.policy.choice import Choice
from outrider.runtime.policy.pace import Pace
from outrider.runtime.policy.policy import Observation, SequenceView
from outrider.runtime.policy.round_costs import RoundCosts

LONG_STEP = 0.4  # milliseconds of a draft step; asking whether to draft another token takes up to a tenth of this


class SequenceBatch(NamedTuple):
    """The sequences of a round, and what its time depends on."""

    sequences: Sequence[SequenceView]
    size: int
    end: int  # length of the longest text
    remaining: int  # the most tokens that one of them may still emit
    greedy: bool
    new: bool  # whether one has emitted nothing yet

    @classmethod
    def of(cls, sequences: Sequence[SequenceView]) -> SequenceBatch:
        """Return the batch of these sequences."""
        if len(sequences) == 1:
            only = sequences[0]
            return cls(sequences, 1, only.length, only.remaining, only.greedy, only.emitted == 0)
        return cls(
            sequences,
            len(sequences),
            max([sequence.length for sequence in sequences]),
            max([sequence.remaining for sequence in sequences]),
            all(sequence.greedy for sequence in sequences),
            any(sequence.emitted == 0 for sequence in sequences),
        )


class RoundTimes:
    """Predicts times in milliseconds."""

    def __init__(self, costs: Callable[[int], RoundCosts]):
        """`costs` returns the costs of rounds by their number of sequences."""
        self.costs = functools.cache(costs)
        self.pace = Pace()

    def round(self, choice: Choice, batch: SequenceBatch, shares: Sequence[int] | None = None) -> float:
        """Return the time of a round. `shares` has the drafted tokens of each sequence if the pass leaves out other rows."""
        cost = self._cost(choice, choice.k, batch) if shares is None else self._ragged(choice, batch, shares, max(shares))
        return cost * self.pace.ratio(choice, batch.size)

    def more_rows(self, choice: Choice, batch: SequenceBatch) -> Doubles:
        """Return the time that 0, 1, ... drafted tokens add to the pass of a round that leaves out other rows."""
        rows = self.costs(batch.size).more_rows(batch.size, choice.k, batch.end + choice.k)
        return rows * self.pace.ratio(choice, batch.size)

    def _ragged(self, choice: Choice, batch: SequenceBatch, shares: Sequence[int], steps: int) -> float:
        rows = self.costs(batch.size).more_rows(batch.size, choice.k, batch.end + choice.k)
        return self._cost(choice, steps, batch) - float(rows[-1] - rows[sum(shares)])

    def _cost(self, choice: Choice, drafted: int, batch: SequenceBatch, begun: int = 0) -> float:
        return self.costs(batch.size).round(choice.drafter, drafted, choice.k, batch.end + choice.k, batch.greedy, begun)

    def catch_up(self, name: str, reading: Reading, length: int) -> tuple[float, int]:
        """Return the time that a drafter takes to catch up with a text of `length` tokens, and how many rounds run meanwhile.
        The time is not measured, so plain decoding's pace corrects it."""
        if not reading.pending:
            return 0.0, 0
        costs, end = self.costs(1), reading.window or length
        return costs.catch_up(name, reading.pending, end) * self.pace.shared, costs.pieces(name, reading.pending, end) - 1

    def upkeep(self, choice: Choice, batch: SequenceBatch) -> float:
        """Return the time that the drafter of a choice needs later for tokens that another one drafted."""
        if not choice.k:
            return 0.0
        return batch.size * drafters.get(choice.drafter).upkeep(self.costs(batch.size), batch.end) * self.pace.shared

    def by_drafted(self, choice: Choice, sequence: SequenceView) -> tuple[list[float], list[int]]:
        """Return the times of rounds that stop after 0, 1, ... drafted tokens, and the rows of their passes."""
        costs, end, greedy, ratio = self.costs(1), sequence.length, sequence.greedy, self.pace.ratio(choice)
        sizes = [costs.size(count) for count in range(min(choice.k, sequence.remaining - 1) + 1)]
        times = [costs.round(choice.drafter, count, size, end + size, greedy, choice.k) for count, size in enumerate(sizes)]
        return [ratio * time for time in times], [size + 1 for size in sizes]

    def has_long_steps(self, choice: Choice, batch: SequenceBatch) -> bool:
        """Return whether one more token, a draft step or a row to verify, takes so long that stopping early can pay off."""
        costs, kind = self.costs(1), drafters.get(choice.drafter)
        if kind.one_pass:
            most, least = (costs.verification(rows, batch.end, batch.greedy) for rows in (choice.k + 1, 1))
            step = (most - least) / choice.k
        else:
            step = kind.cost(costs, 2, batch.end, batch.greedy) - kind.cost(costs, 1, batch.end, batch.greedy)
        return step > LONG_STEP or not costs.measured

    def observe(self, seen: Observation, ragged: bool) -> None:
        """Learn from the time of a round. `ragged` says whether the pass of several sequences left out rows."""
        batch, choice = SequenceBatch.of(seen.sequences), seen.choice
        shares = [0 if result is None else len(result.drafted) for result in seen.results]
        steps = max(
            [len(each.drafted) for each in seen.results if each is not None and each.drafter == choice.drafter], default=0
        )
        if batch.size == 1:
            cost = self._cost(choice, steps, batch, seen.begun)
        else:
            cost = self._ragged(choice, batch, shares, steps) if ragged else self._cost(choice, choice.k, batch)
        self.pace.observe(seen.milliseconds / cost, choice, batch.size)
