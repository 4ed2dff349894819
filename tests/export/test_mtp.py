"""The head in a target's own checkpoint: parity with transformers, and what `export` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicCache

from outrider.bundle.manifest import Manifest
from outrider.errors import SourceError, UnsupportedModelError, UsageError
from outrider.export.arguments import ExportArguments
from outrider.export.checkpoints.checkpoint import load_model, read_config
from outrider.export.checkpoints.source import Source
from outrider.export.heads.draft_head import Target
from outrider.export.heads.mtp import MtpCheckpoint, has_mtp
from outrider.export.pair import export_pair
from outrider.tests.export.mtp_heads import LAYERS, OF_DEEPSEEK, OF_MIMO, OF_QWEN, WIDTH, build, write_with_head
from outrider.tests.support import write_checkpoint


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(1, 320, (1, 12), generator=generator),
        torch.randn(1, 12, WIDTH, generator=generator),
        torch.arange(12)[None],
    )


@pytest.mark.parametrize("name", OF_DEEPSEEK)
def test_two_draft_steps_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no MTP heads; would show that ours equal its")
    from transformers.cache_utils import MtpCache

    model, head = build(write_with_head(tmp_path / "model", OF_DEEPSEEK[name], of_qwen=False))
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]  # it has those of published sizes
    theirs = layers.MtpModel.from_pretrained(model).eval()
    theirs.set_attn_implementation("eager")
    tokens, features, places = inputs()
    cache, own = MtpCache(config=model.config.get_mtp_config()), DynamicCache()
    for _ in range(2):
        want = theirs.forward_layer(0, features, places, cache, input_ids=tokens)
        logits, got = head(tokens, features, places, own)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(logits, theirs._project_to_logits(want), atol=1e-5, rtol=1e-4)
        tokens, features, places = logits[:, -1:].argmax(-1), got[:, -1:], places[:, -1:] + 1


def with_layer_of_head(folder: Path, tensors: dict[str, torch.Tensor]) -> hf.PreTrainedModel:
    """The target with the head's layer in the place of its last one, as transformers loads it."""
    last = f"model.layers.{read_config(Source.parse(str(folder))).num_hidden_layers - 1}."
    swapped = {name: tensors.get(name.replace(last, "mtp.layers.0."), each).clone() for name, each in tensors.items()}
    save_file(swapped, folder / "model.safetensors", metadata={"format": "pt"})
    return hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def rename_for_mimo(folder: Path) -> None:
    """Give the head of a checkpoint the names that MiMo's has."""
    path = folder / "model.safetensors"
    names = {"pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm", "fc": "input_proj"}
    names = {f"mtp.{name}.weight": f"model.mtp_layers.0.{theirs}.weight" for name, theirs in names.items()}
    names["mtp.norm.weight"] = "model.mtp_layers.0.final_layernorm.weight"
    tensors = load_file(path)
    renamed = {names.get(name, name).replace("mtp.layers.", "model.mtp_layers."): each for name, each in tensors.items()}
    save_file(renamed, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", [*OF_QWEN, "MiMo"])
def test_heads_are_their_tensors_put_together_by_hand(name: str, tmp_path: Path) -> None:
    """transformers has no class for these heads, but the layers that they consist of. Qwen's reads the embedding first, MiMo's
    the hidden state."""
    folder = write_with_head(tmp_path / "model", OF_QWEN.get(name, OF_MIMO), of_qwen=True)
    tensors, mimo = load_file(folder / "model.safetensors"), name == "MiMo"
    if mimo:
        rename_for_mimo(folder)
    model, head = build(folder)
    tokens, features, places = inputs()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (weight if mimo else 1 + weight)

    with torch.no_grad():
        embedded = norm(model.get_input_embeddings()(tokens), tensors["mtp.pre_fc_norm_embedding.weight"])
        hidden = norm(features, tensors["mtp.pre_fc_norm_hidden.weight"])
        x = torch.cat([hidden, embedded] if mimo else [embedded, hidden], -1) @ tensors["mtp.fc.weight"].T
        decoder = with_layer_of_head(folder, tensors).get_decoder()
        layer = decoder.layers[-1]
        mask = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1)[None, None]
        out = layer(x, position_embeddings=decoder.rotary_emb(x, places), attention_mask=mask, position_ids=places)
        want = norm(out[0] if isinstance(out, tuple) else out, tensors["mtp.norm.weight"])
        logits, got = head(tokens, features, places, DynamicCache())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(logits, model.get_output_embeddings()(want), atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """A checkpoint with a head, and its export without a word about drafts; tests/runtime/hybrid/ has one of Qwen3.5."""
    made = tmp_path_factory.mktemp("mimo")
    folder = write_with_head(made / "model", OF_MIMO, of_qwen=True)
    rename_for_mimo(folder)
    return folder, export_pair(str(folder), None, made / "onnx", precision="fp32")


@pytest.mark.slow  # tests/runtime/hybrid/ exports one by default
def test_it_is_the_default_and_can_be_left_out(by_default: tuple[Path, Manifest], tmp_path: Path) -> None:
    folder, manifest = str(by_default[0]), by_default[1]
    named = export_pair(folder, "mtp", tmp_path / "named", precision="fp32")
    assert manifest == named
    assert manifest.roles == ("target", "head")
    assert manifest.models["head"].architecture == "MtpHead"
    assert manifest.models["target"].features == manifest.models["head"].features == WIDTH
    assert export_pair(folder, "none", tmp_path / "none", precision="fp32").roles == ("target",)
    with pytest.raises(UsageError, match="contradict"):
        ExportArguments.check(folder, ["none", "mtp"], tmp_path / "both", precision="fp32")


@pytest.fixture
def multimodal(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint as Qwen3.5 is published, where the text model's tensors lie deeper and the head's do not; and a flat one."""
    text = write_with_head(tmp_path / "text", OF_QWEN["Qwen3.5"], of_qwen=True)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": WIDTH}
    config = hf.Qwen3_5Config(text_config=OF_QWEN["Qwen3.5"].to_dict(), vision_config=vision)
    folder = write_checkpoint(tmp_path / "whole", hf.Qwen3_5ForConditionalGeneration(config))
    path = folder / "model.safetensors"
    images = {name: each for name, each in load_file(path).items() if name.startswith("model.visual.")}
    own = load_file(text / "model.safetensors")
    deeper = {name.replace("model.", "model.language_model.", 1): each for name, each in own.items() if name[:3] != "mtp"}
    heads = {name: each for name, each in own.items() if name[:3] == "mtp"}
    save_file(images | deeper | heads, path, metadata={"format": "pt"})
    return folder, text


def test_a_multimodal_checkpoint_gives_its_text_model_and_its_head(multimodal: tuple[Path, Path]) -> None:
    folder, text = multimodal
    assert has_mtp(Source.parse(str(folder)))
    assert read_config(Source.parse(str(folder))).get_text_config().num_hidden_layers == LAYERS
    ids, features, positions = inputs()
    with torch.no_grad():
        (model, head), (expected_model, expected_head) = build(folder), build(text)
        torch.testing.assert_close(model(ids).logits, expected_model(ids).logits)
        made = [each(ids, features, positions, DynamicCache())[0] for each in (head, expected_head)]
        torch.testing.assert_close(*made)


@pytest.mark.slow
def test_a_multimodal_checkpoint_is_exported_with_its_head(multimodal: tuple[Path, Path], tmp_path: Path) -> None:
    exports = [export_pair(str(each), None, tmp_path / f"onnx-{each.name}", precision="fp32") for each in multimodal]
    assert [each.roles for each in exports] == [("target", "head")] * 2


def test_what_is_wrong_with_a_head_is_named(tmp_path: Path) -> None:
    folder = write_with_head(tmp_path / "model", OF_QWEN["Qwen3.5"], of_qwen=True)
    path = folder / "model.safetensors"
    whole = load_file(path)

    def changed(**tensors: torch.Tensor | None) -> Source:
        save_file({name: each for name, each in (whole | tensors).items() if each is not None}, path, metadata={"format": "pt"})
        return Source.parse(str(folder))

    model = load_model(changed(), "fp32")
    with pytest.raises(UnsupportedModelError, match=r"the tensor mtp\.layers\.1\.input_layernorm\.weight"):
        MtpCheckpoint.read(changed(**{"mtp.layers.1.input_layernorm.weight": torch.ones(WIDTH)}))
    with pytest.raises(SourceError, match=r"lacks the tensor of model\.layers\.0\.self_attn\.q_proj\.weight"):
        MtpCheckpoint.read(changed(**{"mtp.layers.0.self_attn.q_proj.weight": None})).build(Target.of(model))
    with pytest.raises(SourceError, match=r"no enorm\.weight of the shape 64"):
        MtpCheckpoint.read(changed(**{"mtp.pre_fc_norm_embedding.weight": torch.ones(3)})).build(Target.of(model))
    with pytest.raises(UnsupportedModelError, match=r"the tensor of model\.layers\.0\.self_attn\.other\.weight"):
        MtpCheckpoint.read(changed(**{"mtp.layers.0.self_attn.other.weight": torch.ones(3)})).build(Target.of(model))
    for key, value in (("mtp_num_hidden_layers", 2), ("mtp_layer_scale", 0.5), ("chain_hidden_post_norm", False)):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(UnsupportedModelError, match=f"{key} = {value}"):
            MtpCheckpoint.read(changed())
        with pytest.raises(UnsupportedModelError) as caught:
            export_pair(str(folder), None, folder.parent / "out", precision="fp32")
        assert "--draft none" in caught.value.hint
        (folder / "config.json").write_text(json.dumps(config))
    none = changed(**{name: None for name in whole if name.startswith("mtp.")})
    assert not has_mtp(none)
    with pytest.raises(SourceError, match="has no MTP head"):
        MtpCheckpoint.read(none)
