"""`outrider bench` on the shipped pair: what it counts, what it writes, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import matplotlib.pyplot as plt
import msgspec
import numpy as np
import pytest

from outrider.bench.measure import Answer, measure, trace, ways
from outrider.bench.planner import tokens_per_round
from outrider.bench.report import COLOURS, markdown, promises
from outrider.bench.results import Percentiles, Results, Way, changes, geometric_mean, read
from outrider.bench.simulator import regrets
from outrider.bench.workloads import SHIPPED, Prompt, load
from outrider.engines.errors import UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.policy import AUTO, MODEL, NGRAM, NONE
from outrider.runtime.stats import Stats
from outrider.tests.support import COMMAND, run

PROMPTS = [
    Prompt("support", "Customer: Hi, I would like to book a table for two in San Jose."),
    Prompt("support", "Customer: I need a flight."),
    Prompt("echo", "Agent: What time? Customer: At six. " * 4),
    Prompt("support", "Customer: No, that is all, thanks.\n"),  # the answer ends of itself
]


@pytest.fixture(scope="module")
def results(shipped: Outrider) -> Results:
    return measure(shipped, PROMPTS, rounds=2, max_new_tokens=40, bundle="bundle", command="outrider bench bundle")


def test_every_way_is_measured_on_every_workload(results: Results, shipped: Outrider) -> None:
    labels = [way.label for way in results.ways]
    assert labels[0] == "plain"
    assert labels[1:-2] == [f"draft model, k = {k}" for k in shipped.build.k]
    assert labels[-2:] == ["n-gram, k = 4", "any drafter, k = auto"]
    assert results.workloads == ["support", "echo"]
    for each in results.summaries:
        assert len(each.tokens_per_second) == len(each.speedup) == 2
        assert min(each.tokens_per_second) > 0
        assert each.same_text == 2 * each.prompts  # greedy text is plain decoding's
        assert 0 < each.first_token.p50 <= each.first_token.p90 <= each.first_token.p99
    for workload in results.workloads:
        assert results.of(workload, Way(drafter=NONE, k=0)).speedup == [1, 1]
        assert results.of(workload, Way(drafter=AUTO, k=AUTO)).predicted_speedup is None


def test_every_prompt_has_its_own_numbers(results: Results) -> None:
    assert len(results.texts) == len(PROMPTS) * len(results.ways)
    for each in results.texts:
        assert results.traces[each.prompt].workload == each.workload == PROMPTS[each.prompt].workload
        assert len(each.tokens_per_second) == len(each.first_token) == len(each.per_token) == results.rounds
        assert (each.predicted_speedup is None) == (each.way.k == AUTO)
    for summary in results.summaries:
        of_it = [each for each in results.texts if (each.workload, each.way) == (summary.workload, summary.way)]
        assert sum(each.tokens for each in of_it) == summary.tokens
        speeds = [geometric_mean(each.tokens_per_second[number] for each in of_it) for number in range(results.rounds)]
        assert speeds == pytest.approx(summary.tokens_per_second)
        gains = [geometric_mean(each.speedup[number] for each in of_it) for number in range(results.rounds)]
        assert gains == pytest.approx(summary.speedup)


def test_an_interrupt_keeps_the_whole_rounds(shipped_bundle: Path, tmp_path: Path) -> None:
    def heed() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started deaf to it

    (tmp_path / "one.jsonl").write_text('{"workload": "support", "prompt": "Customer: I need a flight."}\n')
    asked = [
        "--workload",
        tmp_path / "one.jsonl",
        "--rounds",
        "100000",
        "--max-new-tokens",
        "2",
        "--report",
        tmp_path / "report",
    ]
    arguments = [*COMMAND, "bench", str(shipped_bundle), *map(str, asked)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "measuring" in line)
        time.sleep(6)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    written = read(tmp_path / "report" / "bench.json")
    assert 0 < written.rounds < 100000
    assert {len(each.speedup) for each in written.summaries} == {written.rounds}


def test_what_is_predicted_is_what_the_texts_themselves_say(results: Results) -> None:
    """Acceptance is counted twice: by the rounds, and by reading the finished text once with the draft."""
    assert [len(each.tokens) < each.most for each in results.traces] == [False, False, False, True]
    for workload in results.workloads:
        texts = [each for each in results.traces if each.workload == workload]
        for k in (1, 2, 4, 8):
            found = results.of(workload, Way(drafter=MODEL, k=k))
            assert found.mean_acceptance_length == pytest.approx(tokens_per_round(texts, k))
            assert found.predicted_speedup is not None
            assert found.predicted_speedup > 0


def test_a_text_may_end_at_the_edge_of_a_window(shipped: Outrider) -> None:
    prompt = PROMPTS[1]
    room = shipped.build.windows[0] - len(shipped.text.encode(prompt.prompt, chat=False))
    found = measure(shipped, [prompt], rounds=1, max_new_tokens=room)
    assert found.policies["support"]["oracle"] > 0


def test_ngrams_are_accepted_where_a_text_repeats_itself(results: Results) -> None:
    found = results.of("echo", Way(drafter=NGRAM, k=4))
    assert found.ngram_rounds == found.drafting_rounds > 0
    assert found.mean_acceptance_length > 1.3


def test_a_trace_is_what_the_draft_says_at_each_place(shipped: Outrider) -> None:
    prompt = shipped.text.encode(PROMPTS[0].prompt, chat=False)
    found = trace(shipped, "support", prompt, [5, 6, 7])
    session = shipped.sessions["draft"]
    text = [*prompt, 5, 6]
    logits = np.concatenate([session.run(np.array([text[at : at + 1]]), np.array([at]))[0].copy() for at in range(len(text))])[
        -3:
    ].astype(np.float64)
    assert found.agrees == [int(row.argmax()) == token for row, token in zip(logits, (5, 6, 7), strict=True)]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(found.confidences, shares.max(-1) / shares.sum(-1), atol=1e-3)


def test_times_between_tokens_are_zero_within_a_round() -> None:
    answer = Answer([1, 2, 3, 4, 5, 6], 1.0, [(0.5, 2), (0.7, 1), (1.3, 3)], Stats())
    assert answer.gaps == pytest.approx([0, 0.2, 0.6, 0, 0])
    assert answer.per_token == pytest.approx(0.8 / 4)
    assert Percentiles.of([0.001 * each for each in range(1, 101)]).p90 == pytest.approx(91)


def test_the_report_opens_in_a_browser(results: Results, tmp_path: Path, shipped_bundle: Path) -> None:
    few = ["--each", "1", "--rounds", "1", "--max-new-tokens", "24"]
    done = run("bench", shipped_bundle, *few, "--report", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout
    written = read(tmp_path / "report" / "bench.json")
    assert written.workloads == ["chat", "code", "math", "summarization", "support"]
    page = (tmp_path / "report" / "index.html").read_text()
    assert not re.search(r"(src|href)=[\"']?http", page)  # it needs no other file
    assert "# Measured by workload" in (tmp_path / "report" / "bench.md").read_text()
    planned = run("plan", shipped_bundle, "--bench", tmp_path / "report" / "bench.json")
    assert planned.returncode == 0, planned.stderr
    assert "summarization" in planned.stdout
    assert "k chosen live, on the same texts by these costs" in planned.stdout
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine; .ci/run installs one")
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    quiet += ["--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}"]

    def look(*mode: str) -> str:
        command = [browser, "--headless", "--no-sandbox", *quiet, *mode, f"file://{tmp_path / 'report' / 'index.html'}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    shown = look("--dump-dom")
    assert shown.count("<svg") == 4
    for said in ("How well k was chosen", "Speed-up against k", "draft model, k = 8", "summarization"):
        assert said in shown
    look(f"--screenshot={tmp_path / 'seen.png'}", "--window-size=1100,2600")
    seen = (255 * plt.imread(tmp_path / "seen.png")[:, :, :3]).round().astype(int)
    for colour in COLOURS[:3]:  # of plots that are drawn, and not only there
        assert (np.abs(seen - [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).max(-1) <= 2).sum() > 500, colour


def test_results_read_back_as_they_were_written(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(msgspec.json.encode(results))
    assert read(path) == results
    assert {row[0] for row in regrets(results.policies)} == set(results.workloads)
    for workload, over_plain, over_fixed, lowest, highest in promises(results):
        chosen = results.of(workload, Way(drafter=AUTO, k=AUTO)).speedup
        assert over_plain == f"{np.median(chosen):.2f} ({min(chosen):.2f}-{max(chosen):.2f})"
        assert " of " in over_fixed
        assert float(lowest.split()[0]) <= float(highest.split()[0])
    assert "| plain |" in markdown(results)


def test_a_comparison_calls_better_what_no_round_of_before_reached(results: Results, tmp_path: Path) -> None:
    def scaled(factor: float) -> Results:
        faster = [
            msgspec.structs.replace(
                each,
                tokens_per_second=[factor * speed for speed in (*each.tokens_per_second, 500, 600, 700)],
                speedup=[factor * speed for speed in (*each.speedup, 0.5, 0.6, 0.7)],
            )
            for each in results.summaries
        ]
        return msgspec.structs.replace(results, summaries=faster)

    assert {each.verdict for each in changes(results, results)} == {"fewer than 5 rounds"}
    assert {each.verdict for each in changes(scaled(1), scaled(1))} == {"within the noise"}
    assert {each.verdict for each in changes(scaled(1), scaled(100))} == {"better"}
    assert {each.verdict for each in changes(scaled(1), scaled(0.01))} == {"worse"}
    for name, each in (("a", scaled(1)), ("b", scaled(100))):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(each))
    done = run("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json", "--json")
    found = json.loads(done.stdout)
    assert {each["verdict"] for each in found} == {"better"}
    assert {(each["way"]["k"] == 0, each["unit"]) for each in found} == {(True, "tokens/s"), (False, "speed-up")}
    said = run("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json").stdout
    assert "better" in said
    assert "chance alone calls 0.1 of these 14" in " ".join(said.split())


def test_a_slower_machine_makes_no_drafting_worse(results: Results) -> None:
    """Everything at half the speed, plain decoding, too."""

    def repeated(factor: float) -> Results:
        each_round = [
            msgspec.structs.replace(
                each, tokens_per_second=[factor * each.tokens_per_second[0]] * 5, speedup=[each.speedup[0]] * 5
            )
            for each in results.summaries
        ]
        return msgspec.structs.replace(results, summaries=each_round)

    found = {(each.way.k == 0, each.verdict) for each in changes(repeated(1), repeated(0.5))}
    assert found == {(True, "worse"), (False, "within the noise")}


def test_reports_of_other_things_are_not_compared(results: Results) -> None:
    other = [msgspec.structs.replace(results.traces[0], prompt=[1, 2, 3]), *results.traces[1:]]
    for changed, message in (
        ({"machine": "another one"}, "not of the same machine"),
        ({"max_new_tokens": 41}, "not of the same max_new_tokens: 40, 41"),
        ({"traces": other}, "not of the same prompts"),
    ):
        with pytest.raises(UsageError, match=message):
            changes(results, msgspec.structs.replace(results, **changed))


def test_what_is_asked_wrongly_is_said_in_one_line(tmp_path: Path, shipped: Outrider, shipped_bundle: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"workload": "chat"}\n')
    silent = tmp_path / "silent.jsonl"
    silent.write_text('{"workload": "chat", "prompt": "Hello."}\n{"workload": "chat", "prompt": ""}\n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for arguments, message in (
        ((), "no bundle is named"),
        ((shipped_bundle, "--workload", tmp_path / "none.jsonl"), "cannot read"),
        ((shipped_bundle, "--workload", broken), "line 1"),
        ((shipped_bundle, "--workload", empty), "has no prompts"),
        ((shipped_bundle, "--workload", silent), "line 2"),
        ((shipped_bundle, "--k", "3"), "k = 3 was not built"),
        ((shipped_bundle, "--k", "few"), "no list of numbers"),
        (("--compare", broken, broken), "is no report"),
        (("--compare", broken, broken, "--report", tmp_path / "report"), "leave out --report"),
        (("--compare", broken, broken, "--rounds", "3"), "leave out --rounds"),
        ((shipped_bundle, "--compare", broken, broken), "leave out the bundle"),
    ):
        done = run("bench", *arguments)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    with pytest.raises(UsageError, match="not built"):
        ways(shipped, [3])


def test_the_shipped_prompts_are_of_five_workloads() -> None:
    prompts = load(SHIPPED)
    assert {each.workload for each in prompts} == {"chat", "code", "math", "summarization", "support"}
    assert len(load(SHIPPED, each=1)) == 5
