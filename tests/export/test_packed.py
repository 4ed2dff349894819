"""Quantized checkpoints are read as the libraries that define their formats do; `packed/make_fixtures.py` made the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from outrider.errors import OutriderError, SourceError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model, open_model
from outrider.export.checkpoints.source import Source
from outrider.tests.export.packed.cases import CASES, UNUSED, case, packed_weight
from outrider.tests.export.refused_formats import LAYOUTS
from outrider.tests.support import llama, write_checkpoint


def read(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    found = packed_weight(settings, tensors)
    weight = found[...]
    assert found.empty.shape == weight.shape
    return weight


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_library(name: str) -> None:
    settings, tensors, want = case(name)
    torch.testing.assert_close(read(settings, tensors), want, rtol=0, atol=0)


@pytest.mark.parametrize("packing", ["auto_round", "auto_round:gptqmodel"])
def test_autoround_may_write_the_groups_of_inputs(packing: str) -> None:
    settings, tensors, want = case("auto-round")
    groups = torch.arange(256, dtype=torch.int32) // 32
    assert torch.equal(read(settings | {"packing_format": packing}, tensors | {"g_idx": groups}), want)


def test_gptq_without_an_order_has_its_groups_in_a_row() -> None:
    settings, tensors, want = case("gptq")
    del tensors["g_idx"]
    assert torch.equal(read(settings, tensors), want)


@pytest.mark.parametrize(("name", "part"), [("ct-nvfp4", "weight_global_scale"), ("modelopt-nvfp4", "weight_scale_2")])
def test_nvfp4_has_two_scales(name: str, part: str) -> None:
    settings, tensors, _ = case(name)
    del tensors[part]
    with pytest.raises(OutriderError, match=r"a\.b"):
        read(settings, tensors)


def test_symmetric_gptq_may_leave_its_zero_points_out() -> None:
    settings, tensors, want = case("gptq-symmetric")
    assert torch.equal(read(settings, tensors | {"qzeros": tensors["qzeros"][:, :0]}), want)


@pytest.mark.parametrize(("name", "change", "parts", "message"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_what_is_not_read_is_refused_by_the_module_s_name(
    name: str, change: dict[str, Any], parts: dict[str, torch.Tensor], message: str
) -> None:
    settings, tensors, _ = case(name)
    with pytest.raises(UnsupportedModelError, match=rf"a\.b.*{message}") as error:
        read(settings | change, tensors | parts)
    assert error.value.hint


def test_fp8_of_modelopt_is_one_number_a_tensor() -> None:
    _, tensors, want = case("ct-fp8-tensor")
    scalar = {"weight": tensors["weight"], "weight_scale": tensors["weight_scale"][0], "input_scale": torch.ones(())}
    assert torch.equal(read({"quant_method": "modelopt", "quant_algo": "FP8"}, scalar), want)


def in_blocks(outputs: int, inputs: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers in FP8, and scales."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(outputs, inputs, generator=random).to(torch.float8_e4m3fn)
    return numbers, torch.rand(rows, columns, generator=random)


@pytest.mark.parametrize("end", ["weight_scale_inv", "scale", "qscale_weight"])
def test_fp8_in_blocks_is_what_transformers_makes_of_it(end: str) -> None:
    weight, scale = in_blocks(64, 96, 2, 3)
    want = Fp8Dequantize(None).convert({"weight": weight, "weight_scale_inv": scale}, full_layer_name="w")["w"]
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    assert torch.equal(read(settings, {"weight": weight, end: scale}), want)


def test_experts_in_fp4_among_fp8_are_what_transformers_makes_of_them() -> None:
    """As DeepSeek-V4 stores them."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (64, 48), dtype=torch.int8, generator=random)
    scale = torch.randint(120, 130, (64, 3), dtype=torch.uint8, generator=random)
    want = Fp8Dequantize(None).convert({"weight": weight, "weight_scale_inv": scale}, full_layer_name="w")["w"]
    assert torch.equal(
        read({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"weight": weight, "scale": scale}), want.float()
    )


