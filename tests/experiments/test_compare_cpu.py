"""`experiments.compare_cpu`: measuring in processes of their own, continuing a stopped run, and the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.experiments.compare_cpu.__main__ import choose_prompts, weight_bytes
from outrider.experiments.compare_cpu.measuring import Contestant, Journal, figures, measure
from outrider.experiments.compare_cpu.peers import PEERS, ours
from outrider.experiments.compare_cpu.report import write_report
from outrider.experiments.compare_cpu.rows import Row, fastest

WORKLOADS = ["code", "code", "chat"]


def entry(name: str, k: Any, speed: float) -> dict[str, Any]:
    """The results of a contestant over two rounds, the second twice as fast as the first."""
    run = {"tokens_per_second": speed, "first": 1.0, "whole": 20 / speed, "length": 2.5}
    fast = run | {"tokens_per_second": 2 * speed, "whole": 10 / speed}
    return {"name": name, "settings": "2 threads", "k": k, "rounds": [[run] * 3, [fast] * 3], "peak": 2e9}


def test_help_shows_the_options() -> None:
    done = subprocess.run([sys.executable, "-m", "outrider.experiments.compare_cpu", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--variant" in done.stdout


def test_figures_follow_from_the_arrivals() -> None:
    run = figures([(0.5, 1), (0.75, 3), (1.0, 2)], None)
    assert run == (10.0, 0.5, 1.0, 2.5)
    assert figures([(0.5, 1), (1.0, 1)], 3.0).length == 3.0


def test_the_prompts_of_each_workload_are_chosen_by_length(tmp_path: Path) -> None:
    prompts = [("a", "xxx"), ("b", "x"), ("a", "x"), ("a", "xxxx")]
    lines = [json.dumps({"workload": workload, "prompt": prompt}) for workload, prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    chosen = {count: [each["prompt"] for each in choose_prompts(tmp_path / "prompts.jsonl", count)] for count in (1, 2)}
    assert chosen == {1: ["xxx", "x"], 2: ["x", "xxxx", "x"]}


def test_a_stopped_run_continues_from_its_journal(tiny_bundle: Path, tmp_path: Path) -> None:
    job = {"bundle": str(tiny_bundle), "manifest": "x", "k": [0, 2, ours.AUTO]}
    contestant = Contestant("Outrider fp32", ours.NAME, "1 thread", job)
    path, prompts = tmp_path / "journal.jsonl", [[5, 6, 7], [8, 9]]
    runs, peak = measure(Journal(path, {"machine": "this"}), contestant, prompts, 12)
    assert list(runs) == [0, 2, ours.AUTO]
    assert [len(each) for each in runs.values()] == [2, 2, 2]
    assert all(run.tokens_per_second > 0 and run.whole > run.first > 0 for each in runs.values() for run in each)
    assert peak > 1e7
    with path.open("a") as file:
        file.write('{"setup": {"machine": "this"}, "jo')  # cut off where the run was stopped
    assert measure(Journal(path, {"machine": "this"}), contestant, prompts, 12) == (runs, peak)
    other, _ = measure(Journal(path, {"machine": "another"}), contestant, prompts, 12)
    assert other != runs  # measured again
    assert len(path.read_text().splitlines()) == 2
    assert weight_bytes(job) == sum(file.stat().st_size for file in tiny_bundle.glob("*/model.onnx.data"))


def test_a_row_compares_rounds_by_geometric_means() -> None:
    plain, fast = (Row(entry("Outrider int4", k, speed), WORKLOADS) for k, speed in ((0, 10.0), (2, 15.0)))
    assert plain.means("tokens_per_second") == pytest.approx([10, 20])
    assert fast.speedup(plain, "code") == pytest.approx([1.5, 1.5])
    assert fast.median("tokens_per_second", "chat") == 22.5
    assert fastest([plain, fast]) is fast
    assert fastest([]) is None
    assert [Row(entry("x", k, 1.0), WORKLOADS).label for k in (0, 3, "auto", "lookup 2")] == [
        "plain",
        "speculative, k = 3",
        "speculative, k = auto",
        "speculative, lookup 2",
    ]


def test_the_report_has_tables_and_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = "llama.cpp"
    result = {
        "about": "Two models.",
        "command": "python -m outrider.experiments.compare_cpu ...",
        "date": "2026-11-22",
        "machine": "a machine",
        "versions": {"Outrider": "0.1.0", peer: "1"},
        "weights_of": {peer: PEERS[peer].WEIGHTS},
        "missing": ["transformers"],
        "workloads": WORKLOADS,
        "tokens": 10,
        "prompt_tokens": [3, 4, 5],
        "weights": {"Outrider int4": 1_000_000_000, "Outrider int8": 1_600_000_000},
        "results": [
            entry("Outrider int4", 0, 10.0),
            entry("Outrider int4", 2, 16.0),
            entry("Outrider int4", ours.AUTO, 15.0),
            entry("Outrider int8", 0, 12.0),
            entry("Outrider int8", 2, 15.0),
            entry("Outrider int8", ours.AUTO, 24.0),
            entry(peer, 0, 8.0),
        ],
    }
    write_report(tmp_path / "report", result)
    text = (tmp_path / "report.md").read_text()
    assert text.rstrip() == capsys.readouterr().out.rstrip()
    drafted = "0.94 (0.62-1.25) | 1.60 (1.60-1.60) | 1.00 | 24.0 (16.0-32.0) | 2.50 | 2.00"
    assert f"| Outrider int4 (2 threads) | speculative, k = 2 | {drafted} |" in text
    assert "Of Outrider int8; ratios to its own plain decoding." in text  # the variant with the fastest `k = auto`
    assert "| plain, against llama.cpp (2 threads) |  | 1.50 (1.50-1.50) |" in text
    assert "| best fixed k (2), against our plain | at least 1.3 | 1.25 (1.25-1.25) |" in text
    fastest_peer = "k = auto, against the fastest mode of any peer, llama.cpp (2 threads, plain)"
    assert f"| {fastest_peer} | at least 1.4 | 3.00 (3.00-3.00) |" in text
    assert "| first token of the longest prompt, seconds against the fastest peer's | at most 1.1 | 1.00 (1.00-1.00) |" in text
    assert "| chat: k = auto, against our plain | at least 1.0 | 2.00 (2.00-2.00) |" in text
    assert "| peak memory, against the weights of both models | at most 1.15 | 1.25 |" in text
    assert "Not installed, and so left out: transformers." in text
