"""The results of a benchmark: the JSON that `outrider bench` writes, and the comparison of two of them."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import msgspec

from outrider.bench.simulator import Trace
from outrider.bundle.manifest import Struct
from outrider.errors import UsageError
from outrider.runtime import drafters
from outrider.runtime.policy.choice import AUTO, NONE

SCHEMA = 7
MIN_ROUNDS = 5  # required in each of two compared reports


class Percentiles(Struct, frozen=True):
    """Percentiles of durations, in milliseconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> Percentiles:
        """Return the percentiles of durations in seconds; zeros if there are none."""
        ordered = sorted(seconds) or [0.0]
        p50, p90, p99 = (1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in (0.5, 0.9, 0.99))
        return cls(p50=p50, p90=p90, p99=p99)


PerRound = Annotated[list[Annotated[float, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]


class Mode(Struct, frozen=True):
    """A decoding mode: the drafter, and the number of tokens that it drafts per round."""

    drafter: str  # a drafter's name, AUTO or NONE
    k: int | str  # a number or AUTO

    def __post_init__(self) -> None:
        if not (self.drafter in (AUTO, NONE) or self.drafter in drafters.names()) or not (
            self.k == AUTO or isinstance(self.k, int)
        ):
            raise ValueError(f"not a decoding mode: drafter {self.drafter}, k = {self.k}")

    @property
    def label(self) -> str:
        if not self.k:
            return "plain"
        return f"{'any drafter' if self.drafter == AUTO else drafters.get(self.drafter).label}, k = {self.k}"


class Summary(Struct, frozen=True):
    """One mode on one workload. Speeds and ratios have one value per round, the geometric mean over the workload's prompts.

    A whole answer is timed from the request to its last token, decoding alone from the moment the target has read the prompt.
    Both include the time in which the draft reads the prompt.
    """

    workload: str
    mode: Mode
    prompts: int
    tokens: int  # in one round, over all prompts
    whole_speedup: PerRound  # of whole answers over plain decoding in the same round
    seconds_to: dict[int, float]  # by number of tokens, from the request; median; answers that are shorter count to their ends
    speedup_to: dict[int, float]  # the same over plain decoding in the same round; geometric mean
    tokens_per_second: PerRound  # decoding alone
    speedup: PerRound  # the same, over plain decoding in the same round
    predicted_speedup: float | None  # from recorded texts, and passes and host time of the same run; None for k = auto
    first_token: Percentiles  # time to first token (TTFT)
    per_token: Percentiles  # mean time per token of an answer after its first round (TPOT)
    between_tokens: Percentiles  # inter-token latency; 0 within a round
    mean_acceptance_length: float
    acceptance_rate: float
    per_position_rates: list[float]
    acceptance_histogram: list[int]
    rounds_by_drafter: dict[str, int]
    drafting_rounds: int
    rounds: int
    outside_engines: float  # share of the rounds' time
    same_text: int  # number of answers equal to plain decoding's

    @property
    def median_speedup(self) -> float:
        return statistics.median(self.speedup)


class PromptResult(Struct, frozen=True):
    """One mode on one prompt, with one value per round."""

    workload: str
    prompt: int  # index among all prompts, and in `Results.traces`
    mode: Mode
    tokens: int
    whole_speedup: PerRound  # as in `Summary`
    tokens_per_second: PerRound
    speedup: PerRound
    predicted_speedup: float | None
    first_token: PerRound  # milliseconds
    per_token: list[float]  # milliseconds
    between_tokens: Percentiles
    mean_acceptance_length: float
    acceptance_rate: float
    per_position_rates: list[float]
    acceptance_histogram: list[int]


class TimedPart(Struct, frozen=True):
    """The parts of a round's time in milliseconds, in the middle of the texts, from passes timed in the same run."""

    mode: Mode
    draft: float  # the drafter's steps, including their samplers
    target: float
    verifier: float
    outside_engines: float  # from its share of the measured rounds


class Results(Struct, frozen=True):
    """Everything that one run of `outrider bench` measured."""

    schema: int
    bundle: str
    target: str
    drafts: list[str]
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
    parts: list[TimedPart]
    policies: dict[str, dict[str, float]]  # workload -> policy -> milliseconds in a replay; see `simulator.compare`
    traces: list[Trace]

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(summary.workload for summary in self.summaries))

    @property
    def modes(self) -> list[Mode]:
        return list(dict.fromkeys(summary.mode for summary in self.summaries))

    def summary(self, workload: str, mode: Mode) -> Summary:
        """Return the summary of one mode on one workload."""
        return next(summary for summary in self.summaries if summary.workload == workload and summary.mode == mode)


def read(path: Path) -> Results:
    """Read a report that `outrider bench --report` wrote.

    Raises:
        UsageError: the file cannot be read, or is not such a report.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
        if results.schema != SCHEMA:
            raise msgspec.ValidationError(f"schema {results.schema}, not {SCHEMA}")
        if {(each.workload, each.mode) for each in results.summaries} != {(each.workload, each.mode) for each in results.texts}:
            raise msgspec.ValidationError("the texts do not match the summaries")
        return results
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "pass a bench.json that outrider bench wrote") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a report of this version of outrider: {' '.join(str(error).split())}",
            "write a new one: outrider bench BUNDLE --report DIR",
        ) from error


WHOLE, DECODING = "whole answers over plain", "decoding alone over plain"
FIRST_TOKEN = "ms to the first token"


class Change(Struct, frozen=True):
    """One mode on one workload, before and after."""

    workload: str
    mode: Mode
    unit: str  # plain decoding: tokens/s and `FIRST_TOKEN`; other modes: `WHOLE` and `DECODING`, in the same round
    before: list[float]  # one value per round
    after: list[float]
    verdict: str  # better, worse, within the noise, or too few rounds
    length_before: float  # mean acceptance length
    length_after: float


def changes(before: Results, after: Results) -> list[Change]:
    """Compare two reports, mode by mode and workload by workload.

    A result is better or worse if the slowest round of one report is faster than the fastest round of the other. With five
    rounds each, this happens by chance once in 126 times. Between two runs the whole machine may become slower or faster, which
    does not appear as noise within either run. So modes that draft are compared by their speed-ups. The figures of plain
    decoding are also included, but they depend on the machine as much as on the program.

    Raises:
        UsageError: the reports have different prompts or settings, or nothing in common.
    """
    _check_comparable(before, after)
    compared = []
    for old in before.summaries:
        new = next((each for each in after.summaries if (each.workload, each.mode) == (old.workload, old.mode)), None)
        if new is None:
            continue
        measured = [(WHOLE, old.whole_speedup, new.whole_speedup), (DECODING, old.speedup, new.speedup)]
        if old.mode.k == 0:
            measured = [("tokens/s", old.tokens_per_second, new.tokens_per_second)]
            measured += [(FIRST_TOKEN, _first_tokens(before, old.workload), _first_tokens(after, old.workload))]
        compared += [
            Change(
                workload=old.workload,
                mode=old.mode,
                unit=unit,
                before=old_values,
                after=new_values,
                verdict=judge(old_values, new_values, lower_is_better=unit == FIRST_TOKEN),
                length_before=old.mean_acceptance_length,
                length_after=new.mean_acceptance_length,
            )
            for unit, old_values, new_values in measured
        ]
    if not compared:
        raise UsageError("the two reports have no workload and k in common", "measure both with the same --workload and --k")
    return compared


def _check_comparable(before: Results, after: Results) -> None:
    for name in ("machine", "max_new_tokens", "chat"):
        values = getattr(before, name), getattr(after, name)
        if values[0] != values[1]:
            raise UsageError(
                f"the two reports differ in {name}: {values[0]}, {values[1]}",
                "measure both on one machine with the same settings",
            )
    prompts = [{(trace.workload, tuple(trace.prompt)) for trace in results.traces} for results in (before, after)]
    if prompts[0] != prompts[1]:
        raise UsageError("the two reports have different prompts", "measure both with the same --workload and --each")


def _first_tokens(results: Results, workload: str) -> list[float]:
    """Return plain decoding's time to first token in each round, the geometric mean over a workload's prompts."""
    times = [each.first_token for each in results.texts if each.workload == workload and each.mode.k == 0]
    return [statistics.geometric_mean(values) for values in zip(*times, strict=False)]


def judge(before: list[float], after: list[float], *, lower_is_better: bool) -> str:
    if min(len(before), len(after)) < MIN_ROUNDS:
        return f"fewer than {MIN_ROUNDS} rounds"
    higher = min(after) > max(before)
    if higher or max(after) < min(before):
        return "worse" if higher == lower_is_better else "better"
    return "within the noise"
