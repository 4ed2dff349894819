"""Odd values in the files of a checkpoint: each is read, or refused in one line with a hint, before anything is traced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.export.arguments import ExportArguments
from outrider.export.pair import export
from outrider.progress import Progress
from outrider.tests.drafts import plain_block_head, random_block_head, random_head, random_parallel_head
from outrider.tests.export import gguf_files, mtp_heads
from outrider.tests.support import END, PAIR, llama, write_checkpoint

HUGE = 2**40
ODD = [None, "text", "", -1, 0, 1, 7, 1.5, HUGE, 2**70, True, False, [], [1], ["a"], [[1]], [None], {}, {"a": 1}, "\ud800"]
ODD.append(float("nan"))
FILES = ("", "{", "null", "[]", "1", '"x"', "{}", "[" * 100_000, '{"a": "\\ud800"}', '{"weight_map": {"mtp.fc.weight": 5}}')
READ = "read"
TOKEN = {"content": END, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
HERE = "{{ messages[0].content }}"


class Traced(Exception):
    """Nothing was wrong before tracing."""


class UntilTraced(Progress):
    """Ends an export where it would trace."""

    def stage(self, name: str, total: int | None = None) -> None:
        if name.startswith("tracing"):
            raise Traced


def outcome(folder: Path, target: Path, *drafts: Path) -> str:
    """What an export says about its checkpoints: its error, or that they are read."""
    try:
        arguments = ExportArguments.check(str(target), [*map(str, drafts)], folder / "onnx", precision="fp32")
        with pytest.raises(Traced):
            export(arguments, UntilTraced())
    except OutriderError as error:
        lines = [str(error), error.hint]
        assert all(line and len(line.splitlines()) == 1 for line in lines), lines
        return lines[0]
    return READ


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", llama(num_hidden_layers=1))


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def given(kind: str, **entries: Any) -> dict[str, Any]:
    return {"rope_parameters": ROPE | {"rope_type": kind} | entries}


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("config.json", {"text_config": "text"}, "the text_config of model is 'text', not a configuration"),
        ("config.json", {"text_config": {"a": 1}}, "not a configuration"),
        ("config.json", {"num_hidden_layers": HUGE}, "num_hidden_layers = 1,099,511,627,776; the most is 65,536"),
        ("config.json", {"id2label": {"num_labels": HUGE}}, "num_labels = 1,099"),
        ("config.json", {"architectures": ["\ud800"]}, "surrogates not allowed"),
        ("config.json", given("linear", original_max_position_embeddings="64"), "original_max_position_embeddings = '64'"),
        ("config.json", given("yarn", factor=float("inf")), "factor = inf"),
        ("config.json", given("dynamic", original_max_position_embeddings=[1]), r"embeddings = \[1\]"),
        ("config.json", {"quantization_config": {"quant_method": ["awq"]}}, r"quant_method of model is \['awq'\], not a name"),
        ("generation_config.json", {"eos_token_id": "<|im_end|>"}, "texts of .*model end with '<|im_end|>'"),
        ("generation_config.json", {"eos_token_id": [0, None]}, "end with None"),
        ("generation_config.json", {"eos_token_id": True}, "end with True"),
        ("generation_config.json", {"eos_token_id": 1.5}, "end with 1.5"),
        ("generation_config.json", {"eos_token_id": 2**70}, r"ends texts with token 1\d+ "),
        ("tokenizer_config.json", {"eos_token": "<new>"}, "321 tokens but only 320 rows of logits"),
        ("tokenizer_config.json", {"chat_template": HERE + "\ud800"}, "the chat template of model is .*, not text"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": None}]}, "is None, not text"),
        ("chat_template.json", {"chat_template": [HERE]}, "not text"),
        ("special_tokens_map.json", {"eos_token": 5}, READ),  # tokenizer_config.json counts
        ("added_tokens.json", {"<y>": 5}, "321 tokens but only 320 rows of logits"),
    ],
)
def test_an_odd_value_is_refused_by_name(model: Path, tmp_path: Path, name: str, changes: dict[str, Any], problem: str) -> None:
    changed(model / name, **changes)
    assert re.search(problem, outcome(tmp_path, model))


@pytest.mark.parametrize("at", [2**24, 2**31])
def test_a_token_with_an_id_far_beyond_the_others_is_refused(model: Path, tmp_path: Path, at: int) -> None:
    tokens = json.loads((model / "tokenizer.json").read_text())["model"]
    changed(model / "tokenizer.json", model=tokens | {"vocab": tokens["vocab"] | {"zzz": at}})
    assert f"gives the token 'zzz' the id {at:,}" in outcome(tmp_path, model)


def test_a_tokenizer_on_which_rust_panics_is_refused(model: Path, tmp_path: Path) -> None:
    tokens = json.loads((model / "tokenizer.json").read_text())["model"]
    changed(model / "tokenizer.json", model=tokens | {"continuing_subword_prefix": "text"})
    assert "cannot read the tokenizer of model: range end index" in outcome(tmp_path, model)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"draft_vocab_size": HUGE}, "is not a list of 1,099,511,627,776 tokens"),
        ({"num_hidden_layers": HUGE}, "num_hidden_layers = 1,099"),
        ({"head_dim": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_an_odd_value_of_a_head_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    head = random_head(tmp_path / "head")
    changed(head / "config.json", **changes)
    assert re.search(problem, outcome(tmp_path, PAIR / "target", head))


@pytest.mark.parametrize("key", ["quantization_config", "mtp_layer_types"])
def test_an_odd_value_of_a_targets_own_head_is_refused(tmp_path: Path, key: str) -> None:
    folder = mtp_heads.write_with_head(tmp_path / "model", mtp_heads.OF_DEEPSEEK["GLM-4.5"], of_qwen=False)
    changed(folder / "config.json", **{key: 5, "layer_types": ["full_attention"] * mtp_heads.LAYERS})
    assert re.search("model", outcome(tmp_path, folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", [1]), ("block_count", 2**31), ("nextn_predict_layers", "text"), ("context_length", "text")],
)
def test_odd_metadata_of_a_gguf_file_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    gguf_files.write(tmp_path / "m.gguf", metadata={key: value})
    assert "m.gguf" in outcome(tmp_path, tmp_path / "m.gguf")


Change = Callable[[Path], object]


def writing(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def sweep(name: str, base: dict[str, Any], *inside: str) -> Iterator[Change]:
    """Every odd value of every entry of a file that is an object in JSON, or of the objects inside it that are named."""
    outer = dict(base)
    for key in inside:
        base = base.get(key) or {}
    for key, value in ((key, value) for key in base for value in ODD):
        made: Any = base | {key: value}
        for around in reversed(inside):
            made = {around: made}
        yield writing(name, json.dumps(outer | made))


KEYS_OF_CONFIG = (
    *("text_config", "quantization_config", "rope_scaling", "sliding_window", "layer_types", "pard_token", "auto_map"),
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "draft_vocab_size", "is_encoder_decoder", "num_labels", "id2label"),
)
KEYS_OF_TOKENIZER = (
    "bos_token",
    "pad_token",
    "chat_template",
    "model_max_length",
    "added_tokens_decoder",
    "extra_special_tokens",
)


def changes_of_model(model: Path) -> Iterator[Change]:
    config, tokens = (json.loads((model / name).read_text()) for name in ("config.json", "tokenizer.json"))
    yield from sweep("config.json", dict.fromkeys(KEYS_OF_CONFIG) | config)
    for kind in ("yarn", "linear", "dynamic", "llama3", "longrope"):
        yield from sweep("config.json", config | given(kind), "rope_parameters")
    for method in ("gptq", "awq", "fp8", "mxfp4", "compressed-tensors", "auto-round"):
        of_method = {"quant_method": method, "bits": 4, "group_size": 32, "weight_block_size": [2, 2]}
        yield from sweep("config.json", config | {"quantization_config": of_method}, "quantization_config")
    ends = ("eos_token_id", "bos_token_id", "temperature", "max_length", "do_sample", "stop_strings")
    yield from sweep("generation_config.json", dict.fromkeys(ends))
    of_tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    yield from sweep("tokenizer_config.json", dict.fromkeys(KEYS_OF_TOKENIZER) | of_tokenizer)
    yield from sweep("tokenizer_config.json", of_tokenizer | {"eos_token": TOKEN | {"__type": "AddedToken"}}, "eos_token")
    added = of_tokenizer | {"added_tokens_decoder": {"3": TOKEN}}
    yield from sweep("tokenizer_config.json", added, "added_tokens_decoder", "3")
    yield from sweep("special_tokens_map.json", dict.fromkeys(("eos_token", "pad_token", "additional_special_tokens")))
    yield from sweep("added_tokens.json", dict.fromkeys(("<y>", "", END)))
    yield from sweep("chat_template.json", {"chat_template": HERE})
    yield from sweep("tokenizer.json", tokens)
    yield from sweep("tokenizer.json", tokens, "model")
    texts = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json")
    for name in (*texts, "added_tokens.json", "chat_template.json", "chat_template.jinja", "model.safetensors.index.json"):
        for text in FILES:
            yield writing(name, text)


def check_all(folder: Path, changes: Callable[[Path], Iterator[Change]], target: Path | None = None) -> None:
    """Export the checkpoint with each of the changes."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for change in changes(folder):
        change(folder)
        outcome(folder.parent, target or folder, *([] if target is None else [folder]))
        for path in folder.iterdir():
            if path not in before:
                path.unlink()
            elif path.suffix == ".json":
                path.write_bytes(before[path])


@pytest.mark.slow
def test_every_odd_value_of_a_model(model: Path) -> None:
    check_all(model, changes_of_model)


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_head, random_parallel_head, random_block_head, plain_block_head])
def test_every_odd_value_of_what_drafts(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    def changes(folder: Path) -> Iterator[Change]:
        config = json.loads((folder / "config.json").read_text())
        keys = ("rope_scaling", "rope_parameters", "sliding_window", "layer_types", "target_hidden_size", "norm_before_fc")
        yield from sweep("config.json", dict.fromkeys(keys) | config)
        for inner in {"transformer_layer_config", "eagle_config"} & config.keys():
            yield from sweep("config.json", config, inner)
        for text in FILES:
            yield writing("model.safetensors.index.json", text)

    check_all(make(tmp_path / "draft"), changes, PAIR / "target")
