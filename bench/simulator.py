"""Replays recorded texts with given costs, to compare the times of policies with each other and with the best possible time.

The decoder, the drafters' bookkeeping and the policies are the real ones. Recorded texts and costs replace the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from outrider.engines.device import Cpu, Launch, nothing
from outrider.engines.session import Session
from outrider.errors import EngineError
from outrider.runtime import drafters
from outrider.runtime.decoder import Decoder
from outrider.runtime.drafters.base import DeviceDrafter, DraftContext, Drafter, Resources
from outrider.runtime.matching import matching
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import NONE
from outrider.runtime.policy.early_stop import EarlyStop
from outrider.runtime.policy.policy import FixedPolicy, Policy
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.request import Request
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.rounds import RoundResult
from outrider.runtime.rounds.sampling import SamplingState

VOCABULARY = 2**31  # larger than any token id of a recorded text


def reader(name: str, window: int) -> str:
    """Name a drafter with what it has read of the prompt: all of it, or its last `window` tokens."""
    return f"{name}@{window}" if window else name


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One greedy answer, and what each drafter on the device would have proposed at each position."""

    workload: str
    prompt: list[int]
    tokens: list[int]
    agrees: dict[str, list[bool]]  # by `reader`, for each token: whether the drafter's most likely token is the same
    confidences: dict[str, list[float]]  # by `reader`, for each token: the probability of the drafter's most likely token
    most: int = 0  # the token limit, which a text may not reach because it ended earlier; 0 if not recorded

    def __post_init__(self) -> None:
        lengths = {len(each) for values in (self.agrees, self.confidences) for each in values.values()}
        if not self.tokens or self.agrees.keys() != self.confidences.keys() or not lengths <= {len(self.tokens)}:
            raise ValueError("a recorded text has no tokens, or not one agreement and one confidence per token")

    def remaining(self, at: int) -> int:
        """Return how many tokens may still be emitted after `at`, up to the limit: a policy cannot know where the text ends."""
        return max(self.most, len(self.tokens)) - at

    def accepted(self, by: str, at: int, drafted: int) -> int:
        """Return how many of the `drafted` tokens that a `reader` proposes from position `at` on are accepted."""
        count, agrees = 0, self.agrees[by]
        while count < min(drafted, len(self.tokens) - at) and agrees[at + count]:
            count += 1
        return count


class SimulatedClock:
    """Simulated time."""

    def __init__(self) -> None:
        self.milliseconds = 0.0

    def __call__(self) -> float:
        return self.milliseconds / 1000


class SimulatedSession(Session):
    """A model whose passes only take time."""

    def __init__(self, spend: Callable[[int, int], None]):
        """Create the model. Each pass calls `spend` with its number of rows and its end position."""
        self.device = Cpu()
        self.batch, self.mask_token, self.from_anchor = 1, 0, False
        self.capacity = self.vocab_rows = VOCABULARY
        self.recurrence, self.places = None, 0
        self._spend = spend

    def write(self, input_ids: object, positions: object, first: int = 0, logits: bool = False, certain: object = None) -> None:
        rows = np.shape(np.asarray(input_ids))[1]
        self._spend(rows, int(np.asarray(positions)[0]) + rows)

    def bind(self, buffers: object) -> Launch:
        return nothing

    def clear(self, slot: int) -> None:
        """Do nothing: there is no cache."""

    def copy(self, slot: int, to: int, length: int) -> None:
        """Do nothing: there is no cache."""

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        return {}


class SimulatedRounds:
    """Rounds with results from a recorded text, and times from the costs."""

    def __init__(self, trace: Trace, costs: RoundCosts, clock: SimulatedClock, loaded: Mapping[str, Drafter]):
        self._trace, self._costs, self._clock, self._drafters = trace, costs, clock, loaded

    def run(
        self, lanes: Sequence[Lane], rows: int, *, first: int = 0, drafter: str = NONE, stop: EarlyStop | None = None
    ) -> list[RoundResult | EngineError | None]:
        """Return the result of a round of one sequence; see `Rounds.run`."""
        (lane,), trace = lanes, self._trace
        at = len(lane.tokens) - len(trace.prompt)
        count, following, confidences = lane.k, trace.tokens[at:], list[float]()
        if lane.proposed:
            accepted, drafted = matching(lane.proposed, following), lane.proposed
        elif not count:
            accepted, drafted = 0, []
        else:
            by = reader(drafter, self._drafters[drafter].readings(0, lane.tokens)[0].window)
            by = by if by in trace.agrees else drafter  # a window that is longer than the prompt
            for confidence in trace.confidences[by][at : at + count - 1] if stop is not None else ():
                assert stop is not None
                confidences.append(confidence)
                if (shorter := stop.after(confidences)) is not None:
                    count, rows = len(confidences), shorter
                    break
            accepted = trace.accepted(by, at, count)
            drafted = following[:accepted] + [-1] * (count - accepted)
        emitted = following[: accepted + 1] + [-1] * (
            accepted == len(following)
        )  # the token after the recorded text is unknown
        end = len(lane.tokens) + rows - 1
        self._clock.milliseconds += self._costs.round(drafter, len(drafted), rows - 1, end, True, lane.k)
        return [RoundResult(lane.drafter if drafted else NONE, drafted, emitted, None, confidences)]


