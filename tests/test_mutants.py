"""The faults that `make mutants` plants: each still applies, and names tests that exist. It plants them, this only looks."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from outrider.tests.support import ROOT
from outrider.tests.test_packaging import FOLDERS

loader = SourceFileLoader("mutants", str(ROOT / "scripts" / "mutants"))
mutants: Any = module_from_spec(spec_from_loader("mutants", loader))  # type: ignore[arg-type]
loader.exec_module(mutants)
FAULTS = mutants.read_faults()


def test_every_fault_applies_and_is_python() -> None:
    for fault in FAULTS:
        assert fault.new != fault.old, fault.name
        ast.parse(fault.planted((ROOT / fault.file).read_text(encoding="utf-8")))


def test_every_folder_has_faults_of_its_own() -> None:
    for folder in FOLDERS:
        faults = mutants.read_faults(ROOT, folder)
        assert faults, folder
        assert {fault.file.split("/")[0] for fault in faults} == {folder}


def test_the_faults_are_many_and_their_names_differ() -> None:
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_tests_of_every_fault_exist() -> None:
    for fault in FAULTS:
        named = [argument.split("::") for argument in fault.tests if argument.startswith("tests/")]
        assert named, fault.name
        for path, *tests in named:
            text = (ROOT / path).read_text(encoding="utf-8")
            assert all(f"def {test.split('[')[0]}(" in text for test in tests), fault.name


def test_a_fault_that_no_test_notices_survives(tmp_path: Path) -> None:
    tree = tmp_path / "outrider"
    (tree / "tests").mkdir(parents=True)
    (tree / "__init__.py").touch()
    (tree / "double.py").write_text('"""Doubles numbers."""\n\n\ndef double(x):\n    return 2 * x\n')
    test = "from outrider.double import double\n\n\ndef test_double():\n    assert double({}) == 4\n"
    (tree / "tests" / "test_double.py").write_text(test.format(2))
    (tree / "tests" / "test_red.py").write_text(test.format(3))
    (tree / "tests" / "test_broken.py").write_text("import outrider.treble\n")
    right, red, broken = ([f"tests/test_{name}.py"] for name in ("double", "red", "broken"))
    faults = [
        mutants.Fault("noticed", "", "double.py", "2 * x", "3 * x", right),
        mutants.Fault("a-word", "", "double.py", "Doubles", "Halves", right),
        mutants.Fault("stale", "", "double.py", "4 * x", "3 * x", right),
        mutants.Fault("none-selected", "", "double.py", "2 * x", "3 * x", [*right, "-k", "treble"]),
        mutants.Fault("not-collected", "", "double.py", "2 * x", "3 * x", broken),
        mutants.Fault("always-red", "", "double.py", "2 * x", "3 * x", red),
    ]
    planter = mutants.Planter(tmp_path, [tree], Path(sys.executable))
    try:
        verdicts = {outcome.fault.name: outcome.verdict for outcome in planter.plant(faults[:5])}
        verdicts |= {outcome.fault.name: outcome.verdict for outcome in mutants.red(planter, faults[5:], 1)}
    finally:
        planter.stop()
    assert verdicts == {
        "noticed": mutants.CAUGHT,
        "a-word": "SURVIVED",
        "stale": "NO LONGER APPLIES",
        "none-selected": "NO TESTS",
        "not-collected": "NOT COLLECTED",
        "always-red": "FAILS WITHOUT THE FAULT",
    }
    assert (tree / "double.py").read_text().count("2 * x") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outrider"]