def test_the_last_blocks_of_fp8_may_be_cut() -> None:
    """transformers refuses these, or takes other sizes of blocks."""
    weight, scale = in_blocks(48, 80, 2, 3)
    want = torch.tensor([[float(weight[row, at]) * float(scale[row // 32, at // 32]) for at in range(80)] for row in range(48)])
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    assert torch.equal(read(settings, {"weight": weight, "weight_scale_inv": scale}), want)
    with pytest.raises(SourceError, match=r"a\.b"):
        read(settings, {"weight": weight, "weight_scale_inv": scale[:, :-1]})
    with pytest.raises(SourceError, match=r"a\.b\.weight is quantized, but has no scale"):
        read(settings, {"weight": weight})


@pytest.mark.parametrize(("method", "shape"), [("fbgemm_fp8", (64, 1)), ("mxfp8", (64, 3))])
def test_other_fp8_is_what_transformers_makes_of_it(method: str, shape: tuple[int, int]) -> None:
    """FBGEMM's scales are of rows, those of MXFP8 exponents of 32 inputs."""
    weight, scale = in_blocks(64, 96, *shape)
    exponents = torch.randint(120, 130, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scale = exponents if method == "mxfp8" else scale
    want = Fp8Dequantize(None).convert({"weight": weight, "weight_scale_inv": scale}, full_layer_name="w")["w"]
    name = "weight_scale" if method == "fbgemm_fp8" else "weight_scale_inv"
    assert torch.equal(read({"quant_method": method}, {"weight": weight, name: scale, "input_scale_ub": torch.ones(1)}), want)


def test_fp8_may_have_one_scale_for_a_weight() -> None:
    weight, scale = in_blocks(48, 80, 1, 1)
    settings = {"quant_method": "fp8", "weight_block_size": None}
    assert torch.equal(read(settings, {"weight": weight, "weight_scale_inv": scale[0, 0]}), weight.float() * scale)
    of_autofp8 = {"weight": weight, "weight_scale": scale[0], "input_scale": scale[0]}
    assert torch.equal(read({"quant_method": "fp8", "activation_scheme": "static"}, of_autofp8), weight.float() * scale)


def test_a_checkpoint_in_fp8_is_read_layer_by_layer(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", llama(num_hidden_layers=1, hidden_size=64, intermediate_size=192))
    file, name = folder / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    weight, scale = in_blocks(64, 192, 1, 2)
    save_file(load_file(file) | {name: weight, f"{name}_scale_inv": scale}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    model, weights = open_model(Source.parse(str(folder)), "int4")
    assert model.get_parameter(name).is_meta
    weights.keep_all()
    assert torch.equal(model.get_parameter(name), weight.float() * scale.repeat_interleave(128, 1)[:, :192])


@pytest.mark.parametrize("name", ["ct-fp8-channel", "ct-fp8-tensor", "ct-mxfp8"])
def test_another_module_s_blocks_are_not_those_of_a_module(name: str) -> None:
    settings, tensors, want = case(name)
    blocks, _, _ = case("ct-fp8-block")
    groups = {"group_0": settings["config_groups"]["group_0"], "group_1": blocks["config_groups"]["group_0"]}
    assert torch.equal(read(settings | {"config_groups": groups}, tensors), want)


def test_blocks_of_two_sizes_that_fit_are_refused() -> None:
    settings, tensors, want = case("ct-fp8-block")  # [64, 256] in blocks of 48 and 128
    weights = settings["config_groups"]["group_0"]["weights"]

    def groups(*sizes: list[int]) -> dict[str, Any]:
        schemes = [{"weights": weights | {"block_structure": size}} for size in sizes]
        return settings | {"config_groups": {f"group_{index}": each for index, each in enumerate(schemes)}}

    assert torch.equal(read(groups([128, 128], [48, 128], [48, 64]), tensors), want)
    with pytest.raises(UnsupportedModelError, match=r"a\.b is in FP8 in blocks of 48x128 or 60x128; its settings do not"):
        read(groups([60, 128], [48, 128]), tensors)


def test_numbers_without_a_method_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", llama(num_hidden_layers=1))
    file, name = folder / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"{name} is quantized \(F8_E4M3\) by a method that is not read"):
        load_model(Source.parse(str(folder)), "int4")


@pytest.mark.parametrize("name", ["awq", "gptq", "ct-asymmetric", "ct-fp8-block", "ct-nvfp4"])
def test_tensors_that_do_not_fit_each_other_are_refused(name: str) -> None:
    settings, tensors, _ = case(name)
    scale = next(part for part, tensor in tensors.items() if "scale" in part and tensor.dim() == 2)
    with pytest.raises(SourceError, match=r"a\.b"):
        read(settings, tensors | {scale: tensors[scale][:, :-1]})


def write_with(folder: Path, name: str) -> str:
    """Write a checkpoint with one quantized module, which is a case's, and return the module's name."""
    settings, tensors, weight = case(name)
    outputs, inputs = weight.shape
    if outputs == 64:
        config, module = llama(num_hidden_layers=1, hidden_size=outputs, intermediate_size=inputs), "mlp.down_proj"
    else:
        sizes = {"num_hidden_layers": 1, "hidden_size": inputs, "num_attention_heads": 2, "num_key_value_heads": 1}
        config, module = llama(**sizes, head_dim=outputs, intermediate_size=8), "self_attn.k_proj"
    write_checkpoint(folder, config)
    file, module = folder / "model.safetensors", f"model.layers.0.{module}"
    own = load_file(file)
    assert own.pop(f"{module}.weight").shape == weight.shape
    save_file(own | {f"{module}.{part}": each.contiguous() for part, each in tensors.items()}, file, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    if settings["quant_method"] == "modelopt":  # which first wrote a file of its own
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": described.pop("quantization_config")}))
    (folder / "config.json").write_text(json.dumps(described))
    return module


@pytest.mark.parametrize("name", ["awq", "ct-fp8-block", "ct-nvfp4", "ct-mxfp4", "modelopt-nvfp4-awq", "modelopt-awq"])
def test_a_checkpoint_is_read_without_the_library_that_wrote_it(name: str, tmp_path: Path) -> None:
    module = write_with(tmp_path / "model", name)
    model = load_model(Source.parse(str(tmp_path / "model")), "int4")
    assert torch.equal(model.get_submodule(module).weight, case(name)[2])


@pytest.mark.parametrize("name", ["awq", "ct-fp8-block", "modelopt-nvfp4"])
def test_a_missing_part_is_named(name: str, tmp_path: Path) -> None:
    module = write_with(tmp_path / "model", name)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith(("scales", "weight_scale")))]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(OutriderError, match=rf"{module}.* has no (scale|tensor 'scales')"):
        load_model(Source.parse(str(tmp_path / "model")), "int4")


@pytest.mark.parametrize("name", ["awq", "ct-fp8-tensor", "ct-nvfp4", "modelopt-nvfp4"])
def test_scales_of_activations_and_caches_are_left_out(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The output of an export says so; transformers does not warn of them."""
    module = write_with(tmp_path / "model", name)
    folder, layer = tmp_path / "model", "model.layers.0"
    file = folder / "model.safetensors"
    unused = {f"{layer}.{each}": torch.rand(1) for each in UNUSED}
    save_file(load_file(file) | unused, file, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    if "quantization_config" in described:
        described["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
        (folder / "config.json").write_text(json.dumps(described))
    capfd.readouterr()
    model = load_model(Source.parse(str(folder)), "int4")
    assert torch.equal(model.get_submodule(module).weight, case(name)[2])
    assert "UNEXPECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_bias_that_the_model_lacks_is_0(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = write_with(tmp_path / "model", name)
    file, want = tmp_path / "model" / "model.safetensors", case(name)[2]
    tensors, bias = load_file(file), torch.zeros(len(want))
    save_file(tensors | {f"{module}.bias": bias}, file, metadata={"format": "pt"})
    capfd.readouterr()
    model = load_model(Source.parse(str(tmp_path / "model")), "int4")
    assert torch.equal(model.get_submodule(module).weight, want)
    assert "UNEXPECTED" not in "".join(capfd.readouterr())
    bias[-1] = 1e-3
    save_file(tensors | {f"{module}.bias": bias}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=rf"{module}\.bias is not 0, but the model has no such bias"):
        load_model(Source.parse(str(tmp_path / "model")), "int4")
