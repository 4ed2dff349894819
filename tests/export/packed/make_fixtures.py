"""Compute `fixtures.npz` with the libraries that define the formats, so that our reading is compared with theirs.

From the repository's root, in an environment of its own:

    python3 -m venv /tmp/packed
    /tmp/packed/bin/pip install compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 auto-round==0.16.1 numpy safetensors
    /tmp/packed/bin/pip install logbar pypcre threadpoolctl device-smi
    /tmp/packed/bin/pip download --no-deps --no-binary :all: --no-build-isolation -d /tmp/packed autoawq==0.2.9 gptqmodel==7.7.0
    for each in /tmp/packed/*.tar.gz; do tar xzf $each -C /tmp/packed; done
    PYTHONPATH=/tmp/packed/autoawq-0.2.9:/tmp/packed/gptqmodel-7.7.0 /tmp/packed/bin/python tests/export/packed/make_fixtures.py

autoawq and gptqmodel cannot be installed without a GPU's compiler, so single modules of their sources are imported. It takes
half a minute. Each case has the tensors of one module as CASE/tensor/PART, its `quantization_config` as JSON in CASE/settings,
and the weight that the library makes of them in CASE/weight, float32 [N, K].
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

OUTPUTS, INPUTS, FEW = 64, 256, 4
Case = tuple[str, dict[str, Any], dict[str, torch.Tensor], torch.Tensor]


def module_of(name: str, *packages: str) -> Any:
    """Import a module without running the files of some packages, which need a GPU."""
    for package in packages:
        if package not in sys.modules:
            sys.modules[package] = made = types.ModuleType(package)
            made.__path__ = [str(Path(folder, *package.split("."))) for folder in sys.path if folder]
    return importlib.import_module(name)


def weights() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))


def grouped(weight: torch.Tensor, group: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [N, K / group] of asymmetric groups."""
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low) / most
    return scale, (-low / scale).round().clamp(0, most)


def of_awq() -> Iterator[Case]:
    gemm = module_of("awq.modules.linear.gemm", "awq", "awq.modules", "awq.modules.linear", "awq.utils")
    packing = module_of("awq.utils.packing_utils")
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = weights()
    scale, zero = grouped(linear.weight.data, 128, 15)
    made = gemm.WQLinear_GEMM.from_linear(linear, 4, 128, scales=scale.T.half(), zeros=zero.T)
    tensors = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    weight = packing.dequantize_gemm(*(tensors[each] for each in ("qweight", "qzeros")), tensors["scales"].float(), 4, 128)
    yield "awq", settings, tensors, weight.T


