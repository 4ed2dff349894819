"""A drafter that is one file (`toy.py`): everything else learns of it from the registry. The golden tests run over it, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.audit.audit import Scope, audit
from outrider.audit.prompts import PROMPTS
from outrider.cli import main
from outrider.runtime import drafters
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.runtime.toy import Repeat


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    drafters.register(Repeat)
    yield
    drafters.unregister(Repeat.name)


@pytest.fixture(scope="module")
def loaded(trained_bundle: Path, registered: None) -> Outrider:
    return Outrider.load(trained_bundle)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_new_tokens=60), SamplingParams(max_new_tokens=60, temperature=0.8, seed=3)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("prompt", ["Once upon a time", "no no no no", "T"])
def test_its_text_is_that_of_plain_decoding(loaded: Outrider, prompt: str, params: SamplingParams) -> None:
    plain = [token for event in loaded.generate(prompt, params, k=0) for token in event.token_ids]
    modes: list[tuple[int | str, str | None]] = [*((k, "repeat") for k in loaded.build.k), ("auto", "repeat"), ("auto", None)]
    for k, drafter in modes:
        events = list(loaded.generate(prompt, params, k=k, drafter=drafter))
        assert [token for event in events for token in event.token_ids] == plain
        if isinstance(k, int):
            assert events[-1].stats.rounds_by_drafter == {"repeat": events[-1].stats.drafting_rounds}


@pytest.mark.slow
def test_it_passes_the_audit_which_finds_a_wrong_sampler(tiny_bundle: Path) -> None:
    scope = Scope(PROMPTS[3:4], (), (), length=32)  # what concerns other drafters has tests of its own
    report = audit(Outrider.load(tiny_bundle), draws=60, scope=scope)
    assert report.greedy.passed
    assert [cell.passed for cell in report.sampled if cell.k == "repeat"] == [True]
    assert [(each.fault, each.passed) for each in report.controls if each.sampled.k == "repeat"] == [
        (None, True),
        ("always accept", True),
    ]


def test_commands_know_it(trained_bundle: Path) -> None:
    arguments = ["generate", str(trained_bundle), "--prompt", "a a a", "--k", "4", "--drafter", "repeat", "--json"]
    done = CliRunner().invoke(main, [*arguments, "--max-new-tokens", "20"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["stats"]["rounds_by_drafter"]["repeat"] > 0
