"""docs/models.md: tests compare it with what they find, and `make models-page` writes it from that."""

from __future__ import annotations

import math
import tempfile

from filelock import FileLock

from outrider.tests.support import ROOT

PAGE = ROOT / "docs" / "models.md"
HEADS, SWEEP = "## Draft heads", "## Every causal language model of transformers"


def parts() -> list[str]:
    """The parts of the page: what is before the draft heads, these, and the sweep, each without its heading."""
    before, _, rest = PAGE.read_text().partition(HEADS)
    heads, _, sweep = rest.partition(SWEEP)
    return [before.strip(), heads.strip(), sweep.strip()]


def write(**new: str) -> None:
    """Replace the parts `before`, `heads` or `sweep`: each is written by a file of tests."""
    with FileLock(f"{tempfile.gettempdir()}/models.md.lock"):
        given = dict(zip(("before", "heads", "sweep"), parts(), strict=True)) | new
        PAGE.write_text(f"{given['before']}\n\n{HEADS}\n\n{given['heads']}\n\n{SWEEP}\n\n{given['sweep']}\n")


def power_of_ten(difference: float) -> str:
    """What the page has of a difference, which depends on the machine: it rounded up."""
    return f"{10 ** math.ceil(math.log10(max(difference, 1e-9))):.0e}"


class Table:
    """A table of the page. Its rows go by the beginning of their lines; a cell is compared, or replaced if `writing`."""

    def __init__(self, part: int, keys: int, columns: tuple[str, ...], writing: bool):
        self.writing = writing
        self.rows: dict[str, dict[str, str]] = {}
        lines = parts()[part].splitlines()
        head = next(index for index, line in enumerate(lines) if line.endswith(f"| {' | '.join(columns)} |"))
        for line in [] if writing else lines[head + 2 :]:
            if not line.startswith("| "):
                break
            cells = line.strip("| ").split(" | ")
            self.rows[" | ".join(cells[:keys])] = dict(zip(columns, cells[keys:], strict=True))

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
