"""What a measurement found: the JSON of `outrider bench`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from outrider.bench.simulator import Trace
from outrider.errors import UsageError
from outrider.runtime.policy import AUTO, MODEL, NGRAM, NONE

SCHEMA = 3
LABELS = {MODEL: "draft model", NGRAM: "n-gram", AUTO: "any drafter", NONE: "plain"}
ROUNDS = 5  # that a comparison needs of each


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parts: immutable, and strict when read."""


class Percentiles(Struct, frozen=True):
    """Of many times, in milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> Percentiles:
        ordered = sorted(seconds) or [0.0]
        at = (ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in (0.5, 0.9, 0.99))
        return cls(**{name: 1000 * value for name, value in zip(("p50", "p90", "p99"), at, strict=True)})


PerRound = Annotated[list[Annotated[float, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]


class Way(Struct, frozen=True):
    """How a text was made: which drafter, and how many tokens a round."""

    drafter: str  # of LABELS
    k: int | str  # a number, or AUTO

    def __post_init__(self) -> None:
        if self.drafter not in LABELS or (self.k != AUTO and not isinstance(self.k, int)):
            raise ValueError(f"no way of drafting: {self.drafter}, {self.k}")

    @property
    def label(self) -> str:
        return f"{LABELS[self.drafter]}, k = {self.k}" if self.k else LABELS[NONE]


class Summary(Struct, frozen=True):
    """One way on one workload. Speeds and ratios are geometric means over its prompts, one of each round.

    The time of a text is from when the target has read the prompt to the last token, so that the draft's reading of the
    prompt counts.
    """

    workload: str
    way: Way
    prompts: int
    tokens: int  # of one round, over all prompts
    tokens_per_second: PerRound
    speedup: PerRound  # over plain decoding in the same round
    predicted_speedup: float | None  # from passes timed in the same run and the recorded texts; None for what cannot be
    first_token: Percentiles  # since the request: TTFT
    per_token: Percentiles  # mean time of a text's tokens after those of its first round: TPOT
    between_tokens: Percentiles  # between one token and the next, 0 within a round: inter-token latency
    mean_acceptance_length: float
    acceptance_rate: float
    per_position_rates: list[float]
    acceptance_histogram: list[int]
    ngram_rounds: int
    drafting_rounds: int
    rounds: int
    outside_engines: float  # share of the rounds' time
    same_text: int  # texts that are plain decoding's

    @property
    def median_speedup(self) -> float:
        return statistics.median(self.speedup)


class PromptResult(Struct, frozen=True):
    """One way on one prompt, a value for each round."""

    workload: str
    prompt: int  # its place among all prompts, and in `Results.traces`
    way: Way
    tokens: int
    tokens_per_second: PerRound  # as in `Summary`
    speedup: PerRound
    predicted_speedup: float | None
    first_token: PerRound  # milliseconds
    per_token: list[float]  # milliseconds
    between_tokens: Percentiles
    mean_acceptance_length: float
    acceptance_rate: float
    per_position_rates: list[float]
    acceptance_histogram: list[int]


class Part(Struct, frozen=True):
    """Where a round's time goes, in milliseconds, by passes timed in the same run, at the middle of the texts."""

    way: Way
    draft: float
    draft_sampler: float
    target: float
    verifier: float
    outside_engines: float  # by the share that it had of the measured rounds


class Results(Struct, frozen=True):
    """All of it."""

    schema: int
    bundle: str
    target: str
    draft: str | None
    precision: str
    backend: str
    machine: str
    date: str
    outrider: str
    command: str
    max_new_tokens: int
    chat: bool
    rounds: int
    summaries: list[Summary]
    texts: list[PromptResult]
    parts: list[Part]
    policies: dict[str, dict[str, float]]  # workload -> policy -> milliseconds, replayed; see `simulator.compare`
    traces: list[Trace]

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(summary.workload for summary in self.summaries))

    @property
    def ways(self) -> list[Way]:
        return [Way(drafter=drafter, k=k) for drafter, k in dict.fromkeys((s.way.drafter, s.way.k) for s in self.summaries)]

    def of(self, workload: str, way: Way) -> Summary:
        return next(summary for summary in self.summaries if summary.workload == workload and summary.way == way)


