"""Plant faults in copies of the tree, one at a time, and check that the tests named for each notice it.

    .venv/bin/python tests/mutants/plant.py [NAME ...] [--jobs 2] [--list]

The faults are in `FOLDER.toml`, a file for each folder of the product:

    [[fault]]
    name = "position-off-by-one"    # one that no other file has
    says = "What would go wrong for a user, in one line."
    file = "runtime/cache/slots.py"
    old = '''text found exactly once in the file'''
    new = '''the text in its place'''
    tests = ["tests/runtime/test_golden.py::test_x"]    # arguments of pytest: the cheapest that catch it

First the named tests must pass in a copy without a fault. Then each fault's tests must fail; if they pass, the fault has
survived. Tests that cannot be collected, that hang or that bring Python down catch nothing. Slow tests are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # of one run of pytest
CAUGHT = "caught"
TIMED_OUT, STUMBLED, ANOTHER = 97, 98, 99  # no exit codes of pytest
# What is exported and built does not depend on these: after a fault there, the tests read the folders of the first run.
SHARING = ("audit", "bench", "commands", "engines", "runtime", "serve", "training")
# Loading these takes longer than most tests, so it is done once, and each run is a fork. None of them is ours.
LOADED = (
    "hypothesis",
    "jinja2",
    "llguidance",
    "onnxruntime",
    "onnxscript.rewriter.ort_fusions.skip_normalization",
    "openvino",
    "pytest",
    "scipy.stats",
    "torch.onnx",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.modeling_utils",
)
VERDICTS = {
    0: "SURVIVED",
    1: CAUGHT,
    2: "NOT COLLECTED",
    4: "NO SUCH TEST",
    5: "NO TESTS",
    TIMED_OUT: "TIMED OUT",
    ANOTHER: "NOT THE COPY",
}


class Fault(NamedTuple):
    """A fault, and how it is noticed; see above."""

    name: str
    says: str
    file: str
    old: str
    new: str
    tests: Sequence[str]

    def planted(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: the fault no longer applies.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has its text {count} times")
        return text.replace(self.old, self.new)


class Outcome(NamedTuple):
    """What became of tests, of a fault if there is one: `CAUGHT`, or why not, with the end of what pytest printed."""

    tests: Sequence[str]
    fault: Fault | None
    verdict: str
    seconds: float = 0.0
    output: str = ""


def read_faults(root: Path = ROOT, folder: str = "*") -> list[Fault]:
    """Return the faults of a folder, or of all."""
    files = sorted((root / "tests" / "mutants").glob(f"{folder}.toml"))
    return [Fault(**table) for file in files for table in tomllib.loads(file.read_text(encoding="utf-8"))["fault"]]


def copy_tree(root: Path, target: Path) -> None:
    """Copy what git tracks or does not ignore, as it is now, and compile it, so that each run need not."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    # By their hashes, since a fault may leave a file's time and size as they were.
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
    subprocess.run(command, cwd=target, check=True)


