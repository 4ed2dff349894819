"""GGUF files are read as llama.cpp reads them, or refused by the name of what is not known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import generation_defaults, load_model, read_config
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.tests.export.gguf_files import SIZES, finish, write, writer_of
from outrider.tests.support import END


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 320, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    expected = write(path)
    source = Source.parse(str(path))
    assert source.name == "tiny.gguf"
    torch.testing.assert_close(logits(load_model(source, "fp32")), logits(expected))
    files = load_tokenizer(source)
    assert files.vocabulary()[0] == END
    assert len(files.vocabulary()) == 320


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_divisors() -> np.ndarray:
    """What `LlamaModel.generate_extra_tensors` of llama.cpp's converter writes for these."""
    original, low, high, factor = 32, 1.0, 4.0, 8.0
    divisors = []
    for at in range(0, 16, 2):
        length = 2 * math.pi * 10000.0 ** (at / 16)
        smooth = (original / length - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if length < original / high else factor if length > original / low else between)
    return np.array(divisors, dtype=np.float32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.finetuned": True,
}
SCALED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]] = {
    "rope_freqs": ({}, {"rope_freqs.weight": llama3_divisors()}, LLAMA3),
    "yarn": (YARN_KEYS, {}, YARN),
    "yarn, its magnitude and its bounds": (
        YARN_KEYS | {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
        {},
        YARN | {"attention_factor": 0.5 * (1 + 0.1 * math.log(4)), "beta_fast": 16.0, "beta_slow": 2.0},
    ),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
    "linear, as it was": ({"rope.scale_linear": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
    "none": ({"rope.scaling.type": "none", "rope.freq_base": 500.0}, {}, {"rope_theta": 500.0}),
}


@pytest.mark.parametrize("case", SCALED)
def test_its_rotary_embedding_is_scaled(case: str, tmp_path: Path) -> None:
    metadata, tensors, rope = SCALED[case]
    expected = write(tmp_path / "m.gguf", metadata, tensors=tensors, rope=rope)
    plain = write(tmp_path / "plain.gguf")
    got = logits(load_model(Source.parse(str(tmp_path / "m.gguf")), "fp32"))
    torch.testing.assert_close(got, logits(expected), atol=1e-4, rtol=1e-4)
    assert (got - logits(plain)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("ends", "ids"),
    [({}, [0]), ({"eos": 3}, [3, 0]), ({"eos": 0, "eot": 5, "eom": 9}, [0, 5, 9]), ({"eos": 0, "eot": 0}, [0])],
    ids=str,
)
def test_its_answers_end_by_each_of_its_end_tokens(ends: dict[str, int], ids: list[int], tmp_path: Path) -> None:
    """Its token 0 is <|endoftext|>."""
    write(tmp_path / "m.gguf", ends=ends)
    source = Source.parse(str(tmp_path / "m.gguf"))
    assert generation_defaults(load_model(source, "fp32"), load_tokenizer(source)).eos_token_ids == ids


@pytest.mark.parametrize(
    ("named", "tokens", "ids"),
    [
        ({"eos": 3}, ["<end_of_turn>"], [3, 0, 7]),
        ({"eos": 3, "eot": 7}, ["<|eot_id|>", "<|eom_id|>"], [3, 7, 0, 8]),
        ({"eos": 7}, ["<|return|>", "<|call|>", "<|end|>"], [7, 0, 8]),  # the last one ends a message of several
        ({"eos": 3}, ["<|call|>", "<|end|>"], [3, 0, 7, 8]),
    ],
    ids=str,
)
def test_the_end_of_a_turn_ends_an_answer_though_the_file_does_not_name_it(
    named: dict[str, int], tokens: list[str], ids: list[int], tmp_path: Path
) -> None:
    """As llama.cpp finds it."""
    finish(writer_of(tmp_path / "m.gguf", "qwen2", SIZES, named, dict(enumerate(tokens, 7))))
    assert read_config(Source.parse(str(tmp_path / "m.gguf"))).eos_token_id == ids


@pytest.mark.parametrize(
    ("metadata", "tensors", "named"),
    [
        ({"attention.scale": 0.3}, {}, r"qwen2\.attention\.scale = 0\.3"),
        ({"attention.causal": False}, {}, r"qwen2\.attention\.causal = False"),
        ({"expert_count": 4}, {}, r"qwen2\.expert_count = 4"),
        ({"logit_scale": 0.5}, {}, r"qwen2\.logit_scale = 0\.5"),
        ({"rope.dimension_count": 8}, {}, r"qwen2\.rope\.dimension_count = 8"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, {}, r"qwen2\.rope\.scaling\.type = longrope"),
        ({"rope.scaling.attn_factor": 1.19}, {}, r"qwen2\.rope\.scaling\.attn_factor = 1\.19"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5},
            {},
            r"yarn_ext_factor = 0\.5",
        ),
        (YARN_KEYS | {"rope.scaling.yarn_ext_factor": 0.5}, {}, r"qwen2\.rope\.scaling\.yarn_ext_factor = 0\.5"),
        ({}, {"rope_freqs.weight": np.ones(3, np.float32)}, r"rope_freqs\.weight"),
        ({}, {"blk.2.nextn.eh_proj.weight": np.zeros((4, 4), np.float32)}, r"blk\.2\.nextn\.eh_proj\.weight"),
        ({}, {"blk.1.attn_sinks.weight": np.zeros(4, np.float32)}, r"blk\.1\.attn_sinks\.weight"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    metadata: dict[str, Any], tensors: dict[str, np.ndarray], named: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", metadata, tensors=tensors)
    with pytest.raises(UnsupportedModelError, match=named):
        load_model(Source.parse(str(tmp_path / "m.gguf")), "fp32")


def test_what_changes_nothing_is_accepted(tmp_path: Path) -> None:
    usual = {"attention.causal": True, "logit_scale": 1.0, "rope.dimension_count": 16}
    expected = write(tmp_path / "m.gguf", usual | {"expert_count": 0, "tensor_data_layout": "x"})
    torch.testing.assert_close(logits(load_model(Source.parse(str(tmp_path / "m.gguf")), "fp32")), logits(expected))


HEADS = {"attention.key_length": 32, "attention.value_length": 32}
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48}
FAMILIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"rope.dimension_count": 16}, {"rms_norm_eps": 1e-5, "head_dim": 16}),
    ("qwen3", HEADS, {"head_dim": 32}),
    ("qwen3moe", HEADS | EXPERTS, {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    (
        "gemma2",
        HEADS | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "attention.sliding_window": 32},
        {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "sliding_window": 32, "query_pre_attn_scalar": 32},
    ),
    ("gemma2", HEADS | {"block_count": 46}, {"query_pre_attn_scalar": 16}),  # as llama.cpp takes it for the one of 27B
    (
        "gemma3",
        HEADS | {"attention.sliding_window": 16, "block_count": 62},
        {"sliding_window": 16, "query_pre_attn_scalar": 16},
    ),
]


@pytest.mark.parametrize(("architecture", "metadata", "expected"), FAMILIES)
def test_a_family_s_metadata_is_in_its_configuration(
    architecture: str, metadata: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    finish(writer_of(tmp_path / "m.gguf", architecture, SIZES | metadata, {"eos": 0}))
    config = read_config(Source.parse(str(tmp_path / "m.gguf")))
    got = {name: getattr(config, name) for name in expected}
    assert got == pytest.approx(expected, rel=1e-6)


def test_the_rotary_base_and_scaling_of_gemma_3_are_those_of_its_full_attention(tmp_path: Path) -> None:
    metadata = HEADS | {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    finish(writer_of(tmp_path / "m.gguf", "gemma3", SIZES | metadata, {"eos": 0}))
    entries = read_config(Source.parse(str(tmp_path / "m.gguf"))).rope_parameters
    full, sliding = entries["full_attention"], entries["sliding_attention"]
    assert (full["rope_type"], full["factor"], full["rope_theta"]) == ("linear", 8.0, 1e6)
    assert (sliding["rope_type"], sliding["rope_theta"]) == ("default", 1e4)


def test_a_file_that_is_called_mistral_has_no_window_that_it_does_not_name(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "m.gguf", "llama", SIZES | {"rope.dimension_count": 16}, {"eos": 0})
    writer.kv_data[0]["general.name"].value = "mistral"
    finish(writer)
    config = read_config(Source.parse(str(tmp_path / "m.gguf")))
    assert (config.model_type, config.sliding_window) == ("mistral", None)


def test_one_of_several_files_is_refused(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "m.gguf", "qwen2", SIZES, {"eos": 0})
    writer.add_uint16("split.count", 3)
    finish(writer)
    with pytest.raises(UnsupportedModelError, match="is one of 3 files") as caught:
        read_config(Source.parse(str(tmp_path / "m.gguf")))
    assert "merge" in caught.value.hint


def test_what_transformers_cannot_read_is_refused_with_another_way(tmp_path: Path) -> None:
    """GPT-OSS with the scaling that all published files of it have."""
    metadata = SIZES | EXPERTS | HEADS | YARN_KEYS | {"attention.sliding_window": 128}
    finish(writer_of(tmp_path / "m.gguf", "gpt-oss", metadata, {"eos": 0}))
    with pytest.raises(SourceError, match="cannot read the configuration of m") as caught:
        read_config(Source.parse(str(tmp_path / "m.gguf")))
    assert "export the Hugging Face checkpoint" in caught.value.hint


def test_a_number_of_files_that_is_none_is_refused(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "m.gguf", "qwen2", SIZES, {"eos": 0})
    writer.add_string("split.count", "three")
    finish(writer)
    with pytest.raises(SourceError, match="cannot read the metadata"):
        read_config(Source.parse(str(tmp_path / "m.gguf")))


@pytest.mark.parametrize("keep", [4, 100, -1000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "tiny.gguf"
    write(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"cannot read the \w+ of tiny.gguf"):
        load_model(Source.parse(str(path)), "fp32")
