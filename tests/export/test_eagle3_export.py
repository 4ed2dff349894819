"""Exports of EAGLE-3 heads: which models they go with, and what is not understood is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from outrider.bundle.folder import read_manifest
from outrider.cli import main
from outrider.errors import OutriderError, SourceError, UnsupportedModelError, UsageError
from outrider.export.checkpoints.source import Source
from outrider.export.heads.eagle3 import Eagle3Checkpoint
from outrider.export.pair import export_pair
from outrider.tests.drafts import WIDTH
from outrider.tests.export.eagle3 import cases
from outrider.tests.export.eagle3.checkpoints import target, write
from outrider.tests.export.head_files import Change
from outrider.tests.support import llama, write_checkpoint


def without(*names: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            (config if name in config else tensors).pop(name)

    return change


def with_key(key: str, value: Any) -> Change:
    return lambda config, tensors: config.update({key: value})


def with_eagle(key: str, value: Any) -> Change:
    return lambda config, tensors: config["eagle_config"].update({key: value})


def with_tensor(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def outside(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = cases.VOCAB


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("safeailab", with_key("norm_after_fc", True), "norm_after_fc = true, which outrider does not know"),
        ("speculators", with_key("parallel_drafting", 4), "parallel_drafting = 4, which outrider does not know"),
        ("speculators", with_tensor("mask_hidden", 1, 1, 96), "the tensor mask_hidden, which outrider does not know"),
        ("safeailab", with_tensor("midlayer.gate.weight", 32), "the tensor layers.0.gate.weight, which"),
        ("modelopt", with_eagle("use_aux_hidden_state", False), "eagle_config.use_aux_hidden_state = False, which"),
        ("modelopt", with_eagle("parallel_draft_step", 4), "eagle_config.parallel_draft_step = 4, which"),
        ("modelopt", with_eagle("a_new_norm", True), "eagle_config.a_new_norm = True, which"),
        ("safeailab", with_key("model_type", "deepseek_v3"), "layers of the type 'deepseek_v3', which"),
        (
            "safeailab",
            with_key("rope_scaling", {"rope_type": "longrope"}),
            "by the length of the text (longrope), which",
        ),
        ("speculators-fc-norm", with_key("fc_norm", False), "the tensor fc_norm.0.weight, which"),
        ("speculators-fc-norm", without("fc_norm.1.weight"), "has no tensor fc_norm.1.weight"),
        ("safeailab", without("midlayer.hidden_norm.weight"), "has no tensor layers.0.hidden_norm.weight"),
        ("safeailab", with_tensor("norm.weight", 31), "norm.weight of head has the shape 31 and not 32"),
        ("safeailab", without("hidden_size"), "missing required field `hidden_size`"),
        ("safeailab", with_tensor("d2t", 39), "d2t of head is not a list of 40 tokens"),
        ("safeailab", outside, "d2t of head is not a list of 40 tokens in ascending order below 96"),
        ("safeailab", without("d2t"), "head proposes 40 of 96 tokens, but has no tensor d2t to name them"),
        ("safeailab", without("fc.weight"), "head has no matrix fc.weight"),
        ("safeailab", with_tensor("fc.weight", 32), "head has no matrix fc.weight"),
        ("safeailab", with_tensor("d2t", 40, 1), "d2t of head is not a list of 40 tokens"),
        ("safeailab", with_tensor("d2t", 40), "d2t of head is not a list of 40 tokens"),  # of floats
        ("safeailab", with_key("hidden_size", "32"), "Expected `int`, got `str` - at `$.hidden_size`"),
        ("safeailab", with_key("num_attention_heads", 3), "q_proj.weight of head has the shape"),
        ("safeailab", with_key("hidden_act", "bogus"), "the configuration of head is impossible: "),
        ("safeailab", with_key("fc_norm", "false"), "Expected `bool | null`, got `str` - at `$.fc_norm`"),
        ("safeailab", with_key("eagle_config", []), "Expected `object | null`, got `array` - at `$.eagle_config`"),
        ("modelopt", with_eagle("eagle_aux_hidden_state_layer_ids", 5), "Expected `array | null`, got `int`"),
        ("speculators", with_key("transformer_layer_config", None), "missing required field `hidden_size`"),
        ("speculators", with_key("speculators_model_type", "medusa"), "speculators_model_type = 'medusa', which"),
        (
            "speculators",
            with_key("speculators_model_type", "peagle"),
            "the speculators_model_type 'peagle' and the mask_token_id None",
        ),
        ("safeailab", with_key("rope_scaling", {"rope_type": "linear", "scale": 2}), "the key scale of a rotary"),
        ("safeailab", with_key("num_hidden_layers", 0), "Expected `int` >= 1 - at `$.num_hidden_layers`"),
        ("specforge-fc-norm", with_key("norm_before_fc", True), "has both fc_norm and norm_before_fc"),
        (
            "safeailab-target-hidden",
            without("embed_tokens.weight"),
            "has no embed_tokens.weight, and the target's",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(name: str, change: Change, says: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", name, change)
    with pytest.raises((UnsupportedModelError, SourceError)) as refused:
        Eagle3Checkpoint.read(Source.parse(str(folder))).build(target(name))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 64}, "its hidden size is 32, and the target's 64"),
        ({"vocab_rows": 128}, "its vocabulary is 96, and the target's 128"),
        ({"layers": 4}, "it reads the inputs of layers [2, 4, 5], and the target has 4 layers"),
    ],
)
def test_a_head_of_another_target_is_refused_with_what_differs(changes: dict[str, int], says: str, tmp_path: Path) -> None:
    checkpoint = Eagle3Checkpoint.read(Source.parse(str(write(tmp_path / "head", "specforge-3.1"))))
    with pytest.raises(UnsupportedModelError) as refused:
        checkpoint.build(target("specforge-3.1", **changes))
    assert says in str(refused.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the shape that the fixtures' heads are for."""
    model = llama(vocab_size=320, hidden_size=32, num_hidden_layers=cases.TARGET_LAYERS)
    return write_checkpoint(tmp_path_factory.mktemp("small") / "target", model)


