"""The text models inside multimodal checkpoints compute what the whole models compute for texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from outrider.bundle.folder import read_manifest
from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.tests.export.multimodal import CONFIGS, PIXELS, RENAMED, TEXT, logits, made, rename, separate
from outrider.tests.support import run_here, write_checkpoint


@pytest.mark.parametrize("name", CONFIGS)
def test_the_text_model_is_that_of_the_whole(name: str, tmp_path: Path) -> None:
    whole = made(name)
    loaded = load_model(Source.parse(str(write_checkpoint(tmp_path / "model", whole))), "fp32")
    kept = ("model.language_model.", "model.text_model.", "lm_head.")
    assert all(each.startswith(kept) for each, _ in loaded.named_parameters())
    torch.testing.assert_close(logits(loaded), logits(whole), rtol=1e-5, atol=1e-6)
    assert logits(whole).std() > 0.1


@pytest.mark.parametrize("name", RENAMED)
def test_other_names_of_weights_are_read(name: str, tmp_path: Path) -> None:
    whole = made(name)
    folder = write_checkpoint(tmp_path / "model", whole)
    file = folder / "model.safetensors"
    tensors = rename(load_file(file), RENAMED[name])
    assert tensors.keys() != load_file(file).keys()
    save_file(tensors, file, metadata={"format": "pt"})
    torch.testing.assert_close(logits(load_model(Source.parse(str(folder)), "fp32")), logits(whole), rtol=1e-5, atol=1e-6)


def test_experts_may_be_separate(tmp_path: Path) -> None:
    whole = made("Qwen3-VL-MoE")
    folder = write_checkpoint(tmp_path / "model", whole)
    file = folder / "model.safetensors"
    tensors = separate(load_file(file))
    assert tensors["model.language_model.layers.0.mlp.experts.3.gate_proj.weight"].shape == (32, 64)
    save_file(tensors, file, metadata={"format": "pt"})
    torch.testing.assert_close(logits(load_model(Source.parse(str(folder)), "fp32")), logits(whole), rtol=1e-5, atol=1e-6)


def test_separate_experts_of_another_order_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", hf.Llama4ForCausalLM(hf.Llama4TextConfig(**TEXT, num_local_experts=2)))
    file, expert = folder / "model.safetensors", "model.layers.0.feed_forward.experts.0.up_proj.weight"
    save_file(load_file(file) | {expert: torch.zeros(64, 64)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"{expert} is of a single expert; of llama4_text, only joined"):
        load_model(Source.parse(str(folder)), "fp32")


def test_one_that_reads_prompts_in_both_directions_is_refused(tmp_path: Path) -> None:
    config = hf.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"}, vision_config={**PIXELS, "model_type": "siglip_vision_model"}
    )
    folder = write_checkpoint(tmp_path / "model", hf.PaliGemmaForConditionalGeneration(config))
    with pytest.raises(UnsupportedModelError, match="PaliGemmaForConditionalGeneration reads prompts in both directions"):
        load_model(Source.parse(str(folder)), "fp32")


@pytest.mark.parametrize(
    "name", [name if name == "Ministral-3" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_it_is_exported_and_says_so(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", made(name))
    done = run_here("export", "--target", folder, "--draft", "none", "-o", tmp_path / "export")
    assert done.returncode == 0, done.stderr
    assert "loading the target: text only, images are refused" in done.stderr
    target = read_manifest(tmp_path / "export").models["target"]
    assert target.parity.max_abs_diff <= target.parity.tolerance
    assert target.parity.argmax_agreement == 1


def test_dense_layers_whose_product_has_the_name_of_joined_experts_are_read(tmp_path: Path) -> None:
    """Phi-3 and GLM-4 join gate and up in each layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
    model = hf.Phi3ForCausalLM(hf.Phi3Config(**sizes, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(tmp_path)
    read = load_model(Source.parse(str(tmp_path)), "fp32")
    torch.testing.assert_close(read.state_dict(), model.state_dict())
