"""Predictions: the textbook's numbers, a bundle's costs, and recorded texts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.bench.links import Link, LinkedCosts
from outrider.bench.planner import Prediction, account, at_rate, best, of_traces, tokens_per_round
from outrider.bench.simulator import Trace, compare, oracle, replay
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import MANIFEST
from outrider.engines.contract import BATCH_DIM, ROWS_DIM, Stage, Tensor
from outrider.errors import UsageError
from outrider.runtime.policy.choice import NONE
from outrider.runtime.policy.costs import expected_tokens
from outrider.runtime.policy.policy import FixedPolicy
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.tests.runtime.policies import K, costs, flips, text
from outrider.tests.support import ROOT, run_here


def test_the_textbook_example() -> None:
    result = account(k=4, tokens_per_pass=3, cost_ratio=6, tokens=12)
    assert (result.target_passes, result.draft_steps) == (4, 16)
    assert result.target_steps == pytest.approx(6.7, abs=0.05)
    assert result.speedup == pytest.approx(1.8, abs=0.05)
    across = account(k=4, tokens_per_pass=3, cost_ratio=6, tokens=12, hop_cost=0.5)  # 4 passes, where plain decoding has 12
    assert across.speedup == pytest.approx(12 * 1.5 / (4 * 1.5 + 16 / 6))
    assert account(k=5, tokens_per_pass=2.5, cost_ratio=6, tokens=20).target_passes == 8
    assert account(k=5, tokens_per_pass=4, cost_ratio=6, tokens=20).target_passes == 5


def test_the_command_prints_it() -> None:
    done = run_here("plan", "--k", "4", "--mean-accepted", "3", "--cost-ratio", "6", "--tokens", "12")
    assert done.stdout.splitlines() == [
        "4 target passes, 16 draft steps",
        "6.7 target-step equivalents for 12 tokens, 3.00 per pass",
        "1.8 times plain decoding",
    ]
    done = run_here("plan", "--k", "4", "--rate", "0.8", "--cost-ratio", "4", "--pass-cost", "1.5", "--json")
    result = json.loads(done.stdout)
    assert result["target_passes"] == 30  # 100 / 3.36
    assert result["target_steps"] == pytest.approx(30 * 1.5 + 120 / 4)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--k", "4"),
        ("--k", "4", "--cost-ratio", "6"),
        ("--k", "4", "--cost-ratio", "6", "--rate", "0.5", "--mean-accepted", "2"),
        ("--k", "4", "--cost-ratio", "0", "--rate", "0.5"),
        ("--k", "4", "--cost-ratio", "6", "--rate", "1.5"),
        ("--k", "4", "--cost-ratio", "6", "--rate", "nan"),
        ("--k", "4", "--cost-ratio", "6", "--mean-accepted", "nan"),
        ("--k", "4", "--cost-ratio", "6", "--mean-accepted", "6"),
        ("--k", "4", "--cost-ratio", "inf", "--mean-accepted", "3"),
        ("--k", "4", "--cost-ratio", "1e-320", "--mean-accepted", "3"),
        ("--k", "4", "--cost-ratio", "6", "--mean-accepted", "3", "--pass-cost", "1e308"),
        ("--k", "4", "--cost-ratio", "6", "--mean-accepted", "3", "--hop-cost", "nan"),
        ("--k", "4", "--cost-ratio", "6", "--mean-accepted", "3", "--link", "1", "1"),
        ("--k", "4", "--cost-ratio", "6", "--mean-accepted", "3", "--tokens", "9" * 400),
        ("--k", "9" * 400, "--cost-ratio", "6", "--rate", "0.5"),
        ("--k", "4", "--cost-ratio", "6", "--mean-accepted", "3", "--bench", "x.json"),
    ],
)
def test_too_few_or_impossible_numbers_are_refused(arguments: tuple[str, ...]) -> None:
    done = run_here("plan", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(("error: ", "Error"))
    assert "Traceback" not in done.stderr


def test_a_rate_gives_every_built_k_and_where_each_breaks_even() -> None:
    table = costs()
    predictions = {each.k: each for each in at_rate(table, "model", 0.8, end=40)}
    assert list(predictions) == [0, *K]
    plain = predictions.pop(0)
    assert (plain.speedup, plain.mean_acceptance_length, plain.break_even) == (1, 1, None)
    for k, each in predictions.items():
        took = table.round("model", k, k, 40, True)
        assert each.mean_acceptance_length == pytest.approx(expected_tokens(0.8, k))
        assert each.speedup == pytest.approx(each.mean_acceptance_length * 6 / took)
        assert each.tokens_per_second == pytest.approx(1000 * each.mean_acceptance_length / took)
        assert each.break_even is not None
        assert expected_tokens(each.break_even, k) * 6 / took == pytest.approx(1)
        assert each.cheaper_draft == pytest.approx(
            expected_tokens(0.8, k) * 6 / costs(draft=0.5).round("model", k, k, 40, True)
        )
        assert each.better_draft == pytest.approx(expected_tokens(0.82, k) * 6 / took)
    slow = at_rate(costs(draft=30), "model", 1.0, end=40)
    assert [each.break_even for each in slow] == [None] * len(slow)
    assert best(slow)[""].k == 0


def test_recorded_texts_give_what_a_replay_of_them_takes() -> None:
    table = costs()
    traces = [text(flips(0.8, seed=seed)) for seed in range(3)]
    assert [each.k for each in of_traces(table, "model", traces)] == [0, *K]
    for each in of_traces(table, "model", traces)[1:]:
        policy, plain = FixedPolicy("model", each.k), FixedPolicy(NONE, 0)
        taken = sum(replay(trace, table, policy) for trace in traces)
        ratios = [replay(trace, table, plain) / replay(trace, table, policy) for trace in traces]
        assert each.speedup == pytest.approx(np.exp(np.log(ratios).mean()))
        assert each.tokens_per_second == pytest.approx(1000 * sum(len(trace.tokens) for trace in traces) / taken)
        assert each.mean_acceptance_length == pytest.approx(expected_tokens(0.8, each.k), rel=0.1)
        assert each.mean_acceptance_length == pytest.approx(tokens_per_round(table, "model", traces, each.k))
        assert each.break_even is not None
        at_that = [replay(trace, table, plain) / (like(trace, each, table)) for trace in traces]
        assert np.log(at_that).mean() == pytest.approx(0, abs=1e-9)
        cheaper = [replay(trace, costs(draft=0.5), FixedPolicy("model", each.k)) for trace in traces]
        gains = [replay(trace, table, plain) / taken for trace, taken in zip(traces, cheaper, strict=True)]
        assert each.cheaper_draft == pytest.approx(np.exp(np.log(gains).mean()))


def test_a_replay_pays_for_rejected_tokens() -> None:
    table = costs()
    rejected, accepted = (replay(text([agrees] * 40), table, FixedPolicy("model", 4)) for agrees in (False, True))
    reading, round_of_four = table.catch_up("model", 38, 64), table.round("model", 4, 4, 64, True)
    assert 36 * round_of_four + reading < rejected < 40 * round_of_four + reading  # the last rounds draft less
    first = table.round("none", 0, 0, 64, True)  # before the draft reads
    assert accepted == pytest.approx(first + reading + 8 * round_of_four, rel=0.02)


def like(trace: Trace, prediction: Prediction, table: RoundCosts) -> float:
    """What a text takes if its rounds accept as they do where it breaks even."""
    assert prediction.break_even is not None
    reading = table.catch_up("model", len(trace.prompt) - 2, 64)
    rounds = replay(trace, table, FixedPolicy("model", prediction.k)) - reading
    return reading + rounds * prediction.mean_acceptance_length / expected_tokens(prediction.break_even, prediction.k)


def test_the_time_to_read_a_long_prompt_is_not_made_up_for_by_acceptance() -> None:
    """Plain decoding takes 240 ms; reading 1,200 tokens 87, while 15 are decoded, or by a draft of half the cost 44 and 7."""
    table = costs()
    predictions = {each.k: each for each in of_traces(table, "model", [text(flips(0.7, 40), prompt=1200)])}
    assert predictions[1].break_even is None  # 87 ms, 15 rounds of 6 ms, and 13 of 7 ms or more
    assert predictions[4].speedup < 0.9
    assert predictions[4].cheaper_draft > 1
    assert predictions[4].break_even is not None
    assert predictions[4].break_even > 0.65
    assert predictions[0].cheaper_draft == predictions[0].better_draft == predictions[0].speedup == 1


def test_no_policy_beats_perfect_foresight() -> None:
    table = costs()
    ngrams = Trace("repeats", [1, 2, 3, 4] * 5, [1, 2, 3, 4] * 10, {"model": flips(0.5, 40)}, {"model": [0.5] * 40})
    milliseconds = compare([text(flips(0.7)), ngrams], table, ["model", "ngram"])
    for taken in milliseconds.values():
        least = taken.pop("oracle")
        assert all(time >= least for time in taken.values())
    repeats = milliseconds["repeats"]
    assert repeats["ngram, k = 8"] < 0.5 * repeats["plain"]
    assert repeats["auto"] < 0.6 * repeats["plain"]


def test_the_oracle_is_the_minimum_over_all_divisions_of_a_text() -> None:
    table = costs()
    trace = text(flips(0.6, 9))

    def least(at: int) -> float:
        if at == len(trace.tokens):
            return 0.0
        end = len(trace.prompt) + at
        ways = [table.round(NONE, 0, 0, end, True) + least(at + 1)]
        for k in K:
            for drafted in range(1, min(k, len(trace.tokens) - at - 1) + 1):
                accepted = trace.accepted("model", at, drafted)
                ways.append(table.round("model", accepted, k, end + k, True) + least(at + accepted + 1))
        return min(ways)

    assert oracle(trace, table, ["model"]) == pytest.approx(least(0))


def test_a_bundle_or_a_report_that_says_too_little_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    assert manifest.build is not None
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    without = msgspec.structs.replace(manifest, build=msgspec.structs.replace(manifest.build, acceptance={}))
    (bundle / MANIFEST).write_bytes(without.encode())
    refused = run_here("plan", bundle)
    assert (refused.returncode, "acceptance was not measured" in refused.stderr) == (2, True), refused.stderr
    with pytest.raises(UsageError, match="recorded without a draft model"):
        of_traces(costs(), "model", [Trace("", [1, 2], [3, 4], {}, {})])


def test_a_bundles_plan(trained_bundle: Path, tmp_path: Path) -> None:
    done = run_here("plan", trained_bundle, "--rate", "0.7")
    assert done.returncode == 0, done.stderr
    assert "break-even" in done.stdout
    plan = json.loads(run_here("plan", trained_bundle, "--rate", "0.7", "--json").stdout)
    predictions = plan["predictions"]
    manifest = read_manifest(trained_bundle)
    assert manifest.build is not None
    assert [each["k"] for each in predictions] == [0, *manifest.build.k]
    assert plan["best"][""]["k"] == max(predictions, key=lambda each: each["speedup"])["k"]
    assert (predictions[0]["speedup"], predictions[0]["break_even"]) == (1, None)
    table = RoundCosts(manifest, manifest.build)
    assert predictions[1]["speedup"] == pytest.approx(at_rate(table, "model", 0.7, manifest.build.capacity // 4)[1].speedup)
    own = json.loads(run_here("plan", trained_bundle, "--json").stdout)["predictions"]
    rate = manifest.build.acceptance["model"]
    assert 0.2 < rate < 1
    assert own[1]["speedup"] == pytest.approx(at_rate(table, "model", rate, manifest.build.capacity // 4)[1].speedup)
    assert "excludes the time in which the draft reads the prompt" in done.stdout
    whole = run_here("plan", trained_bundle, "--link", "1", "1")
    assert (whole.returncode, "is not in stages" in whole.stderr) == (2, True)
    for latency, bandwidth in (("nan", "1"), ("1e308", "1"), ("0", "1e-308")):
        endless = run_here("plan", trained_bundle, "--link", latency, bandwidth)
        assert (endless.returncode, "--link is not finite" in endless.stderr) == (2, True)
    refused = run_here("plan", trained_bundle, "--rate", "0.7", "--bench", tmp_path / "none.json")
    assert (refused.returncode, "cannot be combined" in refused.stderr) == (2, True)
    ignored = run_here("plan", trained_bundle, "--tokens", "12")
    assert (ignored.returncode, "--tokens cannot be used with a bundle" in ignored.stderr) == (2, True)
    missing = run_here("plan", trained_bundle, "--bench", tmp_path / "none.json")
    assert (missing.returncode, "cannot read" in missing.stderr) == (2, True)


def test_stages_on_several_devices_pay_for_each_crossing() -> None:
    """Two stages pass 1,536 fp32 numbers a row on; then the accepted tokens go back, which only takes the latency."""
    hidden = Tensor("boundary.0.0", "float32", (BATCH_DIM, ROWS_DIM, 1536))
    stages = [Stage((0, 13), 0, [], [], [hidden]), Stage((14, 27), 0, [], [hidden], [])]
    build: Any = SimpleNamespace(k=[4], max_prompt_chunk=16, windows=[64], costs={}, acceptance={}, stages=stages)
    manifest: Any = SimpleNamespace(models={"target": SimpleNamespace(parameters=10), "draft": SimpleNamespace(parameters=1)})
    whole, linked = RoundCosts(manifest, build), LinkedCosts(manifest, build, Link(latency=0.2, bandwidth=0.1))
    for k, rows in ((0, 1), (4, 5)):
        hops = linked.round(NONE, 0, k, 40, True) - whole.round(NONE, 0, k, 40, True)
        assert hops == pytest.approx(2 * 0.2 + rows * 1536 * 4 * 8 / 1e5)


def test_the_page_about_stages_has_what_its_formulas_give() -> None:
    """Both kinds of memory with every link, over 2, 4 and 8 devices."""
    page = (ROOT / "docs" / "explanation" / "stages.md").read_text()
    number = r" ([\d.]+) \|"
    found = re.findall(r"^\| ([\w ]+) \|" + 2 * number + "$", page, re.MULTILINE)
    links = {name: (float(latency), float(bandwidth)) for name, latency, bandwidth in found}
    rows = re.findall(r"^\| ([\d,]+) GB/s, ([\w ]+) \|" + 5 * number + "$", page, re.MULTILINE)
    assert len(links) == 3
    assert {row[:3] for row in rows if row[1] != "any"} == {
        (memory, link, devices) for memory in ("80", "1,000") for link in links for devices in ("2", "4", "8")
    }
    accepted = expected_tokens(0.75, 4)
    for memory, link, devices, *shown in rows:
        one, count = 39.4e3 / float(memory.replace(",", "")), int(devices)
        latency, bandwidth = links.get(link, (0.0, 1.0))
        megabits = (count - 1) * 8192 * (4 if memory == "80" else 2) * 8 / 1e6
        few, many = (count * latency + each * megabits / bandwidth if count > 1 else 0.0 for each in (1, 5))
        plain, drafted = 1000 / (one + few), 1000 * accepted / (1.1 * one + many + 4 * one / 65)
        ratio = account(4, accepted, 65, 10**6, 1.1 + (many - few) / one, few / one).speedup
        assert drafted / plain == pytest.approx(ratio, rel=1e-4)
        for said, value in zip(shown, (39.4 / count, plain, drafted, ratio), strict=True):
            digits = len(said.partition(".")[2])
            assert float(said) == pytest.approx(value, abs=0.501 * 10.0**-digits), (memory, link, devices)
