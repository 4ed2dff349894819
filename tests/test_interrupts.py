"""Ctrl-C ends a command wherever it arrives, with one line, a hint and the exit code 130, and nothing half-written."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.export.garbage import exporter
from outrider.progress import SILENT
from outrider.tests.support import COMMAND, PAIR, run_here


def restore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs start with SIGINT ignored


@pytest.mark.slow  # tests/backends/test_tensorrt_build.py interrupts a build
def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    arguments = ["export", "--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"), "-o", str(tmp_path / "out")]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, preexec_fn=restore_interrupts) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "tracing the target" in line:
                time.sleep(0.3)
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.wait() in (130, -signal.SIGINT)  # the second if Python was within exec; a shell shows 130 for both
    assert [line for line in rest.splitlines() if line and not line.endswith("...")] == [
        "error: interrupted",
        "hint:  nothing half-written was left; run the same command again",
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_is_one_line_and_a_hint(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.runtime.generation.Outrider.load", interrupted)
    done = run_here("generate", tiny_bundle, "--prompt", "x")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith("\nerror: interrupted\nhint:  nothing half-written was left; run the same command again\n")


def test_an_interrupt_while_the_command_is_imported_is_one_line() -> None:
    code = """
import signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "outrider.commands":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from outrider.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=restore_interrupts)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_an_interrupt_that_an_import_turns_into_another_error_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does while it makes a class."""

    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "outrider.export.pair":
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt as interrupt:
                    raise RuntimeError("Error calling __set_name__") from interrupt

    monkeypatch.delitem(sys.modules, "outrider.export.pair", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            exporter(SILENT)
    finally:
        signal.signal(signal.SIGINT, handler)


IGNORED = """
import signal, time
from outrider.commands.output import progress_bar

class Destroyed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

with progress_bar():
    Destroyed()  # Python prints what a destructor raises, and continues
    time.sleep(60)
"""


def test_an_interrupt_in_a_destructor_is_raised_again() -> None:
    command = [sys.executable, "-c", IGNORED]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=restore_interrupts, timeout=50)
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert "ignored" not in done.stderr
