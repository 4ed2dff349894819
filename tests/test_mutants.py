"""The faults that `make mutants` plants: each still applies, and names tests that exist. It plants them, this only looks."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.tests.mutants import plant as mutants
from outrider.tests.support import ROOT
from outrider.tests.test_packaging import FOLDERS

FAULTS = mutants.read_faults()


def test_every_fault_applies_and_is_python() -> None:
    for fault in FAULTS:
        assert fault.new != fault.old, fault.name
        ast.parse(fault.planted((ROOT / fault.file).read_text(encoding="utf-8")))


def test_every_folder_has_faults_of_its_own() -> None:
    for folder in FOLDERS:
        faults = mutants.read_faults(ROOT, folder)
        assert faults, folder
        of = {fault.file.split("/")[0] for fault in faults} - ({"cli.py", "errors.py"} if folder == "commands" else set())
        assert of == {folder}


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


def test_make_test_runs_the_tests_of_every_fault(request: pytest.FixtureRequest) -> None:
    """Of the files that this run collects whole."""
    run = {item.nodeid for item in request.session.items}
    run |= {node.split("[")[0] for node in run} | {node.split("::")[0] for node in run}
    chosen = {argument.split("::")[0] for argument in request.config.args if "::" in argument}
    whole = {node for node in run if "::" not in node and Path(node).name not in {Path(each).name for each in chosen}}
    if request.config.option.part or request.config.option.keyword:
        whole.clear()
    named = {(fault.name, test) for fault in FAULTS for test in fault.tests if test.split("::")[0] in whole}
    assert {(name, test) for name, test in named if test not in run} == set()


RUNNER = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

script, root = sys.argv[1:]
mutants = module_from_spec(spec_from_file_location("mutants", script))
mutants.__spec__.loader.exec_module(mutants)
mutants.load(["pytest"])
print("caught:", mutants.plant(mutants.read_faults(Path(root)), 1, Path(root)))
"""


def test_a_fault_that_no_test_notices_survives(tmp_path: Path) -> None:
    """And what is no fault, or has no tests that could notice it, is not taken for one that was caught."""
    root = tmp_path / "tree"
    (root / "tests" / "mutants").mkdir(parents=True)
    (root / "__init__.py").touch()
    (root / "double.py").write_text('"""Doubles numbers."""\n\n\ndef double(x):\n    return 2 * x\n')
    test = "from outrider.double import double\n\n\ndef test_double():\n    assert double({}) == 4\n"
    (root / "tests" / "test_double.py").write_text(test.format(2))
    (root / "tests" / "test_red.py").write_text(test.format(3))
    (root / "tests" / "test_broken.py").write_text(
        "import outrider.double\n\noutrider.double.double(1) == 2 or undefined\n\n\ndef test_it():\n    pass\n"
    )
    given = {
        "noticed": ("2 * x", "3 * x", ["tests/test_double.py"], "caught"),
        "a-word": ("Doubles", "Halves", ["tests/test_double.py"], "SURVIVED"),
        "stale": ("4 * x", "3 * x", ["tests/test_double.py"], "NO LONGER APPLIES"),
        "not-collected": ("2 * x", "3 * x", ["tests/test_broken.py"], "NOT COLLECTED"),
        "always-red": ("2 * x", "3 * x", ["tests/test_red.py"], "FAILS WITHOUT THE FAULT"),
        "none-selected": ("2 * x", "3 * x", ["tests/test_double.py", "-k", "treble"], "FAILS WITHOUT THE FAULT"),
    }
    tables = [
        f'[[fault]]\nname = "{name}"\nsays = ""\nfile = "double.py"\nold = "{old}"\nnew = "{new}"\ntests = {json.dumps(tests)}'
        for name, (old, new, tests, _) in given.items()
    ]
    (root / "tests" / "mutants" / "double.toml").write_text("\n".join(tables))
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", RUNNER, mutants.__file__, str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = re.findall(r"^(.*?) +[\d.]+ s  (\S+): ", done.stdout, flags=re.MULTILINE)
    assert {name: verdict for verdict, name in found} == {name: verdict for name, (*_, verdict) in given.items()}, done
    assert done.stdout.splitlines()[-1] == "caught: 1"
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]  # nothing is left
