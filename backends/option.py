"""Options that backends add to `build-engine`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """An option that a backend adds to `build-engine`."""

    name: str  # key in `BuildSpec.options`; `flag` on the command line
    help: str
    type: type = str  # str, int, float, Path, bool (a flag), or tuple (strings separated by commas)
    metavar: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")
