"""What a user asks for: a model, and how to make its bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from outrider.runtime.policy.choice import AUTO


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model to run, and how to make its bundle if it is not one; None and "auto" leave the choice to the rule."""

    model: str
    drafts: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()  # adapters of the target
    precision: str | None = None
    backend: str = AUTO
    capacity: int | None = None
    batch: int | None = None
    device: str | None = None
    k: int | str = AUTO  # with which it will run

    @property
    def options(self) -> list[str]:
        """Return the command-line options that differ from the default."""
        named: Mapping[str, object] = asdict(self) | {"backend": None if self.backend == AUTO else self.backend}
        given = [*(("--draft", draft) for draft in self.drafts), *(("--lora", adapter) for adapter in self.lora)]
        given += [(f"--{name}", str(named[name])) for name in ("precision", "backend", "capacity", "batch") if named[name]]
        return [part for pair in given for part in pair]
