"""Checkpoints in formats that are not read are refused by the format's name, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.tests.export.refused_formats import REFUSED
from outrider.tests.support import llama, run_here, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("refused") / "model", llama(num_hidden_layers=1))


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": REFUSED[name]}))
    done = run_here("export", "--target", folder, "--draft", "none", "-o", tmp_path / "onnx")
    assert done.returncode == 1
    assert f"model is quantized by {name.split(',')[0]}" in done.stderr
    assert "which is not read" in done.stderr
    assert "export the checkpoint that it was made from, or a GGUF file of it" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == []
