"""Checkpoints in formats that are not read are refused by the format's name, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.tests.support import llama, run_here, write_checkpoint

METHODS = (
    *("aqlm", "bitnet", "bitsandbytes", "eetq", "exl2", "exl3", "fouroversix", "fp_quant", "gemma", "higgs", "hqq", "marlin"),
    *("metal", "nvfp4", "quanto", "quark", "quip", "sinq", "spqr", "torchao", "vptq"),
)
REFUSED: dict[str, dict[str, Any]] = {
    **{name: {"quant_method": name, "bits": 4, "group_size": 64} for name in METHODS},
    "bitsandbytes, without its name": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "MLX": {"group_size": 64, "bits": 4, "mode": "affine"},
    "auto-round (auto_round:llm_compressor)": {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
    "auto-round, with integers of inputs": {"quant_method": "auto-round", "packing_format": "auto_round", "act_bits": 8},
    "auto-round, of floats": {"quant_method": "auto-round", "packing_format": "auto_round", "data_type": "mx_int"},
    "auto-round, with rotated inputs": {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "rotation_config": {"block_size": 32},
    },
    "a method of later years": {"quant_method": "a method of later years"},
}


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
