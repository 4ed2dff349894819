"""Quantized checkpoints that are refused, by the format's name or by a module's."""

from __future__ import annotations

from typing import Any

import torch

METHODS = (
    *("aqlm", "bitnet", "bitsandbytes", "eetq", "exl2", "exl3", "fouroversix", "fp_quant", "gemma", "higgs", "hqq", "marlin"),
    *("metal", "nvfp4", "quanto", "quark", "quip", "sinq", "spqr", "torchao", "vptq"),
)
REFUSED: dict[str, dict[str, Any]] = {
    **{name: {"quant_method": name, "bits": 4, "group_size": 64} for name in METHODS},
    "bitsandbytes, without its name": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "MLX": {"group_size": 64, "bits": 4, "mode": "affine"},
    "auto-round (auto_round:llm_compressor)": {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
    "auto-round, with integers of inputs": {"quant_method": "auto-round", "packing_format": "auto_round", "act_bits": 8},
    "auto-round, of floats": {"quant_method": "auto-round", "packing_format": "auto_round", "data_type": "mx_int"},
    "auto-round, with rotated inputs": {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "rotation_config": {"block_size": 32},
    },
    "a method of later years": {"quant_method": "a method of later years"},
}

LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor], str]] = {
    "AWQ in other layouts than gemm": ("awq", {"version": "gemv"}, {}, "AWQ's layout gemv"),
    "GPTQ in other layouts than gptq and gptq_v2": ("gptq", {"checkpoint_format": "gptq_p"}, {}, "GPTQ's layout gptq_p"),
    "GPTQ with zero points of 16 in its first layout": (
        "gptq",
        {},
        {"qzeros": torch.full((8, 8), -1, dtype=torch.int32)},
        "zero points of 16",
    ),
    "MXFP6": (
        "ct-mxfp4",
        {"format": "mxfp6-pack-quantized"},
        {"weight_packed": torch.zeros(4, 192, dtype=torch.uint8)},
        "mxfp6-pack",
    ),
    "MXFP4 with zero points": ("ct-mxfp4", {}, {"weight_zero_point": torch.zeros(4, 8)}, "format mxfp4-pack-quantized"),
    "sparse compressed-tensors": (
        "ct-group",
        {"format": "marlin-24"},
        {"scale_packed": torch.ones(2, 64)},
        r"sparse \(scale_packed\)",
    ),
    "ModelOpt's W4A8_AWQ": (
        "modelopt-awq",
        {"quant_algo": "W4A8_AWQ"},
        {"weight_scale_2": torch.ones(())},
        "ModelOpt's W4A8_AWQ",
    ),
    "ModelOpt's NVFP4_SVD": (
        "modelopt-nvfp4",
        {"quant_algo": "NVFP4_SVD"},
        {"svdquant_lora_a": torch.ones(2, 256)},
        "ModelOpt's NVFP4_SVD",
    ),
    "ModelOpt's FP8_PB_WO": (
        "modelopt-fp8-rows",
        {"quant_algo": "FP8_PB_WO"},
        {"weight_scale": torch.ones(1, 2)},
        "ModelOpt's FP8_PB_WO",
    ),
    "ModelOpt's W8A16": (
        "modelopt-awq",
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "W8A16"}}},
        {"weight": torch.zeros(4, 256, dtype=torch.int8)},
        "ModelOpt's W8A16",
    ),
}
"""Layouts: the case of `packed` that is changed, settings, tensors, and what is said of the module."""
