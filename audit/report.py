"""What an audit found, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from outrider.audit.controls import WatchedRounds
from outrider.audit.statistics import Comparison

NEAR_TIES = 0.05  # share of the requests whose texts may part at one, or one where that is more
ROUNDING = 1e-4  # share of the decisions that may differ from the reference's


@dataclass(slots=True)
class Arithmetic:
    """Decisions of the sampler graphs, taken again by the float64 reference from the same numbers."""

    checked: int = 0
    disagreed: int = 0

    def add(self, watched: WatchedRounds) -> None:
        """Count what a watched sampler saw."""
        self.checked += watched.checked
        self.disagreed += watched.disagreed

    @property
    def allowed(self) -> int:
        """Disagreements that pass: fp32 may put a uniform on the other side of a boundary."""
        return max(1, int(ROUNDING * self.checked))

    @property
    def passed(self) -> bool:
        return self.checked > 0 and self.disagreed <= self.allowed


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a text leaves the plain one."""

    prompt: str
    temperature: float
    way: str  # drafter and k
    place: int  # tokens of the answer before it
    plain: int
    found: int


@dataclass(slots=True)
class Texts:
    """Texts that must be plain decoding's of the request alone. They may part at a near-tie, where the plain model's own choice
    changes with the number of rows or sequences of a pass."""

    requests: int  # different ones
    compared: int = 0
    near_ties: list[Parting] = field(default_factory=list)
    differences: list[Parting] = field(default_factory=list)  # which are none

    @property
    def ties(self) -> int:
        """Near-ties, each once, in however many ways texts part there."""
        return len({(each.prompt, each.temperature, each.place) for each in self.near_ties})

    @property
    def allowed(self) -> int:
        """Near-ties that pass."""
        return max(1, int(NEAR_TIES * self.requests))

    @property
    def passed(self) -> bool:
        return not self.differences and self.ties <= self.allowed


@dataclass(slots=True)
class Sampled:
    """Speculative against plain draws at one setting."""

    setting: str
    k: int | str | None  # auto is every drafter and k in turn, ngram the largest of n-grams, None all of these together
    comparisons: list[Comparison]
    emitted: int = 0
    excluded: int = 0  # emitted although truncation excludes it

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.comparisons)


@dataclass(slots=True)
class Control:
    """A sampler that must fail; without a fault, one that must pass."""

    fault: str | None
    sampled: Sampled

    @property
    def found(self) -> bool:
        return not self.sampled.passed or self.sampled.excluded > 0

    @property
    def passed(self) -> bool:
        return self.found == (self.fault is not None)


@dataclass(slots=True)
class Counters:
    """Sums over the greedy and some sampled generations, counted by the runtime and from each verifying pass. In company
    what the passes checked is counted for all requests together."""

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
    """All parts."""

    arithmetic: Arithmetic
    greedy: Texts
    company: Texts | None  # of requests that ran together; none where only one fits
    sampled: list[Sampled]
    controls: list[Control]  # of the draft model, where there is one, and of n-grams
    counters: Counters

    def verdicts(self) -> dict[str, bool]:
        """Which part passed."""
        return {
            "arithmetic": self.arithmetic.passed,
            "greedy": self.greedy.passed,
            **({"company": self.company.passed} if self.company else {}),
            "sampled": all(each.passed for each in self.sampled),
            "support": not any(each.excluded for each in self.sampled),
            "controls": all(each.passed for each in self.controls),
            "counters": self.counters.passed,
        }

    @property
    def passed(self) -> bool:
        return all(self.verdicts().values())

    def as_dict(self) -> dict[str, object]:
        """Everything, for JSON."""
        return {"passed": self.passed, "verdicts": self.verdicts(), **asdict(self)}
