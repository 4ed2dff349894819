"""Parallel drafts (PARD) as `export` takes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.bundle.folder import read_manifest
from outrider.errors import SourceError
from outrider.export.pair import export_pair
from outrider.tests.drafts import VOCABULARY, parallel_draft
from outrider.tests.support import PAIR


def test_it_is_recognized_by_its_mask_token(drafter_exports: Callable[[str, str], Path]) -> None:
    models = read_manifest(drafter_exports("fp32", "trained parallel")).models
    assert list(models) == ["target", "draft", "parallel-draft"]
    assert [model.mask_token for model in models.values()] == [None, None, VOCABULARY]


@pytest.mark.parametrize("token", [-1, VOCABULARY, 1.5, "<mask>", None, True])
def test_a_mask_that_is_no_token_is_refused(token: object, tmp_path: Path) -> None:
    draft = parallel_draft(tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": token}))
    with pytest.raises(
        SourceError, match=re.escape(f"draft has the pard_token {token!r}, which is none of its {VOCABULARY:,} tokens")
    ):
        export_pair(str(PAIR / "target"), str(draft), tmp_path / "onnx", precision="fp32")
    assert [each.name for each in tmp_path.iterdir()] == ["draft"]
