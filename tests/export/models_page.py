"""docs/models.md: tests compare it with what they find, and `make models-page` writes it from that."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator

import pytest
from filelock import FileLock

from outrider.tests.support import ROOT

PAGE = ROOT / "docs" / "models.md"
HEADINGS = {
    "heads": "## Draft heads",
    "forms": "## Quantized checkpoints",
    "sweep": "## Every causal language model of transformers",
}


def parts() -> dict[str, str]:
    """The parts of the page by name, without their headings; `before` has what is before the first."""
    found, rest, name = dict[str, str](), PAGE.read_text(), "before"
    for each, heading in HEADINGS.items():
        part, _, rest = rest.partition(heading)
        found[name], name = part.strip(), each
    return found | {name: rest.strip()}


def write(name: str, text: str) -> None:
    """Replace a part: each is written by a file of tests."""
    with FileLock(f"{tempfile.gettempdir()}/models.md.lock"):
        given = parts() | {name: text}
        sections = [f"{HEADINGS[each]}\n\n{part}" for each, part in given.items() if each in HEADINGS]
        PAGE.write_text("\n\n".join([given["before"], *sections]) + "\n")


def power_of_ten(difference: float) -> str:
    """What the page has of a difference, which depends on the machine: it rounded up."""
    return f"{10 ** math.ceil(math.log10(max(difference, 1e-9))):.0e}"


class Table:
    """A table of the page. Its rows go by the beginning of their lines; a cell is compared, or replaced if `writing`."""

    def __init__(self, part: str, keys: int, columns: tuple[str, ...], writing: bool):
        self.part, self.columns, self.writing = part, columns, writing
        self.rows: dict[str, dict[str, str]] = {}
        lines = parts()[part].splitlines()
        head = next(index for index, line in enumerate(lines) if line.endswith(f"| {' | '.join(columns)} |"))
        for line in [] if writing else lines[head + 2 :]:
            if not line.startswith("| "):
                break
            cells = line.strip("| ").split(" | ")
            self.rows[" | ".join(cells[:keys])] = dict(zip(columns, cells[keys:], strict=True))

    @classmethod
    def fixture(
        cls, request: pytest.FixtureRequest, part: str, keys: int, columns: tuple[str, ...], text: Callable[[Table], str]
    ) -> Iterator[Table]:
        """Yield the table of a part, and at the end write the part as `text` makes it of the table, if that is asked for."""
        made = cls(part, keys, columns, request.config.getoption("--models-page"))
        yield made
        if made.writing:
            write(part, text(made))

    def lines(self, names: Iterable[str]) -> list[str]:
        """Return the rows with these names."""
        return [f"| {' | '.join([name, *(self.rows[name][column] for column in self.columns)])} |" for name in names]

    def check(self, text: Callable[[Table], str]) -> None:
        """Assert that the page has the part that `text` makes of this table."""
        if self.writing:
            pytest.skip("it is written at the end")
        assert parts()[self.part] == text(self)

    def says(self, row: str, column: str, cell: str, figure: bool = False) -> None:
        """Assert that a cell is on the page; of a figure, which depends on the machine, that there is one."""
        if self.writing:
            self.rows.setdefault(row, {})[column] = cell
            return
        listed = self.rows[row][column]
        if figure:
            float(listed)
        else:
            assert listed == cell, "make models-page writes docs/models.md"
