"""`export` with int4 and int8: what it says and refuses, and what AutoRound gains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto
from transformers import LlamaForCausalLM

from outrider.bundle.folder import read_manifest
from outrider.errors import ParityError, UsageError
from outrider.export.pair import export_pair
from outrider.tests.support import PAIR, SHIPPED, llama, run_here, write_checkpoint


def test_a_collapse_is_refused_with_the_figures(tmp_path: Path) -> None:
    """The shipped draft, with one input of each block a thousand times smaller and its weights a thousand times larger."""
    model = LlamaForCausalLM.from_pretrained(PAIR / "draft", dtype=torch.float32)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight.data[::32] /= 1000
            for reader in readers:
                reader.weight.data[:, ::32] *= 1000
    spoiled = Path(shutil.copytree(PAIR / "draft", tmp_path / "spoiled"))
    model.save_pretrained(spoiled)
    refused = r"to int4 loses too much: perplexity on held-out text is \d.*, compared with 181\.5 in fp32, and the limit is 272"
    with pytest.raises(ParityError, match=refused) as caught:  # before quantization, the model is intact
        export_pair(str(spoiled), str(spoiled), tmp_path / "out", precision="int4")
    assert "--precision int8" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["spoiled"]


def test_weights_with_nan_fail_the_export(checkpoints: Path, tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    model.model.layers[0].mlp.up_proj.weight.data[3, 3] = float("nan")
    write_checkpoint(tmp_path / "target", model)
    with pytest.raises(ParityError, match="nan"):
        export_pair(str(tmp_path / "target"), str(checkpoints / "draft"), tmp_path / "onnx", precision="int4")


def test_what_export_says(tmp_path: Path) -> None:
    """For a pair with a layer of 48 inputs, and with heads that are not those of the default."""
    model = write_checkpoint(tmp_path / "model", llama(hidden_size=64, num_hidden_layers=1))
    precisions = ["--precision", "int8", "--head-precision", "int4"]
    done = run_here("export", "--target", model, "--draft", model, "-o", tmp_path / "int8", *precisions)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("int8 (head int4); logits within") == 2
    manifest = read_manifest(tmp_path / "int8")
    for role in manifest.roles:
        graph = onnx.load(tmp_path / "int8" / role / "model.onnx", load_external_data=False).graph
        kinds = [tensor.data_type for tensor in graph.initializer if tensor.name.endswith("quantized")]
        assert sorted(kinds) == sorted([TensorProto.INT8] * 6 + [TensorProto.INT4])  # six of the layer, and the head
    assert "draft: perplexity 3" in done.stdout  # 320 tokens, all about equally likely
    assert "target: 3,072 weights stay in fp32" in done.stdout
    assert "the first is model.layers.0.mlp.down_proj.weight" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16", "head_precision": "int8"}, "--head-precision cannot be used with --precision fp16"),
        ({"precision": "fp32", "method": "rtn"}, "--method cannot be used with --precision fp32"),
        ({"group_size": 64}, "--group-size cannot be used without --precision"),
        ({"precision": "fp32", "calibration": Path("x")}, "--calibration cannot be used with --precision fp32"),
        ({"precision": "int4", "method": "auto-round"}, "--method auto-round and --calibration go together"),
        ({"precision": "int4", "calibration": Path("x")}, "--method auto-round and --calibration go together"),
        ({"precision": "int8", "method": "auto-round", "calibration": Path("x")}, "auto-round is for --precision int4"),
        ({"precision": "int4", "method": "auto-round", "calibration": Path("/no/such")}, "cannot read /no/such"),
    ],
)
def test_contradicting_options_are_wrong_use(checkpoints: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export_pair(str(checkpoints / "target"), str(checkpoints / "draft"), tmp_path / "onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_text_that_is_too_short_is_wrong_use(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("too short")
    sources = (str(checkpoints / "target"), str(checkpoints / "draft"), tmp_path / "out")
    with pytest.raises(UsageError, match="the calibration text has 9 tokens, but needs at least 2,048"):
        export_pair(*sources, precision="int4", method="auto-round", calibration=tmp_path / "text")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_auto_round_is_closer_to_the_checkpoint(tmp_path: Path) -> None:
    """The draft's first layer, with a context of 64 tokens, which is as many as it is tuned on at a time."""
    pytest.importorskip("auto_round", reason="would show that AutoRound helps: pip install 'outrider[quantize]'")
    draft = Path(shutil.copytree(PAIR / "draft", tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64, "num_hidden_layers": 1}))
    tuned = export_pair(
        str(draft), None, tmp_path / "tuned", precision="int4", method="auto-round", calibration=SHIPPED / "heldout.jsonl"
    ).models["target"]
    plain = export_pair(str(draft), None, tmp_path / "plain", precision="int4").models["target"]
    assert tuned.quantization is not None
    assert tuned.quantization.method == "auto-round"
    assert tuned.parity.perplexity is not None
    assert plain.parity.perplexity is not None
    assert tuned.parity.perplexity < plain.parity.perplexity
