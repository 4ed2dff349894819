"""A draft that proposes only some tokens, which costs acceptance and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from outrider.backends.open import open_bundle, open_engines
from outrider.bundle.folder import read_manifest
from outrider.errors import UsageError
from outrider.export.heads.short_head import frequent_tokens
from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.drafts import VOCABULARY
from outrider.tests.support import PAIR, SHIPPED, TEXT, build, run_here, tokenizer

COUNT = 600


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text like the shipped pair's own."""
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text((SHIPPED / "README.md").read_text() + "Customer: I would like to book a table for two.\nAgent: Sure! " * 20)
    return path


@pytest.fixture(scope="module", params=[pytest.param("fp32", marks=pytest.mark.slow), "int4"])
def bundle(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    export_pair(
        str(PAIR / "target"),
        str(PAIR / "draft"),
        folder / "onnx",
        precision=request.param,
        draft_vocab=COUNT,
        draft_vocab_text=text,
    )
    return build(folder / "onnx", folder / "bundle")


def test_the_text_is_that_of_plain_decoding_and_drafts_use_the_short_vocabulary(bundle: Path, text: Path) -> None:
    manifest = read_manifest(bundle)
    assert (manifest.models["draft"].head_tokens, manifest.models["target"].head_tokens) == (COUNT, None)
    kept = set(frequent_tokens((PAIR / "draft" / "tokenizer.json").read_text(), text, COUNT, VOCABULARY, [0]).tolist())
    outrider = Outrider.load(bundle)
    for params in (
        SamplingParams(max_new_tokens=60),
        SamplingParams(max_new_tokens=60, temperature=0.8, seed=3, rule="exact-match"),
    ):
        answers: dict[int, list[int]] = {}
        for k in (0, 1, 4, 8):
            answers[k] = []
            for event in outrider.generate("Customer: Hi, I would like", params, k=k):
                answers[k] += event.token_ids
                drafted = [token for token, ours in zip(event.token_ids, event.from_draft, strict=True) if ours]
                assert set(drafted) <= kept
        assert answers[1] == answers[4] == answers[8] == answers[0]
        assert event.stats.accepted > 10


def test_logits_of_all_other_tokens_are_minus_infinity(bundle: Path) -> None:
    session = open_engines(bundle, *open_bundle(bundle)).session("draft", batch=1)
    logits = session.run(np.array([[5, 9]]), np.array([0]))
    assert (np.isfinite(logits).sum(-1) == COUNT).all()
    assert np.isneginf(logits).sum() == 2 * (VOCABULARY - COUNT)
    assert session.skips_logits


def test_the_most_frequent_tokens_come_first_then_the_lowest(tmp_path: Path) -> None:
    made: Tokenizer = tokenizer()
    (tmp_path / "text").write_text(TEXT[0] * 3)
    ids = made.encode(TEXT[0] * 3).ids
    found = frequent_tokens(made.to_str(), tmp_path / "text", len(set(ids)) + 3, 320, [0]).tolist()
    assert found == sorted(found)
    assert {0, *ids} <= set(found)
    assert len(found) == len(set(ids)) + 3
    few = frequent_tokens(made.to_str(), tmp_path / "text", 2, 320, [319]).tolist()
    assert 319 in few


@pytest.mark.parametrize("count", [0, 1, 320, -3])
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, count: int) -> None:
    (tmp_path / "text").write_text("the")
    with pytest.raises(UsageError, match="does not fit a vocabulary of 320"):
        frequent_tokens(tokenizer().to_str(), tmp_path / "text", count, 320, [0])


def test_wrong_use_is_one_line(checkpoints: Path, tmp_path: Path) -> None:
    pair = ("export", "--target", checkpoints / "target", "--draft", checkpoints / "draft", "-o", tmp_path / "out")
    for options, message in (
        (("--draft-vocab", "100"), "--draft-vocab and --draft-vocab-text go together"),
        (("--draft-vocab", "100", "--draft-vocab-text", tmp_path / "none"), "cannot read"),
    ):
        done = run_here(*pair, *options)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.iterdir())
