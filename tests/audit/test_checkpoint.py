"""`outrider verify --against`: a bundle's greedy answers beside those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from outrider.audit import checkpoint
from outrider.audit.checkpoint import compare_answers
from outrider.audit.prompts import PROMPTS
from outrider.errors import UsageError
from outrider.runtime.generation import Outrider
from outrider.tests.support import PAIR, run_here


def test_answers_are_those_of_transformers(trained_bundle: Path) -> None:
    done = run_here("verify", trained_bundle, "--against", PAIR / "target", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["passed"], result["differences"]) == (0, True, []), done.stderr
    assert result["compared"] >= 3 * len(PROMPTS)


def test_another_checkpoints_answers_differ(trained_bundle: Path) -> None:
    done = run_here("verify", trained_bundle, "--against", PAIR / "draft")
    assert (done.returncode, "answers    FAIL" in done.stdout) == (1, True), done.stderr
    assert " instead of " in done.stdout


def test_only_a_near_tie_excuses_another_token(trained: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_best(prompt: list[int], _: int) -> list[int]:
        """Return one token, the target's second most likely one."""
        session = trained.sessions["target"]
        for place in range(len(prompt) - 1):
            session.write(np.array([prompt[place : place + 1]]), np.array([place]))
        return [int(np.argsort(session.run(np.array([prompt[-1:]]), np.array([len(prompt) - 1]))[0, -1])[-2])]

    texts = compare_answers(trained, second_best)
    assert (len(texts.differences), texts.near_ties, texts.passed) == (texts.compared, [], False)
    assert {each.place for each in texts.differences} == {0}
    monkeypatch.setattr(checkpoint, "NEAR_TIE", 10.0)
    texts = compare_answers(trained, second_best)
    assert (texts.differences, len(texts.near_ties)) == ([], texts.compared)


def test_quantized_weights_are_refused(trained: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    models = trained.manifest.models
    quantized = msgspec.structs.replace(models["target"], precision="int4")
    monkeypatch.setattr(trained, "manifest", msgspec.structs.replace(trained.manifest, models=models | {"target": quantized}))
    with pytest.raises(UsageError, match="the target is in int4"):
        checkpoint.check_precision(trained)
