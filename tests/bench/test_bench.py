"""`outrider bench`: what it measures and counts, and how its results are read back and compared."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean

import msgspec
import numpy as np
import pytest

from outrider.bench.measure import measure, trace
from outrider.bench.planner import tokens_per_round
from outrider.bench.report import assessment, markdown
from outrider.bench.results import DECODING, FIRST_TOKEN, SCHEMA, WHOLE, Mode, Percentiles, Results, changes, read
from outrider.bench.simulator import Trace, regrets
from outrider.bench.summary import AnswerSummary
from outrider.builder.workloads import SHIPPED, Prompt, load
from outrider.errors import UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.policy.choice import AUTO, NONE
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.stats import Stats
from outrider.tests.support import run_here

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


def cut(text: Trace, k: int, piece: int) -> list[tuple[int, int]]:
    """Return the drafted and accepted tokens of each drafting round of a recorded text. Plain rounds come before the first one,
    while the draft reads the prompt but its last two tokens."""
    at, rounds = 1, []
    while len(text.prompt) - 2 + at > at * piece:
        at += 1
    while at < len(text.tokens):
        drafted = min(k, text.remaining(at) - 1)
        accepted = text.accepted("model", at, drafted)
        rounds += [(drafted, accepted)] if drafted else []
        at += accepted + 1
    return rounds


def test_acceptance_of_the_rounds_is_that_of_the_recorded_texts(results: Results, trained: Outrider) -> None:
    """Acceptance is counted twice: by the rounds, and by reading the finished text once with the draft."""
    costs = RoundCosts(trained.manifest, trained.build)
    assert [len(each.tokens) < each.most for each in results.traces] == [False, False, False, True]
    assert ["model@16" in each.agrees for each in results.traces] == [len(each.prompt) > 16 for each in results.traces]
    for workload in results.workloads:
        texts = [each for each in results.traces if each.workload == workload]
        for k in (1, 2, 4, 8):
            summary = results.summary(workload, Mode(drafter="model", k=k))
            rounds = [each for text in texts for each in cut(text, k, costs.piece("model", len(text.prompt)))]
            assert summary.acceptance_histogram == [2 * sum(a == at for _, a in rounds) for at in range(k + 1)]
            counts = [(sum(a > at for _, a in rounds), sum(drafted > at for drafted, _ in rounds)) for at in range(k)]
            assert summary.per_position_rates == [accepted / drafted for accepted, drafted in counts]
            assert summary.mean_acceptance_length == pytest.approx(tokens_per_round(costs, "model", texts, k))
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
    assert (
        recorded.agrees.keys() == recorded.confidences.keys() == {"model", "model@16"}
    )  # other windows are longer than the prompt
    assert recorded.agrees["model"] == [int(row.argmax()) == token for row, token in zip(logits, (5, 6, 7), strict=True)]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(recorded.confidences["model"], shares.max(-1) / shares.sum(-1), atol=1e-3)


def test_times_between_tokens_are_zero_within_a_round() -> None:
    answer = AnswerSummary([1, 2, 3, 4, 5, 6], 1.0, [(0.5, 2), (0.7, 1), (1.3, 3)], Stats())
    assert answer.gaps == pytest.approx([0, 0.2, 0.6, 0, 0])
    assert answer.per_token == pytest.approx(0.8 / 4)
    assert Percentiles.of([0.001 * each for each in range(1, 101)]).p90 == pytest.approx(91)


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
    for workload, whole, whole_over_fixed, alone, alone_over_fixed, lowest, highest in assessment(results):
        auto = results.summary(workload, Mode(drafter=AUTO, k=AUTO))
        for shown, chosen in ((whole, auto.whole_speedup), (alone, auto.speedup)):
            assert shown == f"{np.median(chosen):.2f} ({min(chosen):.2f}-{max(chosen):.2f})"
        assert " of " in whole_over_fixed
        assert " of " in alone_over_fixed
        assert float(lowest.split()[0]) <= float(highest.split()[0])
    assert "| plain |" in markdown(results)


def test_a_comparison_calls_a_mode_better_if_no_earlier_round_was_as_fast(results: Results, tmp_path: Path) -> None:
    def scaled(factor: float) -> Results:
        faster = [
            msgspec.structs.replace(
                each,
                whole_speedup=[factor * speed for speed in (*each.whole_speedup, 0.5, 0.6, 0.7)],
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
    assert units == {(True, "tokens/s"), (True, "ms to the first token"), (False, WHOLE), (False, DECODING)}
    page = run_here("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json").stdout
    assert "better" in page
    assert f"before: {tmp_path / 'a.json'}" in page
    assert "by chance alone, 0.2 of these 28" in " ".join(page.split())


def test_a_slower_machine_does_not_make_drafting_worse(results: Results) -> None:
    """Everything at half the speed, plain decoding, too; and prompts are read as fast as before."""

    def repeated(factor: float) -> Results:
        each_round = [
            msgspec.structs.replace(
                each,
                whole_speedup=[each.whole_speedup[0]] * 5,
                tokens_per_second=[factor * each.tokens_per_second[0]] * 5,
                speedup=[each.speedup[0]] * 5,
            )
            for each in results.summaries
        ]
        texts = [msgspec.structs.replace(each, first_token=[each.first_token[0]] * 5) for each in results.texts]
        return msgspec.structs.replace(results, summaries=each_round, texts=texts)

    verdicts = {(each.unit, each.verdict) for each in changes(repeated(1), repeated(0.5))}
    alike = {(unit, "within the noise") for unit in (WHOLE, DECODING, FIRST_TOKEN)}
    assert verdicts == alike | {("tokens/s", "worse")}


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


def test_the_shipped_prompts_are_of_five_workloads() -> None:
    prompts = load(SHIPPED)
    assert {each.workload for each in prompts} == {"chat", "code", "math", "summarization", "support"}
    assert len(load(SHIPPED, each=1)) == 5
