"""A bundle with only a target: drafts come from the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.audit.audit import CONTROLLED, MASKED, Scope, audit
from outrider.audit.prompts import PROMPTS
from outrider.bundle.folder import read_manifest
from outrider.errors import UsageError
from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.support import PAIR, bench_once, build, run_here

PROMPT = "Agent: What time? Customer: At six. " * 2


@pytest.fixture(scope="module")
def bundle(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    done = run_here("export", "--target", checkpoints / "target", "-o", folder / "onnx")
    assert done.returncode == 0, done.stderr
    return build(folder / "onnx", folder / "bundle", capacity=159, batch=2, k=[1, 4, 8])


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Outrider:
    return Outrider.load(bundle)


def tokens(outrider: Outrider, **options: Any) -> list[int]:
    drafting = {name: options.pop(name) for name in ("k", "drafter") if name in options}
    params = SamplingParams(**{"max_new_tokens": 60, **options})
    return [token for event in outrider.generate(PROMPT, params, **drafting) for token in event.token_ids]


def test_the_bundle_has_no_part_of_a_draft(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.roles == ("target",)
    assert not any("draft" in name for name in manifest.files)
    shown = run_here("inspect", bundle)
    assert shown.returncode == 0, shown.stderr
    assert "draft" not in shown.stdout.replace(str(bundle), "")


SEEDED = {"temperature": 0.8, "seed": 5}


MODES: list[dict[str, Any]] = [{}, {"k": 4}, {"k": 8, "drafter": "ngram"}, {"drafter": "auto"}]


@pytest.mark.parametrize("params", [{}, SEEDED, SEEDED | {"rule": "rejection"}], ids=str)
def test_its_text_is_that_of_plain_decoding_and_of_the_pair(alone: Outrider, tiny: Outrider, params: dict[str, Any]) -> None:
    plain = tokens(alone, k=0, **params)
    assert tokens(tiny, k=0, **params) == plain
    for mode in MODES:
        assert tokens(alone, **mode, **params) == plain, mode


def test_drafted_tokens_come_from_the_text(alone: Outrider) -> None:
    stats = list(alone.generate(PROMPT, SamplingParams(max_new_tokens=60), k=4))[-1].stats
    assert stats.rounds_by_drafter["ngram"] == stats.drafting_rounds > 0
    assert stats.accepted > 0


def test_a_missing_draft_model_is_refused(alone: Outrider, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no draft model"):
        alone.generate(PROMPT, drafter="model")
    for command, missing in (
        (("generate", bundle, "--prompt", "x", "--drafter", "model"), "has no draft model"),
        (("plan", bundle, "--rate", "0.5"), "has no model or head that drafts"),
    ):
        done = run_here(*command)
        assert (done.returncode, missing in done.stderr) == (2, True)
    with pytest.raises(UsageError, match="--draft-vocab needs a draft"):
        text = tmp_path / "text"
        text.write_text("the")
        export_pair(str(PAIR / "target"), None, tmp_path / "x", precision="fp32", draft_vocab=99, draft_vocab_text=text)


def test_every_k_of_the_ngram_drafter_is_measured(bundle: Path, tmp_path: Path) -> None:
    results = bench_once(bundle, PROMPT, tmp_path)
    assert [mode.label for mode in results.modes[1:-1]] == [f"n-gram, k = {k}" for k in (1, 4, 8)]
    assert results.drafts == []
    assert "| n-gram, k = 8 |" in (tmp_path / "report" / "bench.md").read_text()


@pytest.mark.slow
def test_it_passes_the_audit(bundle: Path) -> None:
    scope = Scope(PROMPTS[:2], MASKED[:1], (CONTROLLED,), length=32)
    report = audit(Outrider.load(bundle, slots=None), draws=60, scope=scope)
    assert report.passed
    assert [(each.sampled.k, each.fault) for each in report.controls] == [("ngram", None), ("ngram", "always accept")]
    assert report.batched is not None
    assert report.batched.compared == 5 * 3  # plain, by n-grams, and at random
    assert report.counters.accepted > 0
