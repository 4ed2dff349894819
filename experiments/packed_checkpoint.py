"""Writes a model as a checkpoint in 4 bits, packed as AWQ, GPTQ or compressed-tensors.

`python -m outrider.experiments.packed_checkpoint FORM MODEL OUT` takes MODEL as `outrider export --target` does. Weights are
rounded as by `--precision int4`, AWQ's around zero points: size and speed follow from the form alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer

from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.packed import AWQ_NIBBLES
from outrider.export.checkpoints.source import Source
from outrider.export.weights.quantize import quantize

BITS = 4
MIDDLE, MOST = 2 ** (BITS - 1), 2**BITS - 1
FORMS = ("awq", "gptq", "gptq-act-order", "compressed-tensors")


def settings_of(form: str, group: int) -> dict[str, Any]:
    """Return a checkpoint's `quantization_config`."""
    if form == "awq":
        return {"quant_method": "awq", "bits": BITS, "group_size": group, "zero_point": True, "version": "gemm"}
    if form == "compressed-tensors":
        scheme = {"num_bits": BITS, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
        return {"quant_method": form, "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": groups}
    order = form == "gptq-act-order"
    return {"quant_method": "gptq", "bits": BITS, "group_size": group, "sym": True, "desc_act": order}


def words(integers: torch.Tensor) -> torch.Tensor:
    """Pack integers from 0 to 15, [R, C], into int32 [R, C / 8], the first in the lowest bits."""
    places = BITS * torch.arange(32 // BITS)
    return (integers.reshape(len(integers), -1, len(places)).long() << places).sum(-1).to(torch.int32)


def packed(form: str, weight: torch.Tensor, group: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module with weights [N, K], with the last parts of their names."""
    outputs, inputs = weight.shape
    if form == "awq":
        groups = weight.reshape(outputs, -1, group)
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scale = (high - low).clamp_min(1e-6) / MOST
        zero = (-low / scale).round()
        integers = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, MOST).reshape(weight.shape)
        order = torch.tensor(AWQ_NIBBLES).argsort()
        for name, each in (("qweight", integers), ("qzeros", zero)):
            yield name, words(each.T.reshape(len(each.T), -1, len(order))[..., order].flatten(1))
        yield "scales", scale.T.half().contiguous()
        return
    order = torch.arange(inputs)
    if form == "gptq-act-order":
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
    rounded, scale = quantize(weight[:, order], BITS, group)  # the sorted inputs share scales
    integers = (rounded + MIDDLE)[order.argsort()]
    if form == "compressed-tensors":
        yield "weight_packed", words(integers.T)
        yield "weight_scale", scale.T.half().contiguous()
        yield "weight_shape", torch.tensor(weight.shape)
        return
    yield "qweight", words(integers.T).T.contiguous()
    yield "qzeros", words(torch.full_like(scale, MIDDLE - 1))  # stored less 1
    yield "scales", scale.half()
    yield "g_idx", (order.argsort() // group).int()


@click.command(help=__doc__)
@click.argument("form", type=click.Choice(list(FORMS)))
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--group", default=128, show_default=True, help="Inputs that share a scale.")
def main(form: str, model: str, out: Path, group: int) -> None:
    source = Source.parse(model)
    loaded = load_model(source, "fp32")
    head = loaded.get_output_embeddings()
    modules = [name for name, each in loaded.named_modules() if isinstance(each, nn.Linear) and each is not head]
    tied = loaded.all_tied_weights_keys
    tensors = {name: each.half() for name, each in loaded.state_dict().items() if name not in tied}
    for name in modules:
        tensors |= {f"{name}.{part}": each for part, each in packed(form, tensors.pop(f"{name}.weight").float(), group)}
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    settings = loaded.config.to_dict() | {"quantization_config": settings_of(form, group), "dtype": "float16"}
    (out / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    loaded.generation_config.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.location, **source.options).save_pretrained(out)


if __name__ == "__main__":
    main()