def read(path: Path) -> Results:
    """What `outrider bench --report` wrote.

    Raises:
        UsageError: it is not there, or not that.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
        if results.schema != SCHEMA:
            raise msgspec.ValidationError(f"schema {results.schema}, not {SCHEMA}")
        if {(each.workload, each.way) for each in results.summaries} != {(each.workload, each.way) for each in results.texts}:
            raise msgspec.ValidationError("its texts are not those of its summaries")
        return results
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "name a bench.json that outrider bench wrote") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no report of this outrider: {' '.join(str(error).split())}",
            "make it again: outrider bench BUNDLE --report DIR",
        ) from error


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


FIRST_TOKEN = "ms to the first token"


class Change(Struct, frozen=True):
    """One way on one workload, before and after."""

    workload: str
    way: Way
    unit: str  # tokens/s, and ms to the first token, of plain decoding; of all else, the speed-up over it in the same round
    before: list[float]  # of each round
    after: list[float]
    verdict: str  # better, worse, within the noise, or too few rounds
    length_before: float  # mean acceptance length
    length_after: float


def changes(before: Results, after: Results) -> list[Change]:
    """What both measured. Better or worse is where no round of the one was as fast as any of the other; with five rounds each,
    chance alone does that once in 126 times.

    Between two runs a machine may have become slower or faster as a whole, which is no noise within either. So ways that draft
    are compared by their speed-ups; what plain decoding itself did is shown, and is the machine's as much as the program's.

    Raises:
        UsageError: they are of other prompts or settings, or have nothing in common.
    """
    for what in ("machine", "max_new_tokens", "chat"):
        if getattr(before, what) != getattr(after, what):
            raise UsageError(
                f"the two reports are not of the same {what}: {getattr(before, what)}, {getattr(after, what)}",
                "measure both alike, on one machine",
            )
    asked = [{(each.workload, tuple(each.prompt)) for each in results.traces} for results in (before, after)]
    if asked[0] != asked[1]:
        raise UsageError("the two reports are not of the same prompts", "measure both with the same --workload and --each")
    found = []
    for old in before.summaries:
        new = next((each for each in after.summaries if (each.workload, each.way) == (old.workload, old.way)), None)
        if new is None:
            continue
        measured = [("speed-up", old.speedup, new.speedup)]
        if old.way.k == 0:
            measured = [("tokens/s", old.tokens_per_second, new.tokens_per_second)]
            measured += [(FIRST_TOKEN, _first_tokens(before, old.workload), _first_tokens(after, old.workload))]
        found += [
            Change(
                workload=old.workload,
                way=old.way,
                unit=unit,
                before=was,
                after=is_now,
                verdict=_verdict(was, is_now, less=unit == FIRST_TOKEN),
                length_before=old.mean_acceptance_length,
                length_after=new.mean_acceptance_length,
            )
            for unit, was, is_now in measured
        ]
    if not found:
        raise UsageError("the two reports have no workload and k in common", "measure both with the same --workload and --k")
    return found


def _first_tokens(results: Results, workload: str) -> list[float]:
    """Of plain decoding, by round: geometric means over a workload's prompts."""
    of = [each.first_token for each in results.texts if each.workload == workload and each.way.k == 0]
    return [geometric_mean(of_round) for of_round in zip(*of, strict=False)]


def _verdict(was: list[float], is_now: list[float], *, less: bool) -> str:
    """`less` is whether less is better."""
    if min(len(was), len(is_now)) < ROUNDS:
        return f"fewer than {ROUNDS} rounds"
    more = min(is_now) > max(was)
    if more or max(is_now) < min(was):
        return "worse" if more == less else "better"
    return "within the noise"