def of_320(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["vocab_size"] = 320


def test_it_is_exported_beside_a_draft_model(drafter_exports: Callable[[str, str], Path]) -> None:
    manifest = read_manifest(drafter_exports("int4", "random head"))
    assert manifest.roles == ("target", "draft", "head")
    assert [manifest.models[role].features for role in manifest.roles] == [WIDTH, None, WIDTH]
    assert manifest.models["head"].head_tokens == 16


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_one_with_norms_is_exported_in_every_precision(precision: str, small: Path, checkpoints: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", "specforge-fc-norm", of_320)
    drafts = [str(checkpoints / "draft"), str(head)]
    manifest = export_pair(str(small), drafts, tmp_path / "onnx", precision=precision)
    assert manifest == read_manifest(tmp_path / "onnx")
    assert manifest.roles == ("target", "draft", "head")
    assert [manifest.models[role].features for role in manifest.roles] == [32, None, 32]
    assert manifest.models["head"].head_tokens == cases.DRAFT_VOCAB


def test_two_heads_are_refused(small: Path, tmp_path: Path) -> None:
    head = str(write(tmp_path / "head", "specforge", of_320))
    with pytest.raises(UsageError, match="has two drafts of the same kind"):
        export_pair(str(small), [head, head], tmp_path / "onnx", precision="fp32")


def test_a_head_with_another_tokenizer_is_refused(small: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", "specforge", of_320)
    made = json.loads((small / "tokenizer.json").read_text())
    made["added_tokens"][0]["content"] = "<|something else|>"
    (head / "tokenizer.json").write_text(json.dumps(made))
    for name in ("tokenizer_config.json",):
        (head / name).write_text((small / name).read_text())
    with pytest.raises(OutriderError, match="different tokenizers"):
        export_pair(str(small), str(head), tmp_path / "onnx", precision="fp32")


def truncate(head: Path) -> None:
    path = head / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def unknown(head: Path) -> None:
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"a_new_norm": True}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (unknown, "head has a_new_norm = true, which outrider does not know in a draft head"),
        (truncate, "cannot read the weights in "),
        (lambda head: (head / "model.safetensors").unlink(), "head has no weights"),
    ],
    ids=["unknown", "truncated", "no weights"],
)
def test_the_command_line_names_what_is_wrong(damage: Callable[[Path], None], says: str, small: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", "specforge", of_320)
    damage(head)
    done = CliRunner().invoke(main, ["export", "--target", str(small), "--draft", str(head), "-o", str(tmp_path / "onnx")])
    assert (done.exit_code, "Traceback" in done.stderr) == (1, False)
    assert says in done.stderr
    assert done.stderr.count("\nhint:") == 1
    assert not (tmp_path / "onnx").exists()
