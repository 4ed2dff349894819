"""Quantized versions of a checkpoint, as the libraries that define the formats write them; rounded to the nearest."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.export.checkpoints.outlines import FileTensor
from outrider.export.checkpoints.packed import packing_of, unpacked

GROUP = 32
MOST_FP8 = 448.0  # the largest number
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # FP4 without its sign
# The bytes of a GGUF block at which its fp16 numbers begin, if they are not 0 and 2. Others may be anything.
HALVES = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}
Tensors = dict[str, torch.Tensor]


def rounded(weight: torch.Tensor, symmetric: bool, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The integers from 0 on [N, K], scales and zero points [N, K / GROUP] of a weight."""
    groups, most = weight.reshape(len(weight), -1, GROUP), 2**bits - 1
    if symmetric:
        scale = (groups.abs().amax(-1) / 2 ** (bits - 1)).half().float()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / most).half().float()
        zero = (-low / scale).round().clamp(1, most)
    return (groups / scale[..., None] + zero[..., None]).round().clamp(0, most).reshape(weight.shape), scale, zero


def words(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> torch.Tensor:
    """As many values of a row in each int32 as fit, from the lowest bits on; eight of four bits may have an order."""
    some = values.to(torch.int64).reshape(len(values), -1, 32 // bits)[..., order[: 32 // bits]]
    return (some << bits * torch.arange(32 // bits)).sum(-1).to(torch.int32)


def awq(weight: torch.Tensor) -> Tensors:
    integers, scale, zero = rounded(weight, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words(integers.T, order), "qzeros": words(zero.T, order), "scales": scale.T.half()}


def gptq(weight: torch.Tensor) -> Tensors:
    """With groups in the order of the inputs' sizes, as with `desc_act`."""
    order = weight.abs().sum(0).argsort(descending=True)
    integers, scale, zero = rounded(weight[:, order], symmetric=False)
    back = order.argsort()
    groups = (torch.arange(weight.shape[1]) // GROUP)[back].to(torch.int32)
    packed = words(integers[:, back]).T
    return {"qweight": packed, "qzeros": words(zero.T - 1), "scales": scale.T.half(), "g_idx": groups}


def gptq_symmetric(weight: torch.Tensor, bits: int = 4) -> Tensors:
    integers, scale, zero = rounded(weight, symmetric=True, bits=bits)
    packed, zeros = words(integers, bits=bits).T, words(zero.T - 1, bits=bits)
    groups = (torch.arange(weight.shape[1]) // GROUP).to(torch.int32)
    return {"qweight": packed, "qzeros": zeros, "scales": scale.T.half(), "g_idx": groups}


def compressed(weight: torch.Tensor) -> Tensors:
    integers, scale, _ = rounded(weight, symmetric=True)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": words(integers), "weight_scale": scale.bfloat16(), "weight_shape": shape}


def compressed_asymmetric(weight: torch.Tensor) -> Tensors:
    integers, scale, zero = rounded(weight, symmetric=False)
    packed = {"weight_packed": words(integers), "weight_scale": scale.half(), "weight_shape": torch.tensor(weight.shape)}
    return packed | {"weight_zero_point": words(zero.T).T}


def in_rows(weight: torch.Tensor, kind: torch.dtype, most: float) -> Tensors:
    """One scale for each output."""
    scale = (weight.abs().amax(1, keepdim=True) / most).bfloat16()
    numbers = (weight / scale.float()).clamp(-most, most)
    return {"weight": (numbers if kind.is_floating_point else numbers.round()).to(kind), "weight_scale": scale}


def in_fp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The nearest numbers times scales [N, G], two in a byte."""
    numbers = weight.reshape(*scale.shape, -1) / scale[..., None]
    codes = (numbers.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (numbers < 0)
    pairs = codes.reshape(len(weight), -1, 2).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4


def nvfp4(weight: torch.Tensor) -> Tensors:
    whole = 6 * MOST_FP8 / weight.abs().amax()
    scale = (whole * weight.reshape(len(weight), -1, 16).abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    packed = in_fp4(weight, scale.float() / whole)
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole.reshape(1)}


def modelopt_nvfp4(weight: torch.Tensor) -> Tensors:
    """With a second scale that multiplies."""
    parts = nvfp4(weight)
    whole = parts.pop("weight_global_scale")
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"], "weight_scale_2": 1 / whole[0]}


def mxfp4(weight: torch.Tensor) -> Tensors:
    exponents = weight.reshape(len(weight), -1, 32).abs().amax(-1).log2().floor() - 2
    return {"weight_packed": in_fp4(weight, exponents.exp2()), "weight_scale": (exponents + 127).to(torch.uint8)}


def modelopt(weight: torch.Tensor) -> Tensors:
    """AWQ, with factors of the inputs."""
    factors = (weight.abs().mean(0) / weight.abs().mean()).sqrt().half().float()
    integers, scale, _ = rounded(weight / factors, symmetric=True)
    pairs = (integers.to(torch.uint8) ^ 8).reshape(-1, 2, weight.shape[1])
    return {"weight": pairs[:, 0] | pairs[:, 1] << 4, "weight_scale": scale.half(), "pre_quant_scale": factors.half()}


def in_fp8_blocks(weight: torch.Tensor) -> Tensors:
    """One scale for `GROUP` inputs of `GROUP` outputs. The last blocks may be cut."""
    rows = [[part.abs().amax() for part in torch.split(each, GROUP, 1)] for each in torch.split(weight, GROUP)]
    scale = torch.tensor(rows) / MOST_FP8
    spread = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[: len(weight), : weight.shape[1]]
    return {"weight": (weight / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def in_fp8(weight: torch.Tensor) -> Tensors:
    """One scale for all, and one that a server divides the inputs by."""
    scale = weight.abs().amax() / MOST_FP8
    whole = {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    return whole | {"activation_scale": torch.tensor(0.02)}


def scheme(layout: str, **weights: Any) -> dict[str, Any]:
    """The settings of compressed-tensors for modules that are all alike."""
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


FLOAT8 = {"num_bits": 8, "type": "float"}
IN_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
METHODS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "gptq-symmetric": (
        gptq_symmetric,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
    "gptq-8-bits": (functools.partial(gptq_symmetric, bits=8), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "compressed-tensors": (compressed, scheme("pack-quantized", **IN_GROUPS)),
    "ct-asymmetric": (compressed_asymmetric, scheme("pack-quantized", **IN_GROUPS | {"symmetric": False})),
    "ct-int8": (
        functools.partial(in_rows, kind=torch.int8, most=127),
        scheme("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "ct-fp8": (
        functools.partial(in_rows, kind=torch.float8_e4m3fn, most=MOST_FP8),
        scheme("float-quantized", **FLOAT8, strategy="channel"),
    ),
    "ct-nvfp4": (nvfp4, scheme("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "ct-mxfp4": (mxfp4, scheme("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)),
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP}),
    "modelopt-nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "auto-round": (
        gptq_symmetric,
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": GROUP, "sym": True},
    ),
    "fp8": (in_fp8, FP8 | {"activation_scheme": "static", "weight_block_size": None}),
    "fp8-blocks": (in_fp8_blocks, FP8 | {"weight_block_size": [GROUP, GROUP]}),
}


def blocks(numbers: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The blocks of a GGUF tensor with these numbers; of a K-quant, which `gguf` only reads, random ones."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(numbers, kind)
    size, bytes_ = gguf.GGML_QUANT_SIZES[kind]
    made = np.random.default_rng(0).integers(0, 256, (*numbers.shape[:-1], numbers.shape[-1] // size, bytes_), dtype=np.uint8)
    for at in HALVES.get(kind.name, [0, 2]):
        made[..., at : at + 2] = np.array([5e-5], dtype=np.float16).view(np.uint8)
    return made.reshape(*numbers.shape[:-1], -1)


def write(
    source: Path, folder: Path, method: str, kept: str = "(?!)", others: Mapping[str, str] | None = None, **settings: Any
) -> Path:
    """Copy a checkpoint, with its layers' weights quantized by a method, except modules whose names match `kept`.

    Modules whose names match a pattern of `others` are quantized by the method there. The settings are added to those of the
    method. Experts, which are one tensor, can only be in FP8.
    """
    own = METHODS[method][1]
    shutil.copytree(source, folder)
    file, made = folder / "model.safetensors", Tensors()
    for name, tensor in load_file(file).items():
        module = name.removesuffix(".weight")
        quantized = METHODS[next((each for name, each in (others or {}).items() if re.search(name, module)), method)][0]
        if not module.endswith("_proj") or re.search(kept, module):
            made[name] = tensor
        elif tensor.dim() == 3:
            experts = [*map(quantized, tensor.float())]
            made |= {part.replace("weight", name): torch.stack([each[part] for each in experts]) for part in experts[0]}
        else:
            made |= {f"{module}.{part}": each.contiguous() for part, each in quantized(tensor.float()).items()}
    save_file(made, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": own | settings}))
    return folder


def dequantized(source: Path, folder: Path) -> Path:
    """Copy a quantized checkpoint, with the weights that its modules have, in fp32."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    packing = packing_of(config.pop("quantization_config"), source.name)
    assert packing is not None
    with safe_open(source / "model.safetensors", framework="pt") as file:
        tensors = unpacked({name: FileTensor(file, name) for name in file.keys()}, packing)  # noqa: SIM118
        save_file({name: each[...] for name, each in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