def of_gptq() -> Iterator[Case]:
    library = module_of("gptqmodel.utils.model_dequant", "gptqmodel", "gptqmodel.quantization")
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))
    for name, bits, layout, act_order, symmetric in (
        ("gptq", 4, "gptq", False, False),
        ("gptq-symmetric", 4, "gptq", False, True),
        ("gptq-act-order", 4, "gptq", True, False),
        ("gptq-v2", 4, "gptq_v2", False, False),
        ("gptq-8-bits", 8, "gptq", False, True),
        ("gptq-3-bits", 3, "gptq_v2", False, False),
        ("gptq-2-bits", 2, "gptq_v2", True, False),
    ):
        groups = torch.arange(INPUTS) // 32
        groups = groups[order] if act_order else groups
        random = torch.Generator().manual_seed(bits)
        integers = torch.randint(0, 2**bits, (INPUTS, OUTPUTS), generator=random, dtype=torch.int32)
        zeros = torch.randint(1, 2**bits, (INPUTS // 32, OUTPUTS), generator=random, dtype=torch.int32)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        stored = zeros - 1 if layout == "gptq" else zeros
        tensors = {
            "qweight": library.pack_cols(integers.T.contiguous(), bits, pack_dtype=torch.int32).T.contiguous(),
            "qzeros": library.pack_cols(stored, bits, pack_dtype=torch.int32),
            "scales": torch.rand(INPUTS // 32, OUTPUTS, generator=random).half(),
            "g_idx": groups.int(),
        }
        settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": layout, "desc_act": act_order}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.safetensors")
            save_file({f"m.{part}": tensor for part, tensor in tensors.items()}, file)
            weight = library.convert_gptq_file(file, torch.float32, settings, "cpu")["m.weight"]
        yield name, settings, tensors, weight


def of_compressed_tensors() -> Iterator[Case]:
    registry: Any = module_of("compressed_tensors.compressors.base").BaseCompressor
    make_scheme: Any = module_of("compressed_tensors.quantization").QuantizationScheme

    schemes: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("ct-group", "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}),
        ("ct-asymmetric", "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("ct-3-bits", "pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 64, "symmetric": False}),
        ("ct-8-bits", "pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
        ("ct-int8", "int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
        ("ct-fp8-channel", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
        ("ct-fp8-tensor", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}),
        (
            "ct-fp8-block",
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 128], "symmetric": True},
        ),
    )
    for name, layout, arguments in schemes:
        scheme = make_scheme(targets=["Linear"], weights=arguments)
        bits, strategy = scheme.weights.num_bits, arguments["strategy"]
        most = 448.0 if arguments.get("type") == "float" else 2 ** (bits - 1) - 1
        weight = weights()
        zero = None
        if strategy == "tensor":
            scale = (weight.abs().amax() / most).reshape(1)
        elif strategy == "block":
            height, width = arguments["block_structure"]
            rows = torch.split(weight, height, 0)
            greatest = [torch.stack([part.abs().amax() for part in torch.split(each, width, 1)]) for each in rows]
            scale = torch.stack(greatest) / most
        else:
            group = arguments.get("group_size", INPUTS)
            scale, zero = grouped(weight, group, 2**bits - 1)
            zero = (zero - 2 ** (bits - 1)).to(torch.int8)
            if arguments["symmetric"]:
                scale, zero = weight.reshape(OUTPUTS, -1, group).abs().amax(-1) / most, None
        given = {"weight": weight, "weight_scale": scale} | ({} if zero is None else {"weight_zero_point": zero})
        compressor = registry.get_value_from_registry(layout)
        tensors = compressor.compress(given, scheme)
        settings = {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
        }
        yield name, settings, tensors, compressor.decompress(tensors, scheme)["weight"]


def of_compressed_blocks() -> Iterator[Case]:
    """The formats whose scales are in a byte, too."""
    registry: Any = module_of("compressed_tensors.compressors.base").BaseCompressor
    make_scheme: Any = module_of("compressed_tensors.quantization").QuantizationScheme
    helpers = module_of("compressed_tensors.compressors.nvfp4.helpers")
    forward = module_of("compressed_tensors.quantization.lifecycle.forward")
    weight = weights()[:FEW]
    for name, layout, bits, group, most in (
        ("ct-nvfp4", "nvfp4-pack-quantized", 4, 16, 6.0),
        ("ct-mxfp4", "mxfp4-pack-quantized", 4, 32, 4.0),
        ("ct-mxfp8", "mxfp8-quantized", 8, 32, 256.0),
    ):
        strategy = "tensor_group" if group == 16 else "group"
        arguments = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group, "symmetric": True}
        scheme = make_scheme(targets=["Linear"], weights=arguments)
        given = {"weight": weight, "weight_scale": weight.reshape(FEW, -1, group).abs().amax(-1) / most}
        if group == 16:
            whole = (448 * 6 / weight.abs().amax()).reshape(1)
            given |= {"weight_scale": (given["weight_scale"] * whole).to(torch.float8_e4m3fn), "weight_global_scale": whole}
            given["weight_scale"] = given["weight_scale"].float()
        else:
            given["weight_scale"] = torch.exp2(given["weight_scale"].log2().floor())
        compressor = registry.get_value_from_registry(layout)
        tensors = compressor.compress(given, scheme)
        want = compressor.decompress(tensors, scheme)["weight"]
        if group == 16:  # it rounds to bf16
            values = helpers.unpack_fp4_from_uint8(tensors["weight_packed"], FEW, INPUTS, torch.float32)
            scales = tensors["weight_scale"].float()
            exact = forward.dequantize(values, scales, args=scheme.weights, global_scale=tensors["weight_global_scale"])
            assert torch.equal(exact.bfloat16(), want)
            want = exact
        settings = {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
        }
        yield name, settings, tensors, want


