"""`outrider bench` as a command: the report that it writes, interrupts, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from outrider.bench.measure import measure, modes
from outrider.bench.results import Mode, read
from outrider.builder.workloads import Prompt
from outrider.errors import UsageError
from outrider.runtime.generation import Outrider
from outrider.tests.support import COMMAND, run_here


def test_an_interrupt_keeps_the_whole_rounds(trained_bundle: Path, tmp_path: Path) -> None:
    def restore_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start with SIGINT ignored

    (tmp_path / "one.jsonl").write_text('{"workload": "support", "prompt": "Customer: I need a flight."}\n')
    options = [
        "--workload",
        tmp_path / "one.jsonl",
        "--rounds",
        "100000",
        "--k",
        "1",
        "--max-new-tokens",
        "2",
        "--report",
        tmp_path / "report",
    ]
    arguments = [*COMMAND, "bench", str(trained_bundle), *map(str, options)]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=restore_interrupts
    ) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "measuring" in line)
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    written = read(tmp_path / "report" / "bench.json")
    assert 0 < written.rounds < 100000
    assert {len(each.speedup) for each in written.summaries} == {written.rounds}


def test_the_report_is_complete(tmp_path: Path, trained_bundle: Path) -> None:
    few = ["--each", "1", "--rounds", "1", "--max-new-tokens", "24"]
    done = run_here("bench", trained_bundle, *few, "--report", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout
    written = read(tmp_path / "report" / "bench.json")
    assert written.workloads == ["chat", "code", "math", "summarization", "support"]
    page = (tmp_path / "report" / "bench.md").read_text()
    assert page.startswith("# Benchmark by workload")
    rates = written.summary("chat", Mode(drafter="model", k=8)).per_position_rates
    assert f"| chat | {' | '.join(f'{rate:.2f}' for rate in rates)} |" in page
    plain, auto = (written.summary("chat", mode) for mode in (written.modes[0], written.modes[-1]))
    assert list(auto.seconds_to) == [1, 24]
    shown = [*plain.seconds_to.values(), *auto.seconds_to.values(), *auto.speedup_to.values()]
    assert f"| chat | {' | '.join(f'{each:.2f}' for each in shown)} |" in page
    part = written.parts[0]
    assert f"| {part.mode.label} | {part.draft:.2f} | {part.target:.2f} | {part.verifier:.2f} |" in page
    planned = run_here("plan", trained_bundle, "--bench", tmp_path / "report" / "bench.json")
    assert planned.returncode == 0, planned.stderr
    assert "summarization" in planned.stdout
    beside = run_here("plan", trained_bundle, "--bench", tmp_path / "report" / "bench.json", "--json")
    measured = json.loads(beside.stdout)["measured"]
    assert measured["chat"]["model"]["8"] == written.summary("chat", Mode(drafter="model", k=8)).median_speedup
    assert measured["chat"]["none"]["0"] == 1
    path = tmp_path / "other.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(written, target="another")))
    other = run_here("plan", trained_bundle, "--bench", path)
    assert (other.returncode, "the bundle has" in other.stderr) == (2, True)
    refused = run_here("plan", trained_bundle, "--bench", tmp_path / "report" / "bench.json", "--position", "9")
    assert (refused.returncode, "--position and --bench cannot be combined" in refused.stderr) == (2, True)
    assert "k = auto, replayed on the same texts with these costs" in planned.stdout


def test_k_0_compares_plain_decoding_with_auto_only(trained_bundle: Path, tmp_path: Path) -> None:
    few = ["--each", "1", "--rounds", "1", "--k", "0", "--max-new-tokens", "2"]
    done = run_here("bench", trained_bundle, *few, "--report", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [each.label for each in read(tmp_path / "bench.json").modes] == ["plain", "any drafter, k = auto"]
    page = (tmp_path / "bench.md").read_text()
    assert (page.count("of plain | - | - |"), "Acceptance by position" in page) == (5, False)


def test_a_name_may_look_like_markup(trained_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"workload": "[/b] | :smile:", "prompt": "Customer: I need a flight."}\n')
    few = ["--rounds", "1", "--k", "1", "--max-new-tokens", "8"]
    done = run_here("bench", trained_bundle, "--workload", tmp_path / "odd.jsonl", *few, "--report", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    assert "[/b] | :smile:" in done.stdout
    tables = [line for line in (tmp_path / "report" / "bench.md").read_text().splitlines() if line.startswith("| [/b]")]
    assert len(tables) == 4
    assert all(line.startswith("| [/b] \\| :smile: | ") for line in tables)


def test_a_report_that_cannot_be_made_leaves_no_folder_behind(trained_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_here("bench", trained_bundle, "--report", tmp_path / "file" / "report")
    assert (done.returncode, "cannot" in done.stderr, "Traceback" in done.stderr) == (1, True, False), done.stderr
    done = run_here("bench", trained_bundle, "--k", "3", "--report", tmp_path / "new")
    assert (done.returncode, "k = 3 was not built" in done.stderr) == (2, True), done.stderr
    done = run_here("bench", tmp_path / "none", "--report", tmp_path / "new")
    assert (done.returncode, "neither an export nor a bundle" in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "new").exists()


def test_wrong_arguments_are_refused_in_one_line(tmp_path: Path, trained: Outrider, trained_bundle: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"workload": "chat"}\n')
    silent = tmp_path / "silent.jsonl"
    silent.write_text('{"workload": "chat", "prompt": "Hello."}\n{"workload": "chat", "prompt": ""}\n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for arguments, message in (
        ((), "no bundle was given"),
        ((trained_bundle, "--workload", tmp_path / "none.jsonl"), "cannot read"),
        ((trained_bundle, "--workload", broken), "line 1"),
        ((trained_bundle, "--workload", empty), "has no prompts"),
        ((trained_bundle, "--workload", silent), "line 2"),
        ((trained_bundle, "--k", "3"), "k = 3 was not built"),
        ((trained_bundle, "--k", "few"), "not a list of numbers"),
        (("--compare", broken, broken), "is not a report"),
        (("--compare", broken, broken, "--report", tmp_path / "report"), "leave out --report"),
        (("--compare", broken, broken, "--rounds", "3"), "leave out --rounds"),
        ((trained_bundle, "--compare", broken, broken), "leave out the bundle"),
    ):
        done = run_here("bench", *arguments)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    with pytest.raises(UsageError, match="not built"):
        modes(trained, [3])
    with pytest.raises(UsageError, match="the bundle's capacity is"):
        measure(trained, [Prompt("long", "I need a flight. " * 2000)])
    with pytest.raises(UsageError, match="the drafter is auto but k is 4"):
        trained.generate("Hello", k=4, drafter="auto")
