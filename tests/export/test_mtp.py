"""The head in a target's own checkpoint: parity with transformers, and what `export` makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicCache

from outrider.bundle.manifest import Manifest
from outrider.errors import SourceError, UnsupportedModelError, UsageError
from outrider.export.arguments import ExportArguments
from outrider.export.checkpoints.checkpoint import load_model, read_config
from outrider.export.checkpoints.mimo import MiMoConfig
from outrider.export.checkpoints.source import Source
from outrider.export.heads.draft_head import Target
from outrider.export.heads.mtp import MtpCheckpoint, MtpHead, has_mtp
from outrider.export.pair import export_pair
from outrider.tests.export import quantized
from outrider.tests.export.recurrent_models import COMMON, CONFIGS, EXPERTS
from outrider.tests.export.test_packed import case
from outrider.tests.support import write_checkpoint

WIDTH, LAYERS = COMMON["hidden_size"], COMMON["num_hidden_layers"]
ROUTED = {**COMMON, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
OF_DEEPSEEK: dict[str, Any] = {
    "GLM-4.5": hf.Glm4MoeConfig(**ROUTED, head_dim=16, first_k_dense_replace=1),
    "DeepSeek-V3": hf.DeepseekV3Config(**{**ROUTED, "num_key_value_heads": 4}, **LATENT, first_k_dense_replace=1),
}
OF_MIMO = MiMoConfig(**{**COMMON, "num_key_value_heads": 2, "num_hidden_layers": 1})
OF_QWEN = {name: CONFIGS[name] for name in ("Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next")}
assert EXPERTS["num_experts"] == ROUTED["n_routed_experts"]


def write_with_head(folder: Path, config: Any, of_qwen: bool) -> Path:
    """Write a tiny random checkpoint whose head is its last layer, changed a little."""
    torch.manual_seed(0)
    made = hf.AutoModelForCausalLM.from_config(config)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    write_checkpoint(folder, made)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    layer = {name.removeprefix(last): each + 0.05 * torch.randn_like(each) for name, each in tensors.items() if last in name}
    wide, norms = 0.1 * torch.randn(WIDTH, 2 * WIDTH), [0.3 * torch.randn(WIDTH) for _ in range(3)]
    if of_qwen:
        tensors |= {f"mtp.layers.0.{name}": each for name, each in layer.items()}
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        tensors |= {f"mtp.{name}.weight": each for name, each in zip(names, norms, strict=True)} | {"mtp.fc.weight": wide}
    else:
        own = f"model.layers.{LAYERS}."
        tensors |= {own + name: each for name, each in layer.items()}
        names = ("enorm", "hnorm", "shared_head.norm")
        tensors |= {f"{own}{name}.weight": 1 + each for name, each in zip(names, norms, strict=True)}
        tensors |= {own + "eh_proj.weight": wide, own + "shared_head.head.weight": tensors["lm_head.weight"].clone()}
        tensors[own + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def build(folder: Path) -> tuple[hf.PreTrainedModel, MtpHead]:
    source = Source.parse(str(folder))
    model = load_model(source, "fp32")
    return model, MtpCheckpoint.read(source).build(Target.of(model))[1]


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


def describe(folder: Path, settings: dict[str, Any]) -> None:
    """Say in a checkpoint's configuration how it is quantized."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def test_weights_in_fp8_are_dequantized(tmp_path: Path) -> None:
    """DeepSeek-V3 is published like this. The last blocks of rows and columns are smaller than the others."""
    folder = write_with_head(tmp_path / "model", OF_DEEPSEEK["DeepSeek-V3"], of_qwen=False)
    path, block = folder / "model.safetensors", (24, 40)
    tensors = load_file(path)
    name = f"model.layers.{LAYERS}.self_attn.o_proj.weight"
    rows, columns = tensors[name].shape
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    small = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors | {name: small, f"{name}_scale_inv": scales}, path, metadata={"format": "pt"})
    describe(folder, {"quant_method": "fp8", "weight_block_size": list(block)})
    got = MtpCheckpoint.read(Source.parse(str(folder))).tensors["model.layers.0.self_attn.o_proj.weight"]
    for row, column in ((0, 0), (rows - 1, columns - 1), (24, 39), (23, 40)):
        assert got[row, column] == small[row, column].float() * scales[row // block[0], column // block[1]]


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint with the names of Qwen's and a layer in which `test_packed`'s cases fit, and its tensors."""
    folder = write_with_head(tmp_path / "model", hf.LlamaConfig(**{**COMMON, "intermediate_size": 256}), of_qwen=True)
    return folder, load_file(folder / "model.safetensors")


def replace(plain: tuple[Path, dict[str, torch.Tensor]], module: str, parts: dict[str, torch.Tensor]) -> Source:
    """Write other tensors in the place of a module's weight."""
    own = {name: each for name, each in plain[1].items() if name != f"{module}.weight"}
    own |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
    save_file(own, plain[0] / "model.safetensors", metadata={"format": "pt"})
    return Source.parse(str(plain[0]))


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "ct-asymmetric", "ct-fp8-channel", "ct-fp8-block", "ct-fp8-tensor"])
def test_a_quantized_module_has_the_weight_that_its_library_reads(
    name: str, plain: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    """The layer's other modules are not quantized, and neither is the target."""
    whole, (settings, parts, want) = MtpCheckpoint.read(Source.parse(str(plain[0]))).tensors, case(name)
    describe(plain[0], settings)
    source = replace(plain, "mtp.layers.0.mlp.down_proj", parts)
    got, own = MtpCheckpoint.read(source).tensors, "model.layers.0.mlp.down_proj.weight"
    assert got.keys() == whole.keys()
    assert all(torch.equal(each, want if name == own else whole[name]) for name, each in got.items())
    assert torch.equal(build(plain[0])[1].get_parameter(own), want)


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "modelopt"])
def test_a_head_may_be_quantized_as_a_whole(method: str, plain: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """With the first of its tensors, too, whose name tells which layout the head has."""
    whole = build(plain[0])[1]
    replace(plain, "mtp.fc", quantized.METHODS[method][0](plain[1]["mtp.fc.weight"]))
    got = build(quantized.write(plain[0], tmp_path / "quantized", method))[1]
    for (name, each), want in zip(got.named_parameters(), whole.parameters(), strict=True):
        assert (each - want).norm() < 0.2 * want.norm(), name
        assert torch.equal(each, want) != name.endswith("_proj.weight")


def test_what_a_quantized_head_lacks_is_named(plain: tuple[Path, dict[str, torch.Tensor]]) -> None:
    target, module = Target.of(load_model(Source.parse(str(plain[0])), "fp32")), "mtp.layers.0.mlp.down_proj"
    settings, parts, _ = case("ct-fp8-block")
    in_blocks = {"quant_method": "fp8", "weight_block_size": [48, 128]}
    for quantization, scale in ((settings, "weight_scale"), (in_blocks, "weight_scale_inv")):
        describe(plain[0], quantization)
        with pytest.raises(SourceError, match=rf"{module}\.weight is quantized, but has no scale"):
            MtpCheckpoint.read(replace(plain, module, {"weight": parts["weight"]}))
        with pytest.raises(SourceError, match=rf"{module}.* do not fit each other"):
            MtpCheckpoint.read(replace(plain, module, {"weight": parts["weight"], scale: parts["weight_scale"][:, :1]}))
    with pytest.raises(SourceError, match=r"lacks the tensor of model\.layers\.0\.mlp\.down_proj\.weight"):
        MtpCheckpoint.read(replace(plain, module, {scale: parts["weight_scale"]})).build(target)
    describe(plain[0], {"quant_method": "another"})
    with pytest.raises(UnsupportedModelError, match="model is quantized by another, which is not read"):
        MtpCheckpoint.read(replace(plain, module, parts))


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
