"""`outrider bench`: what it counts, what it writes, and how a browser shows it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from statistics import geometric_mean

import msgspec
import numpy as np
import pytest

from outrider.bench.measure import measure, modes, trace
from outrider.bench.planner import tokens_per_round
from outrider.bench.report import assessment, markdown
from outrider.bench.results import SCHEMA, Mode, Percentiles, Results, changes, read
from outrider.bench.simulator import Trace, regrets
from outrider.bench.summary import AnswerSummary
from outrider.builder.workloads import SHIPPED, Prompt, load
from outrider.errors import UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.policy.choice import AUTO, NONE
from outrider.runtime.stats import Stats
from outrider.tests.support import COMMAND, run_here

PROMPTS = [
    Prompt("support", "Customer: Hi, I would like to book a table for two in San Jose."),
    Prompt("support", "Customer: I need a flight."),
    Prompt("echo", "Agent: What time? Customer: At six. " * 4),
    Prompt("support", "Customer: No, that is all, thanks.\n"),  # the answer ends of itself
]


@pytest.fixture(scope="module")
def results(trained: Outrider) -> Results:
    return measure(trained, PROMPTS, rounds=2, max_new_tokens=40, bundle="bundle", command="outrider bench bundle")


def test_every_mode_is_measured_on_every_workload(results: Results, trained: Outrider) -> None:
    labels = [mode.label for mode in results.modes]
    assert labels[0] == "plain"
    assert labels[1:-2] == [f"draft model, k = {k}" for k in trained.build.k]
    assert labels[-2:] == ["n-gram, k = 4", "any drafter, k = auto"]
    assert results.workloads == ["support", "echo"]
    for each in results.summaries:
        assert len(each.tokens_per_second) == len(each.speedup) == 2
        assert min(each.tokens_per_second) > 0
        assert each.same_text == 2 * each.prompts  # greedy text is plain decoding's
        assert 0 < each.first_token.p50 <= each.first_token.p90 <= each.first_token.p99
    for workload in results.workloads:
        assert results.summary(workload, Mode(drafter=NONE, k=0)).speedup == [1, 1]
        assert results.summary(workload, Mode(drafter=AUTO, k=AUTO)).predicted_speedup is None


def test_every_prompt_has_its_own_numbers(results: Results) -> None:
    assert len(results.texts) == len(PROMPTS) * len(results.modes)
    for each in results.texts:
        assert results.traces[each.prompt].workload == each.workload == PROMPTS[each.prompt].workload
        assert len(each.tokens_per_second) == len(each.first_token) == len(each.per_token) == results.rounds
        assert (each.predicted_speedup is None) == (each.mode.k == AUTO)
    for summary in results.summaries:
        own = [each for each in results.texts if (each.workload, each.mode) == (summary.workload, summary.mode)]
        assert sum(each.tokens for each in own) == summary.tokens
        speeds = [geometric_mean(each.tokens_per_second[number] for each in own) for number in range(results.rounds)]
        assert speeds == pytest.approx(summary.tokens_per_second)
        gains = [geometric_mean(each.speedup[number] for each in own) for number in range(results.rounds)]
        assert gains == pytest.approx(summary.speedup)


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


def cut(text: Trace, k: int) -> list[tuple[int, int]]:
    """Return the drafted and accepted tokens of each drafting round of a recorded text."""
    at, rounds = 0, []
    while at < len(text.tokens):
        drafted = min(k, text.remaining(at) - 1)
        accepted = text.accepted("model", at, drafted)
        rounds += [(drafted, accepted)] if drafted else []
        at += accepted + 1
    return rounds


def test_acceptance_of_the_rounds_is_that_of_the_recorded_texts(results: Results) -> None:
    """Acceptance is counted twice: by the rounds, and by reading the finished text once with the draft."""
    assert [len(each.tokens) < each.most for each in results.traces] == [False, False, False, True]
    for workload in results.workloads:
        texts = [each for each in results.traces if each.workload == workload]
        for k in (1, 2, 4, 8):
            summary = results.summary(workload, Mode(drafter="model", k=k))
            rounds = [each for text in texts for each in cut(text, k)]
            assert summary.acceptance_histogram == [2 * sum(a == at for _, a in rounds) for at in range(k + 1)]
            counts = [(sum(a > at for _, a in rounds), sum(drafted > at for drafted, _ in rounds)) for at in range(k)]
            assert summary.per_position_rates == [accepted / drafted for accepted, drafted in counts]
            assert summary.mean_acceptance_length == pytest.approx(tokens_per_round("model", texts, k))
            assert summary.predicted_speedup is not None
            assert summary.predicted_speedup > 0


def test_a_text_may_end_at_the_edge_of_a_window(trained: Outrider) -> None:
    prompt = PROMPTS[1]
    room = trained.build.windows[0] - len(trained.text.encode(prompt.prompt, chat=False))
    result = measure(trained, [prompt], rounds=1, max_new_tokens=room)
    assert result.policies["support"]["oracle"] > 0


def test_ngrams_are_accepted_where_a_text_repeats_itself(results: Results) -> None:
    summary = results.summary("echo", Mode(drafter="ngram", k=4))
    assert summary.rounds_by_drafter["ngram"] == summary.drafting_rounds > 0
    assert summary.mean_acceptance_length > 1.3


def test_a_trace_records_the_drafts_choice_at_each_place(trained: Outrider) -> None:
    prompt = trained.text.encode(PROMPTS[0].prompt, chat=False)
    recorded = trace(trained, "support", prompt, [5, 6, 7])
    session = trained.sessions["draft"]
    text = [*prompt, 5, 6]
    logits = np.concatenate([session.run(np.array([text[at : at + 1]]), np.array([at]))[0].copy() for at in range(len(text))])[
        -3:
    ].astype(np.float64)
    assert recorded.agrees["model"] == [int(row.argmax()) == token for row, token in zip(logits, (5, 6, 7), strict=True)]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(recorded.confidences["model"], shares.max(-1) / shares.sum(-1), atol=1e-3)


def test_times_between_tokens_are_zero_within_a_round() -> None:
    answer = AnswerSummary([1, 2, 3, 4, 5, 6], 1.0, [(0.5, 2), (0.7, 1), (1.3, 3)], Stats())
    assert answer.gaps == pytest.approx([0, 0.2, 0.6, 0, 0])
    assert answer.per_token == pytest.approx(0.8 / 4)
    assert Percentiles.of([0.001 * each for each in range(1, 101)]).p90 == pytest.approx(91)


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


def test_results_read_back_as_they_were_written(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(msgspec.json.encode(results))
    assert read(path) == results
    rows = list(regrets(results.policies))
    assert [row[0] for row in rows] == [row[0] for row in assessment(results)] == results.workloads
    for workload, live, fixed, future, more, more_than_future in rows:
        taken = results.policies[workload]
        best = min(time for name, time in taken.items() if "auto" not in name and name != "oracle")
        assert float(live) == pytest.approx(taken["plain"] / taken["auto"], abs=0.006)
        assert float(fixed.split()[0]) == pytest.approx(taken["plain"] / best, abs=0.006)
        assert float(future) == pytest.approx(taken["plain"] / taken["oracle"], abs=0.006)
        assert float(more.rstrip("%")) == pytest.approx(100 * (taken["auto"] / best - 1), abs=0.06)
        assert float(more_than_future.rstrip("%")) == pytest.approx(100 * (taken["auto"] / taken["oracle"] - 1), abs=0.06)
    for workload, over_plain, over_fixed, lowest, highest in assessment(results):
        chosen = results.summary(workload, Mode(drafter=AUTO, k=AUTO)).speedup
        assert over_plain == f"{np.median(chosen):.2f} ({min(chosen):.2f}-{max(chosen):.2f})"
        assert " of " in over_fixed
        assert float(lowest.split()[0]) <= float(highest.split()[0])
    assert "| plain |" in markdown(results)


def test_a_comparison_calls_a_mode_better_if_no_earlier_round_was_as_fast(results: Results, tmp_path: Path) -> None:
    def scaled(factor: float) -> Results:
        faster = [
            msgspec.structs.replace(
                each,
                tokens_per_second=[factor * speed for speed in (*each.tokens_per_second, 500, 600, 700)],
                speedup=[factor * speed for speed in (*each.speedup, 0.5, 0.6, 0.7)],
            )
            for each in results.summaries
        ]
        sooner = [
            msgspec.structs.replace(each, first_token=[time / factor for time in (*each.first_token, 5, 6, 7)])
            for each in results.texts
        ]
        return msgspec.structs.replace(results, summaries=faster, texts=sooner)

    assert {each.verdict for each in changes(results, results)} == {"fewer than 5 rounds"}
    assert {each.verdict for each in changes(scaled(1), scaled(1))} == {"within the noise"}
    assert {each.verdict for each in changes(scaled(1), scaled(100))} == {"better"}
    assert {each.verdict for each in changes(scaled(1), scaled(0.01))} == {"worse"}
    for name, each in (("a", scaled(1)), ("b", scaled(100))):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(each))
    done = run_here("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json", "--json")
    output = json.loads(done.stdout)
    result = output["changes"]
    assert (output["only_before"], output["only_after"]) == ([], [])
    assert {each["verdict"] for each in result} == {"better"}
    units = {(each["mode"]["k"] == 0, each["unit"]) for each in result}
    assert units == {(True, "tokens/s"), (True, "ms to the first token"), (False, "speed-up")}
    page = run_here("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json").stdout
    assert "better" in page
    assert f"before: {tmp_path / 'a.json'}" in page
    assert "by chance alone, 0.1 of these 16" in " ".join(page.split())


def test_a_slower_machine_does_not_make_drafting_worse(results: Results) -> None:
    """Everything at half the speed, plain decoding, too; and prompts are read as fast as before."""

    def repeated(factor: float) -> Results:
        each_round = [
            msgspec.structs.replace(
                each, tokens_per_second=[factor * each.tokens_per_second[0]] * 5, speedup=[each.speedup[0]] * 5
            )
            for each in results.summaries
        ]
        texts = [msgspec.structs.replace(each, first_token=[each.first_token[0]] * 5) for each in results.texts]
        return msgspec.structs.replace(results, summaries=each_round, texts=texts)

    verdicts = {(each.unit, each.verdict) for each in changes(repeated(1), repeated(0.5))}
    assert verdicts == {(unit, "within the noise") for unit in ("speed-up", "ms to the first token")} | {("tokens/s", "worse")}


def test_reports_of_other_things_are_not_compared(results: Results) -> None:
    other = [msgspec.structs.replace(results.traces[0], prompt=[1, 2, 3]), *results.traces[1:]]
    for changed, message in (
        ({"machine": "another one"}, "differ in machine"),
        ({"max_new_tokens": 41}, "differ in max_new_tokens: 40, 41"),
        ({"traces": other}, "different prompts"),
    ):
        with pytest.raises(UsageError, match=message):
            changes(results, msgspec.structs.replace(results, **changed))


def test_a_report_with_invalid_values_is_refused(results: Results, tmp_path: Path) -> None:
    path, written = tmp_path / "bench.json", json.loads(msgspec.json.encode(results))
    for part, name, value in (
        ("traces", "tokens", []),
        ("traces", "agrees", {"model": [True]}),
        ("summaries", "speedup", []),
        ("summaries", "tokens_per_second", [0.0, 1.0]),
        ("summaries", "mode", {"drafter": "guess", "k": 1}),
        ("summaries", "mode", {"drafter": "model", "k": "some"}),
        (None, "schema", SCHEMA + 1),
        (None, "texts", []),
    ):
        damaged = json.loads(json.dumps(written))
        (damaged[part][0] if part else damaged)[name] = value
        path.write_text(json.dumps(damaged))
        with pytest.raises(UsageError, match="not a report of this version of outrider"):
            read(path)


def test_a_name_may_look_like_markup(trained_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"workload": "[/b] | :smile:", "prompt": "Customer: I need a flight."}\n')
    few = ["--rounds", "1", "--k", "1", "--max-new-tokens", "8"]
    done = run_here("bench", trained_bundle, "--workload", tmp_path / "odd.jsonl", *few, "--report", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    assert "[/b] | :smile:" in done.stdout
    tables = [line for line in (tmp_path / "report" / "bench.md").read_text().splitlines() if line.startswith("| [/b]")]
    assert len(tables) == 3
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


def test_the_shipped_prompts_are_of_five_workloads() -> None:
    prompts = load(SHIPPED)
    assert {each.workload for each in prompts} == {"chat", "code", "math", "summarization", "support"}
    assert len(load(SHIPPED, each=1)) == 5