def simulated_drafters(
    names: Sequence[str], costs: RoundCosts, clock: SimulatedClock, windowed: bool = False
) -> dict[str, Drafter]:
    """Return drafters whose models only take time, when they catch up."""
    made: dict[str, Drafter] = {}
    for name in names:

        def spend(rows: int, end: int, name: str = name) -> None:
            clock.milliseconds += costs.catch_up(name, rows, end)

        kind = drafters.get(name)
        sessions = {role: SimulatedSession(spend) for role in ("target", *kind.engines)}
        made[name] = kind(Resources(sessions, 1, costs.chunk, costs.k, windowed=windowed))
    return made


def replay(trace: Trace, costs: RoundCosts, policy: Policy) -> float:
    """Return the milliseconds that the answer would have taken, from the moment the target has read the prompt."""
    clock = SimulatedClock()
    target = SimulatedSession(lambda rows, end: None)
    recorded = all(
        reader(name, window) in trace.agrees
        for name in drafters.on_device(policy.names)
        for window in drafters.get(name).windows
        if window < len(trace.prompt)
    )
    loaded = simulated_drafters(policy.names, costs, clock, windowed=recorded)
    decoder = Decoder(target, SimulatedRounds(trace, costs, clock, loaded), loaded, costs.k, costs.chunk, costs.piece, clock)
    params = SamplingParams(max_new_tokens=trace.remaining(0))
    request = Request(list(trace.prompt), params, SamplingState(params, [], [], VOCABULARY), None, VOCABULARY)
    request.acceptance, request.lengths = policy.begin(), policy.lengths(None)
    slot = decoder.slots[0]
    decoder.slots.begin(slot, request)
    slot.cached = len(request.tokens) - 1
    while request.stats.emitted < len(trace.tokens):
        (result,) = decoder.round([request], policy, policy.names)
        if not isinstance(result, RoundResult):
            raise result
        request.take(result)
    if len(trace.tokens) < trace.remaining(0):
        request.finish_reason = "stop"
    decoder.finish(request)
    return clock.milliseconds


def oracle(trace: Trace, costs: RoundCosts, names: Sequence[str] | None = None) -> float:
    """Return the shortest time in milliseconds, for a policy that knows which tokens will be accepted. Drafters catch up in no
    time."""
    names = drafters.names() if names is None else names
    loaded = simulated_drafters(names, costs, SimulatedClock())
    text, count, proposals = list(trace.prompt), len(trace.tokens), []
    for token in trace.tokens:
        offers = {name: each.propose(DraftContext(0, text), max(costs.k)) for name, each in loaded.items()}
        proposals.append({name: offer.tokens for name, offer in offers.items() if offer is not None})
        text.append(token)
    least = [0.0] * (count + 1)
    for at in reversed(range(count)):
        end = len(trace.prompt) + at
        times = [costs.round(NONE, 0, 0, end, True) + least[at + 1]]
        for k in costs.k:
            for name, drafter in loaded.items():
                if isinstance(drafter, DeviceDrafter) and name in trace.agrees:
                    right = trace.accepted(name, at, min(k, count - at - 1))
                    times.append(costs.round(name, right, k, end + k, True) + least[at + right + 1])
                elif name in proposals[at]:
                    right = matching(proposals[at][name][:k], trace.tokens[at : count - 1])
                    times.append(costs.round(name, 0, k, end + k, True) + least[at + right + 1])
        least[at] = min(times)
    return least[0]


def compare(
    traces: Sequence[Trace], costs: RoundCosts, names: Sequence[str], early_stopping: bool = True
) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each workload's traces, by policy: each fixed k, the adaptive policies, and `oracle`.

    Adaptive policies see all traces in order, as in a server, and keep what they learn.

    Args:
        names: the drafters that the bundle can use.
        early_stopping: whether rounds can stop drafting early, as they can on a CPU.
    """
    on_device = drafters.on_device(names)
    names = [name for name in names if name not in on_device or all(name in trace.agrees for trace in traces)]
    policies: dict[str, Policy] = {"plain": FixedPolicy(NONE, 0)}
    for name in names:
        policies |= {f"{name}, k = {k}": FixedPolicy(name, k) for k in costs.k}
        policies[f"{name}, k = auto"] = AdaptivePolicy(lambda _: costs, [name], early_stopping)
    policies["auto"] = AdaptivePolicy(lambda _: costs, names, early_stopping)
    compared: dict[str, dict[str, float]] = {}
    for trace in traces:
        taken = compared.setdefault(trace.workload, dict.fromkeys((*policies, "oracle"), 0.0))
        for name, policy in policies.items():
            taken[name] += replay(trace, costs, policy)
        taken["oracle"] += oracle(trace, costs, names)
    return compared


REGRET_HEADS = (
    "workload",
    "adaptive",
    "best fixed choice in hindsight",
    "with perfect foresight",
    "regret against the best fixed choice",
    "regret against perfect foresight",
)


def regrets(compared: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """Return the speed-ups of the adaptive policy, of the best fixed choice and of the oracle for each workload, and how much
    more time the adaptive policy took than these two."""
    rows = []
    for workload, taken in compared.items():
        fixed = {name: time for name, time in taken.items() if "auto" not in name and name != "oracle"}
        best = min(fixed, key=lambda name: fixed[name])
        ratios = [f"{taken['plain'] / time:.2f}" for time in (taken["auto"], taken[best], taken["oracle"])]
        regret = [f"{taken['auto'] / taken[name] - 1:+.1%}" for name in (best, "oracle")]
        rows.append((workload, ratios[0], f"{ratios[1]} ({best})", ratios[2], *regret))
    return rows
