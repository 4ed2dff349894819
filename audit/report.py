"""The results of an audit, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from outrider.audit.controls import Watch
from outrider.audit.statistics import Comparison

NEAR_TIES = 0.05  # share of the requests whose texts may diverge at a near-tie; at least one may
ROUNDING = 1e-4  # share of the decisions that may differ from the reference


@dataclass(slots=True)
class Arithmetic:
    """Decisions of the sampler graphs, repeated by the float64 reference on the same inputs."""

    checked: int = 0
    disagreed: int = 0

    def add(self, watch: Watch) -> None:
        """Add what a watch counted."""
        self.checked += watch.checked
        self.disagreed += watch.disagreed

    @property
    def allowed(self) -> int:
        """The number of disagreements that pass: in fp32 a uniform may fall on the other side of a boundary."""
        return max(1, int(ROUNDING * self.checked))

    @property
    def passed(self) -> bool:
        return self.checked > 0 and self.disagreed <= self.allowed


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text departs from the plain one."""

    prompt: str
    temperature: float
    mode: str  # drafter and k
    place: int  # tokens of the answer before it
    plain: int
    speculative: int


@dataclass(slots=True)
class ComparedTexts:
    """Texts that must equal those of plain decoding of the request alone. They may diverge at a near-tie, where the plain
    model's own choice changes with the number of rows or sequences of a pass."""

    requests: int  # number of distinct requests
    compared: int = 0
    near_ties: list[Divergence] = field(default_factory=list)
    differences: list[Divergence] = field(default_factory=list)  # that no near-tie explains

    @property
    def ties(self) -> int:
        """The number of distinct near-ties; several texts may diverge at the same one."""
        return len({(each.prompt, each.temperature, each.place) for each in self.near_ties})

    @property
    def allowed(self) -> int:
        """The number of near-ties that pass."""
        return max(1, int(NEAR_TIES * self.requests))

    @property
    def passed(self) -> bool:
        return not self.differences and self.ties <= self.allowed


@dataclass(slots=True)
class Sampled:
    """Speculative draws compared with plain ones at one setting."""

    setting: str
    k: int | str | None  # "auto" is every drafter and k at random, a drafter's name its largest k, None all of these together
    comparisons: list[Comparison]
    emitted: int = 0
    excluded: int = 0  # tokens that were emitted although truncation excludes them

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.comparisons)


@dataclass(slots=True)
class Control:
    """A sampler that must fail, or without a fault must pass."""

    fault: str | None
    sampled: Sampled

    @property
    def detected(self) -> bool:
        return not self.sampled.passed or self.sampled.excluded > 0

    @property
    def passed(self) -> bool:
        return self.detected == (self.fault is not None)


@dataclass(slots=True)
class Counters:
    """Sums over the greedy and some sampled generations, counted by the runtime and again from each pass of the target. The
    tokens that batched passes verified are counted for all requests together."""

    generations: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    unexamined: int = 0
    emitted: int = 0
    own: int = 0
    unbalanced: int = 0  # generations that do not balance

    @property
    def passed(self) -> bool:
        return self.unbalanced == 0


@dataclass(slots=True)
class Audit:
    """The results of all parts."""

    arithmetic: Arithmetic
    greedy: ComparedTexts
    batched: ComparedTexts | None  # of requests that share passes; None if the bundle takes one at a time
    sampled: list[Sampled]
    controls: list[Control]
    counters: Counters

    def verdicts(self) -> dict[str, bool]:
        """Return which part passed."""
        return {
            "arithmetic": self.arithmetic.passed,
            "greedy": self.greedy.passed,
            **({"batched": self.batched.passed} if self.batched else {}),
            "sampled": all(each.passed for each in self.sampled),
            "support": not any(each.excluded for each in self.sampled),
            "controls": all(each.passed for each in self.controls),
            "counters": self.counters.passed,
        }

    @property
    def passed(self) -> bool:
        return all(self.verdicts().values())

    def as_dict(self) -> dict[str, object]:
        """Return everything, for JSON."""
        return {"passed": self.passed, "verdicts": self.verdicts(), **asdict(self)}