def of_modelopt() -> Iterator[Case]:
    export = importlib.import_module("modelopt.torch.export.quant_utils")
    config_of = importlib.import_module("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    kinds = importlib.import_module("modelopt.torch.quantization.qtensor")
    weight, random = weights()[:FEW], torch.Generator().manual_seed(2)

    def case(name: str, algorithm: str, want: torch.Tensor, **tensors: torch.Tensor) -> Case:
        return name, config_of({"quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}}), tensors, want

    packed, scales, whole = kinds.NVFP4QTensor.quantize(weight.clone(), 16)
    want = packed.dequantize(torch.float32, scale=scales, double_scale=whole, block_sizes={-1: 16})
    tensors = {"weight": packed._quantized_data, "weight_scale": scales, "weight_scale_2": whole, "input_scale": whole}
    yield case("modelopt-nvfp4", "NVFP4", want, **tensors)

    smooth = 0.5 + torch.rand(INPUTS, generator=random)
    yield case("modelopt-nvfp4-awq", "NVFP4_AWQ", want * smooth, **tensors, pre_quant_scale=smooth)

    packed, scales = kinds.MXFP4QTensor.quantize(weight.clone(), 32)
    want = packed.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})
    yield case("modelopt-mxfp4", "W4A8_MXFP4_FP8", want, weight=packed._quantized_data, weight_scale=scales.reshape(FEW, -1))

    packed, scales = kinds.MXFP8QTensor.quantize(weight.clone())
    want = packed.dequantize(torch.float32, scale=scales)
    yield case("modelopt-mxfp8", "MXFP8", want, weight=packed._quantized_data, weight_scale=scales)

    # It does not read this layout, so the weight consists of integers that it packs.
    scales = 0.5 + torch.rand(FEW, INPUTS // 128, generator=random)
    want = torch.randint(-8, 8, weight.shape, generator=random) * scales.repeat_interleave(128, 1)
    tensors = {"weight": export.to_quantized_weight(want, scales, "int4_awq", block_size=128), "weight_scale": scales}
    yield case("modelopt-awq", "W4A16_AWQ", want, **tensors)
    yield case("modelopt-awq-smooth", "W4A16_AWQ", want * smooth, **tensors, pre_quant_scale=smooth)

    scales = weight.abs().amax(-1) / 448
    eight = export.to_quantized_weight(weight, scales, "fp8_pc_pt")
    yield case(
        "modelopt-fp8-rows", "FP8_PER_CHANNEL_PER_TOKEN", eight.float() * scales[:, None], weight=eight, weight_scale=scales
    )


def of_auto_round() -> Iterator[Case]:
    """It may give single modules other bits: the settings of the second case have those of the others."""
    awq = importlib.import_module("auto_round.export.export_to_awq.utils")
    identity = torch.eye(INPUTS)
    for name, layout, bits, module in (
        ("auto-round-gptq", "auto_round:auto_gptq", 4, "qlinear_torch_zp"),
        ("auto-round", "auto_round", 3, "qlinear_torch"),
    ):
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = weights()
        scale, zero = grouped(weights(), 32, 2**bits - 1)
        library = importlib.import_module(f"auto_round_extension.torch.{module}")
        packed = library.QuantLinear(bits, 32, INPUTS, OUTPUTS, bias=False)
        packed.device = "cpu"
        packed.pack(linear, scale, zero.clamp(min=1), None, device="cpu")
        tensors = {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
        settings = {"quant_method": "auto-round", "packing_format": layout, "bits": 4, "group_size": 32, "sym": False}
        yield name, settings, tensors, packed.float()(identity).T.contiguous()
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = weights()
    scale, zero = grouped(weights(), 32, 15)
    packed = awq.WQLinear_GEMM.from_linear(linear, 4, 32, scales=scale.T.contiguous(), zeros=zero.T.contiguous(), device="cpu")
    tensors = {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
    weight = awq.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, 32)
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 32}
    yield "auto-round-awq", settings, tensors, weight.T.contiguous()


def main() -> None:
    arrays: dict[str, Any] = {}
    cases = (*of_awq(), *of_gptq(), *of_compressed_tensors(), *of_compressed_blocks(), *of_modelopt(), *of_auto_round())
    for name, settings, tensors, weight in cases:
        arrays[f"{name}/settings"] = np.array(json.dumps(settings))
        arrays[f"{name}/weight"] = weight.float().numpy()
        for part, tensor in tensors.items():
            eight = tensor.dtype == torch.float8_e4m3fn  # numpy has none
            arrays[f"{name}/tensor/{part}{'.fp8' if eight else ''}"] = (tensor.view(torch.uint8) if eight else tensor).numpy()
        print(name, tuple(weight.shape), {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in tensors.items()})
    np.savez_compressed(Path(__file__).with_name("fixtures.npz"), **arrays)


if __name__ == "__main__":
    main()