class Run:
    """Tests under way in a copy of the tree, perhaps with a fault."""

    def __init__(self, tests: Sequence[str], fault: Fault | None, tree: Path, work: Path):
        """Plant the fault and start a process in the folder `tree`, which is called `outrider`.

        Raises:
            ValueError: the fault no longer applies.
        """
        self.tests, self.fault, self.tree = tests, fault, tree
        self._started = time.monotonic()
        if fault is not None:
            self._whole = (tree / fault.file).read_bytes()
            (tree / fault.file).write_bytes(fault.planted(self._whole.decode()).encode())
        self._written = Path(tempfile.mkdtemp(dir=work))
        share = fault is None or fault.file.split("/")[0] in SHARING
        sys.stdout.flush()
        self._process = os.fork()
        if not self._process:
            self._test(work / "shared" if share else None)

    def _test(self, shared: Path | None) -> None:
        code = STUMBLED
        try:
            os.setsid()  # with all that the tests start
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for number, path in enumerate((Path(os.devnull), self._written / "output")):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
            os.dup2(1, 2)
            os.chdir(self.tree)
            for name in [name for name in os.environ if name.startswith("PYTEST_")]:
                del os.environ[name]
            os.environ |= {"PYTHONPATH": str(self.tree.parent), "TMPDIR": str(self._written)}
            # Other packages' plugins take seconds to load, and the tests need none of them.
            os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            if shared is not None:
                os.environ["OUTRIDER_TEST_FOLDERS"] = str(shared)
            tempfile.tempdir, sys.dont_write_bytecode = None, True
            sys.path[:1] = ["", str(self.tree.parent)]
            import pytest

            import outrider

            options = ["-m", "not slow", "-q", "-p", "no:cacheprovider", f"--basetemp={self._written / 'tests'}"]
            if outrider.__file__ != str(self.tree / "__init__.py"):
                code = ANOTHER  # the venv has the original, too
            else:
                code = int(pytest.main([*options, *([] if self.fault is None else ["-x"]), *self.tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def outcome(self) -> Outcome | None:
        """Return what became of the tests, or None if they have not ended."""
        seconds = time.monotonic() - self._started
        process, status = os.waitpid(self._process, os.WNOHANG)
        if not process and seconds < SECONDS:
            return None
        code = os.waitstatus_to_exitcode(status) if process else TIMED_OUT
        output = (self._written / "output").read_text(encoding="utf-8", errors="replace")
        self.end(waited=process > 0)
        return Outcome(self.tests, self.fault, VERDICTS.get(code, f"ENDED WITH {code}"), seconds, output)

    def end(self, waited: bool = False) -> None:
        """Stop the process and what it has started, and take the fault away."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        if not waited:
            os.waitpid(self._process, 0)
        if self.fault is not None:
            (self.tree / self.fault.file).write_bytes(self._whole)
        shutil.rmtree(self._written, ignore_errors=True)


def outcomes(runs: Sequence[tuple[Sequence[str], Fault | None]], trees: Sequence[Path], work: Path) -> Iterator[Outcome]:
    """Run tests, as many at a time as there are copies of the tree, and yield what becomes of them."""
    waiting, free, running = deque(runs), [*trees], list[Run]()
    try:
        while waiting or running:
            while waiting and free:
                tests, fault = waiting.popleft()
                try:
                    running.append(Run(tests, fault, free[-1], work))
                except ValueError as error:
                    yield Outcome(tests, fault, "NO LONGER APPLIES", output=str(error))
                else:
                    free.pop()
            for run in [*running]:
                if (outcome := run.outcome()) is not None:
                    running.remove(run)
                    free.append(run.tree)
                    yield outcome
            time.sleep(0.05)
    finally:
        for run in running:
            run.end()


def grouped(faults: Sequence[Fault], jobs: int) -> list[list[str]]:
    """Return the tests of all faults in as few runs as do: those named without options go together, file by file."""

    def options(fault: Fault) -> bool:
        return any(argument.startswith("-") for argument in fault.tests)

    plain = sorted({test for fault in faults if not options(fault) for test in fault.tests})
    files = sorted({test.split("::")[0] for test in plain})
    groups = [[test for test in plain if files.index(test.split("::")[0]) % jobs == job] for job in range(jobs)]
    others = {tuple(fault.tests): [*fault.tests] for fault in faults if options(fault)}
    return [group for group in [*others.values(), *groups] if group]


def red(faults: Sequence[Fault], trees: Sequence[Path], work: Path) -> list[Outcome]:
    """Return the faults whose tests fail without them; only those of a run that fails are run by themselves."""
    groups = outcomes([(group, None) for group in grouped(faults, len(trees))], trees, work)
    suspected = {test for each in groups if each.verdict != VERDICTS[0] for test in each.tests}
    suspects = [fault for fault in faults if suspected & {*fault.tests}]
    failed = {tuple(each.tests): each for each in outcomes([(fault.tests, None) for fault in suspects], trees, work)}
    return [
        failed[tuple(fault.tests)]._replace(fault=fault, verdict="FAILS WITHOUT THE FAULT")
        for fault in suspects
        if failed[tuple(fault.tests)].verdict != VERDICTS[0]
    ]


def show(outcome: Outcome) -> None:
    assert outcome.fault is not None
    print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {outcome.fault.name}: {outcome.fault.says}", flush=True)
    if outcome.verdict != CAUGHT:
        print("".join(f"    | {line}\n" for line in outcome.output.splitlines()[-15:]), end="", flush=True)


def plant(faults: Sequence[Fault], jobs: int, root: Path = ROOT) -> int:
    """Plant faults, print what becomes of each, and return how many are caught."""
    # As scripts/test does.
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    work = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        (work / "shared").mkdir()
        trees = [work / f"copy{job}" / "outrider" for job in range(jobs)]
        copy_tree(root, trees[0])
        for tree in trees[1:]:
            shutil.copytree(trees[0], tree)
        started = time.monotonic()
        failing = red(faults, trees, work)
        print(f"the tests without a fault: {time.monotonic() - started:.1f} s", flush=True)
        for outcome in failing:
            show(outcome)
        left = [fault for fault in faults if fault not in [outcome.fault for outcome in failing]]
        caught = 0
        for outcome in outcomes([(fault.tests, fault) for fault in left], trees, work):
            caught += outcome.verdict == CAUGHT
            show(outcome)
        return caught
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # nothing is left behind
            signal.signal(number, signal.SIG_IGN)
        shutil.rmtree(work, ignore_errors=True)


def load(modules: Sequence[str] = LOADED) -> None:
    """Import what all tests need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults; all if none is given")
    parser.add_argument("--jobs", type=int, default=2, help="runs of pytest at a time")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    given = parser.parse_args()
    faults = read_faults()
    if unknown := set(given.names) - {fault.name for fault in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    faults = [fault for fault in faults if not given.names or fault.name in given.names]
    if given.list:
        for fault in faults:
            print(f"{fault.file}  {fault.name}: {fault.says}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        load()
        caught = plant(faults, max(given.jobs, 1))
    except KeyboardInterrupt:
        return 130
    print(f"mutants: {caught} of {len(faults)} caught")
    return int(caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
