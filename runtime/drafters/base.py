"""The drafter interface: all that the rest of Outrider knows about the source of drafted tokens.

A drafter is one file and one entry in the registry; see `outrider.runtime.drafters`. There are two kinds:

- A `Drafter` proposes tokens on the host before the round (`propose`). N-grams do this.
- A `DeviceDrafter` drafts inside the round: its launches run before the target's pass, so tokens go from buffer to buffer
  without a copy to the host. Draft models and draft heads do this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.bundle.manifest import Manifest
from outrider.engines.device import Buffer, Layout
from outrider.engines.session import Session
from outrider.runtime.grammar.matcher import Matcher
from outrider.runtime.memory.memory import Memory
from outrider.runtime.policy.costs import Costs
from outrider.runtime.rounds.buffers import Lane, RoundBuffers, Shape, Step


class DraftContext(NamedTuple):
    """What a drafter on the host proposes from."""

    slot: int
    tokens: list[int]  # the confirmed ones
    grammar: Matcher | None = None  # of the request
    owner: Hashable = None  # of the request
    prompt: int = 0  # how many of the tokens are the prompt
    remembers: bool = False  # whether the request may be drafted from earlier ones, and later ones from it


class Proposal(NamedTuple):
    """Tokens drafted on the host."""

    tokens: list[int]
    evidence: Hashable  # proposals with equal evidence should be accepted equally often


class Reading(NamedTuple):
    """How much of a text a drafter has read when it drafts."""

    window: int  # how many of the last tokens it began with; 0 is all
    pending: int  # confirmed tokens that it must process first


class Resources(NamedTuple):
    """The parts of a loaded bundle that drafters use."""

    sessions: Mapping[str, Session]  # by role, for target and drafters
    slots: int  # in the caches
    max_prompt_chunk: int  # tokens of the longest prefill pass
    k: Sequence[int]  # the built numbers of drafted tokens
    memory: Memory | None = None  # of earlier requests
    windowed: bool = False  # whether a drafter may read only the end of a text


class Drafter(ABC):
    """Proposes tokens on the host, with its own state for each slot.

    The defaults suit a drafter without state, which only needs `available` and `propose`.
    """

    name: ClassVar[str]
    label: ClassVar[str]  # in tables and reports
    companion: ClassVar[bool] = False  # whether it runs beside the chosen drafter and is not chosen by name
    remembers: ClassVar[bool] = False  # whether it drafts from earlier requests, so that a bundle needs a memory
    one_pass: ClassVar[bool] = False  # whether one pass drafts all tokens of a round; fewer may be verified
    prior: ClassVar[float] = 0.5  # acceptance rate to assume at first, 0..1
    engines: ClassVar[tuple[str, ...]] = ()  # engines that only this drafter runs
    windows: ClassVar[tuple[int, ...]] = ()  # numbers of last tokens that it may read in place of a whole text

    def __init__(self, resources: Resources):  # noqa: B027
        """Set up empty slots."""

    @classmethod
    @abstractmethod
    def available(cls, manifest: Manifest) -> bool:
        """Return whether a bundle has what the drafter needs."""

    def can_draft(self, length: int, batched: bool) -> bool:
        """Return whether a text of `length` confirmed tokens is long enough to draft after it, alone or in a batch."""
        return True

    def propose(self, context: DraftContext, k: int) -> Proposal | None:
        """Propose up to `k` tokens after the confirmed ones."""
        return None

    def finish(self, context: DraftContext) -> None:  # noqa: B027
        """Note that a request has ended with the tokens of its context."""

    def truncate(self, slot: int, length: int) -> None:  # noqa: B027
        """Forget all but the first `length` tokens of a slot."""

    def copy(self, source: int, target: int, length: int) -> None:  # noqa: B027
        """Copy the state for up to `length` tokens of a slot to one whose text begins with the same tokens."""

    def clear(self, slot: int) -> None:
        """Forget a slot whose state may contain NaN."""
        self.truncate(slot, 0)

    def pending(self, slot: int, tokens: list[int]) -> int:
        """Return the number of confirmed tokens that the drafter must process before it can draft."""
        return 0

    def readings(self, slot: int, tokens: list[int]) -> list[Reading]:
        """Return what the drafter can read before it drafts. The first reading continues what its cache holds."""
        return [Reading(0, self.pending(slot, tokens))]

    def catch_up(self, slot: int, tokens: list[int], window: int, most: int) -> None:  # noqa: B027
        """Process up to `most` pending tokens of a reading with this window."""

    def commit(self, slot: int, tokens: list[int], drafted: list[int]) -> None:  # noqa: B027
        """Note the tokens that a round drafted after the confirmed `tokens`. `tokens` lacks the accepted ones."""

    @classmethod
    def unread(cls, tokens: int, k: Sequence[int]) -> int:
        """Return the number of pending tokens of an unprocessed prompt, given the built k."""
        return 0

    @classmethod
    def cost(cls, costs: Costs, drafted: int, end: int, greedy: bool, begun: int = 0) -> float:
        """Return the milliseconds to draft `drafted` tokens, up to position `end`. `begun` is how many it set out to draft,
        if it stopped early."""
        return 0.0

    @classmethod
    def catch_up_cost(cls, costs: Costs, tokens: int, end: int) -> float:
        """Return the milliseconds to process `tokens` pending tokens, up to position `end`."""
        return 0.0

    @classmethod
    def upkeep(cls, costs: Costs, end: int) -> float:
        """Return the milliseconds that a round of another drafter costs this one later."""
        return 0.0


class DeviceDrafter(Drafter):
    """Drafts by launches that are part of the round.

    It can draft in every round, so its acceptance is estimated for each request. For host drafters it is estimated by the
    evidence of proposals.
    """

    overwritten: ClassVar[bool] = False  # whether the target's pass overwrites what draft steps read

    def missing(self, slot: int, tokens: list[int]) -> int:
        """Return the number of confirmed tokens that the drafter has not processed."""
        return 0

    def context_rows(self, lanes: Sequence[Lane]) -> int:
        """Return the number of confirmed tokens that a round's first draft step reads."""
        return 0

    @abstractmethod
    def layout(self, batch: int, max_k: int) -> Layout:
        """Return the inputs that the host writes before a round, by name. The round uploads them."""

    @abstractmethod
    def attach(self, buffers: RoundBuffers) -> None:
        """Allocate what rounds over these buffers need, and use them. All such calls come before the first round."""

    @abstractmethod
    def use(self, buffers: RoundBuffers) -> None:
        """Switch to these buffers, which must have been attached."""

    @abstractmethod
    def fill(self, lanes: Sequence[Lane], shape: Shape) -> None:
        """Write the inputs of a round."""

    @abstractmethod
    def steps(self, shape: Shape) -> list[Step]:
        """Return the launches that draft `shape.drafted` tokens, in order. A launch that writes a token has the token's row.

        Drafting may stop early, so a round with fewer tokens must have the first ones of these steps.
        """

    @abstractmethod
    def logits(self, row: int, shape: Shape, lane: int) -> npt.NDArray[np.float32]:
        """Return the logits [V] from which the last round drew the drafted token of a row."""

    @abstractmethod
    def row_logits(self, row: int, shape: Shape, lane: int) -> Buffer:
        """Return the buffer of the logits [1, V] of a lane's drafted token, before its sampler runs."""

    @abstractmethod
    def confidence(self, row: int, shape: Shape) -> float:
        """Return the probability of the most likely drafted token of a row, in the current round of one sequence. The device's
        memory is the host's."""

    @abstractmethod
    def agreement(self, prompt: list[int], tokens: list[int]) -> tuple[list[bool], list[float]]:
        """Read the finished answer of the first slot. Return for each of its tokens whether the drafter's most likely token is
        the same, and the probability of that token."""
