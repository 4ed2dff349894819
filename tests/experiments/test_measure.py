"""`python -m outrider.experiments.measure`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from click.testing import CliRunner

from outrider.experiments.measure.__main__ import main
from outrider.experiments.measure.quotes import quoted, runs


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


def test_prompts_are_read_in_chunks_of_several_sizes(tiny_bundle: Path) -> None:
    arguments = [tiny_bundle, "--chunk", 8, "--chunk", 16, "--length", 40, "--repeat", 2]
    done = CliRunner().invoke(main, ["reading", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    _, _, *rows = done.stdout.splitlines()
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {tiny_bundle.name}", chunk] for chunk in ("8", "16")]
    assert all(re.fullmatch(r"\d+ \(\d+-\d+\)", row.split(" | ")[2]) for row in rows)


def test_quoted_tokens_are_in_runs_of_four() -> None:
    assert quoted([9, 1, 2, 3, 4, 8, 2, 3, 4], runs([0, 1, 2, 3, 4])) == 4
    assert quoted([1, 2, 3], runs([1, 2, 3, 4])) == 0


def test_answers_quote_earlier_ones_of_their_workload(tiny_bundle: Path, tmp_path: Path) -> None:
    lines = [{"workload": name, "prompt": "The cat sat on the mat."} for name in ("first", "first", "second")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = [tiny_bundle, tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", "--max-new-tokens", 8]
    done = CliRunner().invoke(main, ["quotes", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    first, second = (row.split(" | ") for row in done.stdout.splitlines()[2:])
    assert first[-1] in ("50% |", "100% |"), "the second answer is the first one"
    assert second[-1].removesuffix(" |") == second[-2]
    answers = [json.loads(line)["answer"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert answers[0] == answers[1] == answers[2] != ""


def test_whole_answers_are_compared_by_workload(tiny_bundle: Path, tmp_path: Path) -> None:
    lines = [{"workload": name, "prompt": "The cat sat on the mat."} for name in ("first", "first", "second", "second")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = [tiny_bundle, tmp_path / "prompts.jsonl", "--max-new-tokens", 8, "--repeat", 2, "--skip", 1]
    done = CliRunner().invoke(main, ["answers", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    _, _, *rows = done.stdout.split("\n\n")[0].splitlines()
    assert [row.split(" | ")[:2] for row in rows] == [["| first", "1"], ["| second", "1"]]
    assert all(re.fullmatch(r"[\d.]+ \([\d.]+-[\d.]+\)", row.split(" | ")[at]) for row in rows for at in (3, 4, 6))
