"""`python -m outrider.experiments.measure`."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from outrider.experiments.measure.__main__ import main


def test_the_bits_of_rows(tiny_bundle: Path) -> None:
    done = CliRunner().invoke(main, ["rows", str(tiny_bundle)])
    assert done.exit_code == 0, done.output
    assert re.search(rf"\| {tiny_bundle.name} \| - \| - \| (yes|in pairs|no) \| - \|", done.stdout)


def test_bundles_take_turns(tiny_bundle: Path) -> None:
    done = CliRunner().invoke(main, ["plain", str(tiny_bundle), str(tiny_bundle), "--repeat", "1"])
    assert done.exit_code == 0, done.output
    heading, _, *rows = done.stdout.split("\n\n")[0].splitlines()
    assert heading.endswith("| against the first |")
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {tiny_bundle.name}", "onnxruntime"]] * 2
    assert rows[0].endswith(" 1.00 |")
