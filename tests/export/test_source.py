"""Folders, hub ids and GGUF files are read; damaged checkpoints are refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    PreTrainedModel,
)

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model, open_model, read_config
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.heads.head_tensors import load_tensors
from outrider.export.pair import export_pair
from outrider.runtime.text.chat_template import with_tools
from outrider.tests.support import llama, write_checkpoint


def load(path: Path | str) -> None:
    source = Source.parse(str(path))
    read_config(source)
    load_model(source, "fp32")
    load_tokenizer(source)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", llama())


def test_a_folder_is_read(folder: Path) -> None:
    load(folder)


def test_a_source_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for text in (str(tmp_path / "absent"), "no/such/thing", "absent.gguf", ".."):
        with pytest.raises(SourceError, match=r"does not exist|no config\.json"):
            Source.parse(text)


def test_a_folder_without_a_model_is_refused_and_a_gguf_in_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no config\.json"):
        Source.parse(str(tmp_path))
    (tmp_path / "some.gguf").write_text("GGUF")
    assert Source.parse(str(tmp_path)) == Source.parse(str(tmp_path / "some.gguf"))
    (tmp_path / "other.gguf").touch()
    with pytest.raises(SourceError, match="several GGUF files") as caught:
        Source.parse(str(tmp_path))
    assert f"{tmp_path}/other.gguf, {tmp_path}/some.gguf" in caught.value.hint


def test_a_file_that_is_not_a_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(SourceError, match="is not a GGUF file"):
        Source.parse(str(path))


@pytest.mark.parametrize("keep", [0, 4, 1000, -1000])
def test_truncated_weights_are_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"cannot read the weights in .*model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("keep", [None, 0, 1000, -1000])
def test_a_missing_or_cut_shard_is_refused_by_name(tmp_path: Path, keep: int | None) -> None:
    """Of a model, and of a draft head, whose tensors are read by name."""
    for read in (lambda source: load_model(source, "fp32"), load_tensors):
        folder = tmp_path / "model"
        llama().save_pretrained(folder, max_shard_size="40KB")
        read(source := Source.parse(str(folder)))
        path = folder / "model-00002-of-00004.safetensors"
        content = path.read_bytes()
        path.unlink()
        if keep is not None:
            path.write_bytes(content[:keep])
        with pytest.raises(SourceError, match=r"cannot read the weights in .*model-00002-of-00004\.safetensors: \w") as caught:
            read(source)
        assert ("it is missing" in str(caught.value)) == (keep is None)
        assert caught.value.hint == "download the checkpoint again"


def test_a_missing_package_is_to_be_installed(folder: Path) -> None:
    class Loader:
        @staticmethod
        def from_pretrained(*_: object, **__: object) -> None:
            raise ImportError("this checkpoint requires optimum")

    with pytest.raises(SourceError, match="requires optimum") as caught:
        Source.parse(str(folder)).read("weights", Loader)
    assert caught.value.hint == "install the package that the message names"


def test_absent_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="cannot read the weights"):
        load(folder)


def test_a_missing_tensor_is_refused_and_not_initialized(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"1 weights of model are missing.*layers\.1\.mlp\.up_proj"):
        load(folder)


def test_a_tensor_of_another_shape_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"model\.norm\.weight"):
        load(folder)


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"model_type": "no_such_model"}', '{"model_type": 7}'])
def test_a_bad_configuration_is_refused(folder: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(
        SourceError, match=r"cannot read the config(uration|\.json) of model|config\.json of model is not an object"
    ):
        load(folder)


def test_settings_of_a_later_transformers_are_refused_by_name(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"gates_of_attention": 2, "switched_off": False}
    path.write_text(json.dumps(config))
    read_config(Source.parse(str(folder)))  # a key that no transformers knows, as trainers write them
    path.write_text(json.dumps(config | {"transformers_version": "99.0"}))
    with pytest.raises(UnsupportedModelError, match=r"from transformers 99\.0, and .* does not know its gates_of_attention$"):
        read_config(Source.parse(str(folder)))


def test_a_model_of_another_kind_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UnsupportedModelError, match="not a causal language model"):
        load(folder)


@pytest.mark.parametrize("damage", ["absent", "{", '{"model": {}}'])
def test_a_bad_tokenizer_is_refused(folder: Path, damage: str) -> None:
    path = folder / "tokenizer.json"
    if damage == "absent":
        path.unlink()
        (folder / "tokenizer_config.json").unlink()
    else:
        path.write_text(damage)
    with pytest.raises(SourceError, match="tokenizer"):
        load(folder)


USERS = "{% for m in messages %}{{ m.content }}{% endfor %}"
OF_TOOLS = "{{ tools }}" + USERS


def chat_template(folder: Path, given: Any) -> str | None:
    """The template of a checkpoint whose tokenizer_config.json has this one."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": given}))
    return load_tokenizer(Source.parse(str(folder))).chat_template


