"""Counters and rates of a generation, and how busy a scheduler is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest


@dataclass(slots=True)
class Stats:
    """Counters of one generation:

    drafted = accepted + rejected + unexamined, and emitted = accepted + own.

    A drafted token is unexamined if an earlier one was rejected, or if the text ended before it.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that earlier requests had left in a cache
    copied_tokens: int = 0  # cached tokens that were copied from another slot
    rounds: int = 0  # passes of the target after the prompt
    drafting_rounds: int = 0  # rounds that verified at least one drafted token
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    own: int = 0  # emitted tokens that were not drafted
    rounds_by_drafter: dict[str, int] = field(default_factory=dict)  # drafting rounds only
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    histogram: list[int] = field(default_factory=list)  # drafting rounds by their accepted tokens: 0, 1, ...
    drafted_at: list[int] = field(default_factory=list)  # rounds that drafted position i
    accepted_at: list[int] = field(default_factory=list)  # rounds that accepted position i
    seconds: float = 0.0  # from the request to the last token
    prompt_seconds: float = 0.0  # until the target had read the prompt
    engine_seconds: float = 0.0  # of engine runs after the prompt

    def count(self, drafter: str, drafted: int, accepted: int, rejected: int, own: int) -> None:
        """Add one round."""
        self.rounds += 1
        self.drafting_rounds += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += rejected
        self.own += own
        if not drafted:
            return
        self.rounds_by_drafter[drafter] = self.rounds_by_drafter.get(drafter, 0) + 1
        self.accepted_by_drafter[drafter] = self.accepted_by_drafter.get(drafter, 0) + accepted
        if len(self.drafted_at) < drafted:
            more = [0] * (drafted - len(self.drafted_at))
            self.drafted_at += more
            self.accepted_at += more
            self.histogram += [0] * (drafted + 1 - len(self.histogram))
        self.histogram[accepted] += 1
        drafted_at, accepted_at = self.drafted_at, self.accepted_at
        for index in range(drafted):
            drafted_at[index] += 1
        for index in range(accepted):
            accepted_at[index] += 1

    def add(self, other: Stats) -> None:
        """Add the counters of another generation."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, dict):
                total: object = {name: mine.get(name, 0) + theirs.get(name, 0) for name in mine | theirs}
            elif isinstance(mine, list):
                total = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
            else:
                total = mine + theirs
            setattr(self, each.name, total)

    @property
    def emitted(self) -> int:
        """The number of emitted tokens."""
        return self.accepted + self.own

    @property
    def unexamined(self) -> int:
        """The number of drafted tokens that were not decided on."""
        return self.drafted - self.accepted - self.rejected

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafting rounds: tokens per pass of the target, as vLLM and AIPerf define it."""
        return 1 + self.accepted / self.drafting_rounds if self.drafting_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def per_position_rates(self) -> list[float]:
        """For each position i, the rounds that accepted it over the rounds that drafted it."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the seconds after the prompt was read."""
        seconds = self.seconds - self.prompt_seconds
        return self.emitted / seconds if seconds > 0 else 0.0

    @property
    def outside_engines(self) -> float:
        """The share of the time after the prompt that was spent outside the engines, 0..1."""
        seconds = self.seconds - self.prompt_seconds
        return 1 - self.engine_seconds / seconds if seconds > 0 else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the counters and rates, for JSON."""
        by_position = ("histogram", "drafted_at", "accepted_at")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in by_position} | {
            "tokens": self.emitted,
            "unexamined": self.unexamined,
            "acceptance_histogram": self.histogram,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "per_position_rates": self.per_position_rates,
            "tokens_per_second": self.tokens_per_second,
            "outside_engines": self.outside_engines,
        }

    def line(self) -> str:
        """Return one readable line."""
        rates = " ".join(f"{rate:.2f}" for rate in self.per_position_rates) or "-"
        return (
            f"{self.emitted} tokens in {self.rounds} rounds | mean acceptance length {self.mean_acceptance_length:.2f}"
            f" | acceptance rate {self.acceptance_rate:.2f} | by position {rates} | {self.tokens_per_second:.1f} tokens/s"
        )


@dataclass(slots=True)
class Load:
    """How busy the scheduler is."""

    running: int
    waiting: int
    used: float  # share of the cache positions, 0..1
    batch: int = 0  # requests of the last round
    drafted: int = 0  # tokens of the last round: the most of any request, at most its k
    evicted: int = 0  # reusable cached tokens that were overwritten since the bundle was loaded
    remembered: int = 0  # tokens of earlier requests to draft from
