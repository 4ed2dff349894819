"""Rounds on a device that runs nothing until the host waits: they emit the same tokens, wait once each, and are recorded."""

from __future__ import annotations

import functools
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from outrider.audit.controls import Watch
from outrider.bundle.manifest import Generation
from outrider.errors import EngineError, OutriderWarning
from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.buffers import Lane, Shape
from outrider.runtime.rounds.host_sampler import decide_on_host
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.recording import RECORD_AT
from outrider.runtime.rounds.rounds import Rounds
from outrider.tests.deferred import Deferred, DeferredEngine, deferred
from outrider.tests.support import BROKEN, ROOT, build, llama, reseal, write_checkpoint

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "exact-match": {"temperature": 0.8, "rule": "exact-match"},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {7: 2.0, 9: -100.0}},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "flat": {"temperature": 3.0, "top_p": 0.999},
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair with odd vocabulary sizes, so that rows of logits are not aligned; no token ends the text."""
    folder = tmp_path_factory.mktemp("odd")
    write_checkpoint(folder / "target", llama(seed=0, vocab_size=329))
    write_checkpoint(folder / "draft", llama(seed=1, vocab_size=333, num_hidden_layers=1))
    export_pair(str(folder / "target"), str(folder / "draft"), folder / "onnx", precision="fp32")
    made = build(folder / "onnx", folder / "bundle")
    reseal(made, generation=Generation(eos_token_ids=[], special_tokens={}))
    return made


@pytest.fixture(scope="module")
def synchronous(bundle: Path) -> Outrider:
    return Outrider.load(bundle)


def answer(outrider: Outrider, prompt: Any, k: int, tokens: int = 70, **params: Any) -> list[Any]:
    asked = SamplingParams(**{"max_new_tokens": tokens, "seed": 3, "rule": "rejection", **params})
    events = list(outrider.generate(prompt, asked, k=k))
    logprobs = [each.logprob for event in events for each in event.logprobs or ()]
    return [token for event in events for token in event.token_ids] + [round(value, 4) for value in logprobs]


@pytest.fixture(scope="module")
def expected(synchronous: Outrider) -> Callable[[str, str, int], list[Any]]:
    """The synchronous device's answer with the settings of a name to a prompt, with k."""
    return functools.cache(lambda settings, prompt, k: answer(synchronous, prompt, k, **SETTINGS[settings]))


@pytest.mark.in_turn(
    runs=lambda case: (case["max_candidates"] is None) != (case["settings"] in ("sampled", "exact-match", "flat"))
)
@pytest.mark.parametrize("max_candidates", [None, 256])
@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_of_a_synchronous_device(
    bundle: Path, expected: Callable[[str, str, int], list[Any]], settings: str, max_candidates: int | None
) -> None:
    """Also with a TopK limited to 256 candidates: flatter distributions are decided on the host."""
    queued = deferred(bundle, max_candidates)
    for prompt, k in (("the quick brown fox", 0), ("T", 1), ("the quick brown fox", 4), ("T", 8)):
        assert answer(queued, prompt, k, **SETTINGS[settings]) == expected(settings, prompt, k)