def test_of_several_chat_templates_the_one_for_tools_is_for_tools(folder: Path) -> None:
    def named(**templates: str) -> list[dict[str, str]]:
        return [{"name": name, "template": template} for name, template in templates.items()]

    assert chat_template(folder, named(rag="{{", default=USERS, tool_use=OF_TOOLS)) == with_tools(USERS, OF_TOOLS)
    assert chat_template(folder, named(chat=USERS)) == USERS
    with pytest.raises(SourceError, match="model has the chat templates chat, tool_use, and no default"):
        chat_template(folder, named(chat=USERS, tool_use=OF_TOOLS))


@pytest.mark.parametrize(
    ("given", "problem"), [(5, "is 5, not text"), ({"default": None}, "is None, not text"), ("{% for", "is not valid")]
)
def test_a_chat_template_that_is_none_is_refused(folder: Path, given: Any, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        chat_template(folder, given)


def test_a_chat_template_that_drops_what_users_say_is_refused(folder: Path) -> None:
    with pytest.raises(SourceError, match="model: the chat template does not show what users say"):
        chat_template(folder, "{{ messages | length }}")


def test_a_processors_chat_template_is_read(folder: Path) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": USERS}))
    assert load_tokenizer(Source.parse(str(folder))).chat_template == USERS


def neox() -> GPTNeoXForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 320}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, bos_token_id=None, eos_token_id=0, max_position_embeddings=256))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        # The rotary embedding is wider than the head, which only a run of the model finds.
        (neox, {"rotary_pct": 2.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2}}),
        (llama, {"num_attention_heads": 5}),  # the hidden size is not a multiple
        (llama, {"num_key_value_heads": 3}),
        (llama, {"num_key_value_heads": 0}),
        (llama, {"head_dim": 4}),
        (llama, {"head_dim": 7}),
        (llama, {"hidden_size": 16}),
        (llama, {"vocab_size": 100}),
        (llama, {"num_hidden_layers": 0}),
        (llama, {"num_hidden_layers": -1}),
        (llama, {"num_hidden_layers": 3}),
        (llama, {"max_position_embeddings": 2}),
        (llama, {"max_position_embeddings": -5}),
        (llama, {"eos_token_id": 320}),
        (llama, {"eos_token_id": [0, -1]}),
    ],
)
def test_a_configuration_that_contradicts_itself_or_the_weights_is_refused(
    tmp_path: Path, make: Callable[[], PreTrainedModel], changes: dict[str, Any]
) -> None:
    folder = write_checkpoint(tmp_path / "model", make())
    (folder / "generation_config.json").unlink(missing_ok=True)  # its end of text goes before the other
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((SourceError, UnsupportedModelError)) as caught:
        export_pair(str(folder), None, tmp_path / "out", precision="fp32")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_hub_id_is_read_and_one_that_cannot_be_fetched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub client's cache, in its own layout, without network."""
    repository = tmp_path / "models--someone--some-model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = llama()
    write_checkpoint(repository / "snapshots" / commit, model)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))  # as the variables of these names do
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = Source.parse("someone/some-model")
    read_config(source)
    assert source.name == "someone/some-model"
    torch.testing.assert_close(load_model(source, "fp32").state_dict(), model.state_dict(), atol=0, rtol=0)
    assert len(load_tokenizer(source).vocabulary()) == 320
    with pytest.raises(
        SourceError, match="someone/another-model is neither a file nor a folder, was not downloaded completely, and the hub"
    ):
        Source.parse("someone/another-model")


def mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint with weights in this format, and return what they are: like those of GPT-OSS, blocks of 32 numbers of
    4 bits, the lower four of a byte first, and an exponent for each."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, **heads, max_position_embeddings=128, pad_token_id=0)
    write_checkpoint(folder, AutoModelForCausalLM.from_config(config))
    tensors, want = load_file(folder / "model.safetensors"), {}
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        numbers = torch.stack([e2m1[(blocks & 15).int()], e2m1[(blocks >> 4).int()]], -1).flatten(-2)
        want[name] = (numbers * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(described))
    assert len(want) == 2 * config.num_hidden_layers
    return want


def test_weights_in_mxfp4_are_dequantized(tmp_path: Path) -> None:
    want = mxfp4(tmp_path / "model")
    model, weights = open_model(Source.parse(str(tmp_path / "model")), "fp32")
    assert all(model.get_parameter(name).is_meta for name in want)  # they are read layer by layer
    weights.keep_all()
    loaded = model.state_dict()
    for name, tensor in want.items():
        torch.testing.assert_close(loaded[name], tensor, atol=0, rtol=0)


@pytest.mark.slow
def test_weights_in_mxfp4_are_rounded_to_int4(tmp_path: Path) -> None:
    mxfp4(tmp_path / "model")
    manifest = export_pair(str(tmp_path / "model"), None, tmp_path / "onnx", precision="int4")
    assert manifest.models["target"].architecture == "GptOssForCausalLM"
