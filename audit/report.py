"""The results of an audit, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from outrider.audit.controls import Watch
from outrider.audit.statistics import Comparison

NEAR_TIES = 0.05  # share of the requests whose texts may diverge at a near-tie; at least one may
ROUNDING = 1e-4  # share of the decisions that may differ from the reference


@dataclass(slots=True)
class Arithmetic:
    """Decisions of the sampler graphs, compared with the float64 reference on the same inputs."""

    checked: int = 0
    disagreed: int = 0

    def add(self, watch: Watch) -> None:
        """Add the counts of a watch."""
        self.checked += watch.checked
        self.disagreed += watch.disagreed

    @property
    def allowed(self) -> int:
        """The allowed number of disagreements: sums in fp32 may be less exact than `Decision.readings` allows for."""
        return max(1, int(ROUNDING * self.checked))

    @property
    def passed(self) -> bool:
        return self.checked > 0 and self.disagreed <= self.allowed


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a text and the plain one."""

    prompt: str
    temperature: float
    mode: str  # drafter and k
    place: int  # tokens of the answer before it
    plain: int
    speculative: int


@dataclass(slots=True)
class ComparedTexts:
    """Texts that must equal plain decoding of each request alone. They may diverge at a near-tie, where the model's choice
    depends on the number of rows or sequences of a pass."""

    requests: int  # number of distinct requests
    compared: int = 0
    near_ties: list[Divergence] = field(default_factory=list)
    differences: list[Divergence] = field(default_factory=list)  # other divergences

    @property
    def ties(self) -> int:
        """The number of distinct near-ties; several texts may diverge at the same one."""
        return len({(each.prompt, each.temperature, each.place) for each in self.near_ties})

    @property
    def allowed(self) -> int:
        """The allowed number of near-ties."""
        return max(1, int(NEAR_TIES * self.requests))

    @property
    def passed(self) -> bool:
        return not self.differences and self.ties <= self.allowed


@dataclass(slots=True)
class Sampled:
    """Speculative draws compared with plain ones at one setting."""

    setting: str
    k: int | str | None  # "auto": every drafter and k at random; a drafter's name: its default or largest k; None: all together
    comparisons: list[Comparison]
    emitted: int = 0
    excluded: int = 0  # emitted tokens that truncation excludes

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.comparisons)


@dataclass(slots=True)
class Control:
    """A sampler that must fail if it has a fault, and pass if not."""

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
    """Sums over the greedy generations and some sampled ones, counted by the runtime and again from each pass of the target.
    For batched requests, verified tokens are counted for all requests together."""

    generations: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    unexamined: int = 0
    emitted: int = 0
    own: int = 0
    unbalanced: int = 0  # generations whose two counts differ

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
        """Return whether each part passed."""
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
