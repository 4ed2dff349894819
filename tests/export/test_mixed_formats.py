"""Checkpoints whose modules are quantized in different ways are read, and kept, module by module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.export.checkpoints.checkpoint import load_model, open_model
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.weights.block_linear import BlockLinear
from outrider.export.weights.quantize import quantize_model
from outrider.export.weights.rounding import AS_IS, Rounding
from outrider.tests.export import quantized
from outrider.tests.support import llama, write_checkpoint

HEAD = "lm_head"


@dataclass(frozen=True)
class Mixed:
    """A method, others for modules whose names match a pattern, and what the settings say of these."""

    method: str
    others: Mapping[str, str]
    bits: Mapping[str, int]  # by pattern, of what is kept as it is; other modules are rounded
    settings: Mapping[str, Any]
    kept: str = "(?!)"  # modules that are not quantized
    dropped: str = ""  # a part of each module that is not in the file


def groups(*methods: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The groups of compressed-tensors for modules of the attention and the others, as llm-compressor writes them."""
    for index, (name, method) in enumerate(zip(("self_attn", "mlp"), methods, strict=True)):
        own = quantized.METHODS[method][1]
        scheme = own["config_groups"]["group_0"] | {"targets": [f"re:.*{name}.*_proj"], "format": own["format"]}
        yield f"group_{index}", scheme


ATTENTION = "self_attn"
RULES = {rf"+:.*\.{ATTENTION}\..*": {"bits": 8, "sym": True}, r"-:.*\.gate_proj": {}}
MIXED = {
    "compressed-tensors, int4 and FP8": Mixed(
        "compressed-tensors",
        {ATTENTION: "ct-fp8"},
        {"mlp": 4},
        {"format": "mixed-precision", "config_groups": dict(groups("ct-fp8", "compressed-tensors"))},
    ),
    "compressed-tensors, int4 and int8": Mixed(
        "ct-asymmetric",
        {ATTENTION: "ct-int8"},
        {"mlp": 4, ATTENTION: 8},
        {"format": "mixed-precision", "config_groups": dict(groups("ct-int8", "ct-asymmetric"))},
    ),
    "compressed-tensors, NVFP4 and FP8": Mixed(
        "ct-nvfp4",
        {ATTENTION: "ct-fp8"},
        {},
        {"format": "mixed-precision", "config_groups": dict(groups("ct-fp8", "ct-nvfp4"))},
    ),
    "GPTQ, rules": Mixed(
        "gptq", {ATTENTION: "gptq-8-bits"}, {ATTENTION: 8, "up_proj|down_proj": 4}, {"dynamic": RULES}, kept="gate_proj"
    ),
    "AutoRound, rules": Mixed(
        "gptq-symmetric",
        {ATTENTION: "gptq-8-bits"},
        {ATTENTION: 8, "up_proj|down_proj": 4},
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {rf".*\.{ATTENTION}\..*": {"bits": 8}, r".*\.gate_proj": {"bits": 16, "data_type": "float"}},
        },
        kept="gate_proj",
        dropped="g_idx",
    ),
}


def write(mixed: Mixed, folder: Path) -> Path:
    """A checkpoint of one layer."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    made = llama(**sizes, tie_word_embeddings=False)
    plain = write_checkpoint(folder / "plain", made)
    model = quantized.write(plain, folder / "model", mixed.method, mixed.kept, mixed.others, **mixed.settings)
    file = model / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if not (mixed.dropped and name.endswith(mixed.dropped))}
    save_file(tensors, file, metadata={"format": "pt"})
    return model


def apart(mixed: Mixed, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the modules, each from a checkpoint that is quantized in one way."""
    found = load_file(folder / "plain" / "model.safetensors")
    for index, (pattern, method) in enumerate([("_proj", mixed.method), *mixed.others.items()]):
        whole = quantized.write(folder / "plain", folder / f"quantized-{index}", method)
        with safe_open(quantized.dequantized(whole, folder / f"read-{index}") / "model.safetensors", framework="pt") as file:
            for name in found:
                if re.search(pattern, name) and not re.search(mixed.kept, name):
                    found[name] = file.get_tensor(name)
    return found


@pytest.mark.parametrize("name", MIXED)
def test_each_module_is_read_in_its_own_way(name: str, tmp_path: Path) -> None:
    loaded = load_model(Source.parse(str(write(MIXED[name], tmp_path))), "int4").state_dict()
    want = apart(MIXED[name], tmp_path)
    assert loaded.keys() == want.keys()
    assert all(torch.equal(each, want[name]) for name, each in loaded.items())


@pytest.mark.parametrize("name", MIXED)
def test_each_module_is_kept_in_its_own_way(name: str, tmp_path: Path) -> None:
    mixed = MIXED[name]
    source = Source.parse(str(write(mixed, tmp_path)))
    model, weights = open_model(source, "int4", tmp_path)
    found = quantize_model(model, weights, Rounding("int4", head_precision="int8", method=AS_IS), load_tokenizer(source), None)
    modules = {name: each for name, each in model.named_modules() if isinstance(each, BlockLinear)}
    want = {name: next((bits for each, bits in mixed.bits.items() if re.search(each, name)), None) for name in modules}
    assert len(want) == 8
    assert found.rounded == [name for name, bits in want.items() if bits is None]
    assert {name: each.bits for name, each in modules.items()} == {name: bits or 8 for name, bits in want.items()}