def test_what_the_host_decides_is_what_the_reference_decides(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.audit.controls.CHECKED", 1)
    watch = Watch()
    queued = deferred(bundle, max_candidates=256).observed(watch)
    decided: list[int] = []

    def noted(launches: Launches, row: int, shape: Shape, index: int, lane: Lane) -> None:
        decided.append(row)
        decide_on_host(launches, row, shape, index, lane)

    monkeypatch.setattr("outrider.runtime.rounds.host_sampler.decide_on_host", noted)
    for prompt in ("the quick", [5]):
        answer(queued, prompt, 4, **SETTINGS["flat"])
    assert watch.checked > 100
    assert watch.disagreed == 0
    assert {-1, 0, 1, 2, 3} <= set(decided)  # the verifier, and the drafter in every row


def device_of(outrider: Outrider) -> Deferred:
    device = outrider.rounds.device
    assert isinstance(device, Deferred)
    return device


def test_a_recorded_round_is_one_launch_and_one_wait(bundle: Path) -> None:
    queued = deferred(bundle)
    device = device_of(queued)
    for _ in range(RECORD_AT):
        answer(queued, "the quick", 4, tokens=40)
    recorded, waits, replayed = device.recorded, device.waits, device.replayed
    events = list(queued.generate("the quick", SamplingParams(max_new_tokens=40), k=4))
    assert device.recorded == recorded  # nothing new to record: the same shapes
    assert device.replayed - replayed == len(events)
    prefill = 2 + 2 * -(-len(queued.text.encode("the quick", chat=False)) // queued.build.max_prompt_chunk)
    assert device.waits - waits <= len(events) + prefill


def test_each_k_and_window_is_recorded_once(bundle: Path) -> None:
    queued = deferred(bundle)
    device = device_of(queued)
    for k in (1, 4) * 2:
        answer(queued, "the quick", k, tokens=100)
    shapes = {segment.shape for segment in queued.rounds.recorder.recorded}
    assert device.recorded == len(shapes)
    assert {shape.drafted for shape in shapes if shape.rows == 5} >= {4}
    assert {shape.window for shape in shapes} == {64, 128}


def test_rounds_that_cannot_be_recorded_run_as_launches_with_one_warning_each(bundle: Path, synchronous: Outrider) -> None:
    queued = deferred(bundle)
    device_of(queued).refusal = "operation not permitted when stream is capturing"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert answer(queued, "the quick", 4, tokens=30) == answer(synchronous, "the quick", 4, tokens=30)
    messages = [str(each.message) for each in caught if issubclass(each.category, OutriderWarning)]
    assert messages
    assert len(messages) == len(queued.rounds.recorder.recorded)
    assert "runs as plain launches: operation not permitted when stream is capturing" in messages[0]


def test_a_replay_with_other_results_is_not_used(bundle: Path, synchronous: Outrider) -> None:
    queued = deferred(bundle)
    rounds = queued.rounds

    def spoil() -> None:
        rounds.launches.outputs.host["tokens"][0] = 77

    device_of(queued).spoil = spoil
    with pytest.warns(OutriderWarning, match="the recorded round gave a different result"):
        assert answer(queued, "the quick", 4, tokens=30) == answer(synchronous, "the quick", 4, tokens=30)


def test_engines_that_must_not_be_recorded_are_not(
    bundle: Path, synchronous: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeferredEngine, "recordable", False)
    queued = deferred(bundle)
    assert answer(queued, "the quick", 4) == answer(synchronous, "the quick", 4)
    assert device_of(queued).recorded == 0


def test_a_round_is_recorded_when_its_shape_comes_for_the_third_time(bundle: Path) -> None:
    queued = deferred(bundle)
    device = device_of(queued)
    for recorded in (0, 0, 1, 1):
        list(queued.generate([5, 6], SamplingParams(max_new_tokens=1), k=0))
        assert device.recorded == recorded
    assert device.replayed == 2  # once to check it, once in place of launches


def test_the_rounds_used_least_recently_make_room(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runtime.rounds.recording.MAX_RECORDED", 2)
    queued = deferred(bundle)
    device = device_of(queued)

    def replays(**params: Any) -> int:
        before = device.replayed
        list(queued.generate([5, 6], SamplingParams(max_new_tokens=1, **params), k=0))
        return device.replayed - before

    greedy, sampled, scored = dict[str, Any](), {"temperature": 1.0, "seed": 1}, {"logprobs": 2}
    for params in (greedy, greedy, greedy, sampled, sampled, sampled, greedy, scored, scored, scored):
        replays(**params)
    assert device.recorded == 3
    assert [replays(**params) for params in (greedy, scored, sampled)] == [1, 1, 0]


def test_logits_with_nan_stop_the_request(broken_bundle: Path) -> None:
    queued = deferred(broken_bundle)
    with pytest.raises(EngineError, match="contain NaN or infinity"):
        list(queued.generate([5, BROKEN, 9], SamplingParams(max_new_tokens=4), k=4))
    assert all(np.isfinite(values).all() for session in queued.sessions.values() for values in session.cache().values())
    assert answer(queued, [5, 9], 4, tokens=9) == answer(Outrider.load(broken_bundle), [5, 9], 4, tokens=9)


def test_rounds_up_to_the_last_cache_position(bundle: Path, synchronous: Outrider, tmp_path: Path) -> None:
    queued = deferred(Path(shutil.copytree(bundle, tmp_path / "copy")))
    for k in (1, 8):
        full = answer(queued, "the quick", k, tokens=500)
        assert full == answer(synchronous, "the quick", k, tokens=500)
        assert len(full) == queued.build.capacity + 1 - len(queued.text.encode("the quick", chat=False))


@pytest.mark.parametrize("drafter", ["model", "head"])
def test_a_round_is_read_in_six_files_of_900_lines(
    drafter_bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Buffers and drafter included. What engines do is behind a `Launch`, in four more files, which take in nothing else."""
    outrider, run = Outrider.load(drafter_bundles("fp32", "trained head")), Rounds.run
    files: set[Path] = set()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_globals.get("__name__", "").startswith("outrider."):
            files.add(Path(frame.f_code.co_filename).resolve())

    def traced(*arguments: Any, **named: Any) -> Any:
        sys.settrace(trace)
        try:
            return run(*arguments, **named)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(Rounds, "run", traced)
    list(outrider.generate("the quick", SamplingParams(temperature=1.0, max_new_tokens=40), k=4, drafter=drafter))
    written = [file for file in files if file.suffix == ".py"]  # not what dataclasses generate
    lines = {file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines()) for file in written}
    of_round = {path: count for path, count in lines.items() if path.startswith("runtime/")}
    assert {f"runtime/rounds/{name}.py" for name in ("rounds", "launches", "buffers", "sampling")} < set(of_round)
    assert "runtime/drafters/step.py" in of_round
    assert len(of_round) <= 6
    assert sum(of_round.values()) <= 900, of_round
    of_engines = {path: count for path, count in lines.items() if path not in of_round}
    assert {*of_engines} == {f"engines/{name}.py" for name in ("device", "graph_session", "session")} | {
        "backends/onnxruntime/engine.py"
    }
    assert sum(of_engines.values()) <= 1100, of_engines
