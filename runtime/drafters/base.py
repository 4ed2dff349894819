"""The drafter interface: everything the rest of Outrider knows about where drafted tokens come from.

A drafter is one file and one `register` call; see `outrider.runtime.drafters`. There are two kinds:

- A `Drafter` proposes tokens on the host before the round (`propose`). N-grams do this.
- A `DeviceDrafter` drafts inside the round: it contributes launches that run before the target's pass, so that a token
  goes from one buffer to the next without a visit to the host. Draft models and draft heads do this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engines.device import Buffer, Layout
from outrider.engines.session import Session
from outrider.runtime.grammar.matcher import Matcher
from outrider.runtime.policy.costs import Costs
from outrider.runtime.rounds.buffers import Lane, RoundBuffers, Shape, Step

if TYPE_CHECKING:
    from outrider.bundle.manifest import Manifest


class Proposal(NamedTuple):
    """Tokens that a drafter has ready before the round."""

    tokens: list[int]
    evidence: Hashable  # proposals with equal evidence are expected to be accepted equally often
    allowed: bool = False  # whether all of them are known to be in the request's grammar


class Resources(NamedTuple):
    """What a drafter may use of a loaded bundle."""

    sessions: Mapping[str, Session]  # by role: the target's, and the drafters' own
    slots: int  # sequences that the caches have room for
    max_prompt_chunk: int  # the longest prefill pass, in tokens
    k: Sequence[int]  # numbers of drafted tokens that rounds are built for


class Drafter(ABC):
    """Proposes tokens on the host, and keeps what it needs for each slot.

    The methods here suit a drafter without any state, which needs `available` and `propose` alone.
    """

    name: ClassVar[str]
    label: ClassVar[str]  # in tables and reports
    companion: ClassVar[bool] = False  # whether it drafts beside any other one, and is not chosen by name
    one_pass: ClassVar[bool] = False  # whether all tokens of a round are drafted together; fewer may be verified
    prior: ClassVar[float] = 0.5  # acceptance rate to assume before anything was observed, 0..1
    engines: ClassVar[tuple[str, ...]] = ()  # the bundle's engines that only this drafter runs

    def __init__(self, resources: Resources):  # noqa: B027
        """Set up the state of every slot, all of them empty."""

    @classmethod
    @abstractmethod
    def available(cls, manifest: Manifest) -> bool:
        """Return whether a bundle has what the drafter needs."""

    def can_draft(self, length: int, batched: bool) -> bool:
        """Return whether a text of so many confirmed tokens is long enough to draft after it, alone or in a batch."""
        return True

    def propose(self, slot: int, tokens: list[int], k: int, grammar: Matcher | None) -> Proposal | None:
        """Propose up to `k` tokens to follow the confirmed `tokens` of a slot, or None. `grammar` is what the request's text
        has to be in."""
        return None

    def truncate(self, slot: int, length: int) -> None:  # noqa: B027
        """Forget all but the first `length` tokens of a slot: another sequence continues from there."""

    def copy(self, source: int, target: int, length: int) -> None:  # noqa: B027
        """Copy what it has processed of the first `length` tokens of a slot to another one whose text begins with the same
        tokens. What is not copied is pending."""

    def clear(self, slot: int) -> None:
        """Forget a slot whose state may contain NaN."""
        self.truncate(slot, 0)

    def pending(self, slot: int, tokens: list[int]) -> int:
        """Return how many of the confirmed tokens the drafter has to process before it can draft."""
        return 0

    def catch_up(self, slot: int, tokens: list[int], chunks: int | None = None) -> None:  # noqa: B027
        """Process the pending tokens, or at most so many chunks of them."""

    def commit(self, slot: int, tokens: list[int], drafted: list[int]) -> None:  # noqa: B027
        """Note that a round drafted `drafted` after the confirmed `tokens`; which were accepted is not known yet."""

    @classmethod
    def unread(cls, tokens: int, k: Sequence[int]) -> int:
        """Return what is pending of a prompt of so many tokens, of which nothing was processed; k are the built ones."""
        return 0

    @classmethod
    def cost(cls, costs: Costs, drafted: int, end: int, greedy: bool, begun: int = 0) -> float:
        """Return the milliseconds that drafting so many tokens takes, up to position `end`; `begun` is how many it set out to
        draft, if it stopped early."""
        return 0.0

    @classmethod
    def catch_up_cost(cls, costs: Costs, tokens: int, end: int) -> float:
        """Return the milliseconds that `catch_up` takes for so many pending tokens, up to position `end`."""
        return 0.0

    @classmethod
    def upkeep(cls, costs: Costs, end: int) -> float:
        """Return the milliseconds that the tokens of a round drafted by another drafter cost this one later."""
        return 0.0


class DeviceDrafter(Drafter):
    """Drafts by launches that are part of the round.

    It can draft in every round, so its acceptance is estimated for each request, where a host drafter's is estimated by
    the evidence of its proposals.
    """

    overwritten: ClassVar[bool] = False  # whether the target's pass writes over what draft steps read of one another

    def missing(self, slot: int, tokens: list[int]) -> int:
        """Return how many of the last confirmed tokens the drafter has not processed."""
        return 0

    def context_rows(self, lanes: Sequence[Lane]) -> int:
        """Return how many confirmed tokens the first draft step of a round reads; part of the round's shape."""
        return 0

    @abstractmethod
    def layout(self, batch: int, max_k: int) -> Layout:
        """Return the inputs that the host writes before a round, by name; they travel in the round's one upload."""

    @abstractmethod
    def attach(self, buffers: RoundBuffers) -> None:
        """Take the buffers of the rounds that the drafter will be part of."""

    @abstractmethod
    def fill(self, lanes: Sequence[Lane], shape: Shape) -> None:
        """Write the inputs of a round."""

    @abstractmethod
    def steps(self, shape: Shape) -> list[Step]:
        """Return the launches that draft `shape.drafted` tokens, in order; those that write a token have its row. The
        steps of a round that drafts fewer tokens must be the first ones of these, since drafting may stop early."""

    @abstractmethod
    def logits(self, row: int, shape: Shape, lane: int) -> npt.NDArray[np.float32]:
        """Return the logits [V] that the drafted token of that row was drawn from, in the last round."""

    @abstractmethod
    def row_logits(self, row: int, shape: Shape, lane: int) -> Buffer:
        """Return where the logits [1, V] of a lane's drafted token lie before its sampler runs."""

    @abstractmethod
    def confidence(self, row: int, shape: Shape) -> float:
        """Return the drafter's probability of its most likely token in a row, in the round of one sequence under way on a
        device whose memory is the host's."""

    @abstractmethod
    def agreement(self, prompt: list[int], tokens: list[int]) -> tuple[list[bool], list[float]]:
        """Read the answer that the first slot has just finished, and return for each of its tokens whether the drafter's most
        likely token in its place is the same, and the probability of that most likely token."""
