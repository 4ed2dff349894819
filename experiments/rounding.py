"""Compares ways to round weights to 4 bits.

`python -m outrider.experiments.rounding TARGET DRAFT TEXTS.jsonl CALIBRATION.jsonl`, over files of prompts as for
`outrider bench --workload`, prints the table of docs/explanation/step-model.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.backends.onnxruntime.engine import CPU
from outrider.backends.onnxruntime.pool import session_options
from outrider.backends.rewriting.matching import MICROSOFT
from outrider.builder.workloads import load
from outrider.export import heldout
from outrider.export.weights.quantize import MIN_IMPORTANCE, SCALE_FACTORS

ZERO_POINT_FACTORS = (0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
WIDTHS = (1536, 8960)  # of the timed product: a feed-forward layer of Qwen2.5-Coder-1.5B
RUNS = 200


class Way(NamedTuple):
    """A way to round."""

    zero_points: bool  # a block's integers may lie around any number, not only around 0
    activations: bool  # an error counts by the mean square of the input that it is multiplied by


WAYS = {
    "symmetric": Way(False, False),
    "symmetric, by activations": Way(False, True),
    "zero points": Way(True, False),
    "zero points, by activations": Way(True, True),
}


def rounded(weight: torch.Tensor, block: int, way: Way, squares: torch.Tensor) -> torch.Tensor:
    """Return weights, float32 [N, K], as 4-bit integers in blocks of `block` inputs would have them.

    Scales are tried and refitted as in `quantize`.

    Args:
        squares: float32 [K], the mean square of each input.
    """
    blocks = weight.reshape(len(weight), -1, block)
    greatest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    importance = blocks.abs() / greatest + MIN_IMPORTANCE
    if way.activations:
        importance = importance * (squares / squares.mean()).reshape(-1, block)
    low, high = blocks.amin(-1, keepdim=True).clamp_max(0), blocks.amax(-1, keepdim=True).clamp_min(0)
    best, result = torch.full_like(greatest, -1.0), torch.zeros_like(blocks)
    for factor in ZERO_POINT_FACTORS if way.zero_points else SCALE_FACTORS[4]:
        if way.zero_points:
            step = (high - low).clamp_min(1e-30) / (15 * factor)
            zero = (-low / step).round().clamp(0, 15)
            integers = ((blocks / step).round() + zero).clamp(0, 15) - zero
        else:
            integers = (blocks * (7 * factor / greatest)).round().clamp(-8, 7)
        fit = (importance * blocks * integers).sum(-1, keepdim=True)
        power = (importance * integers.square()).sum(-1, keepdim=True)
        gain = torch.where(power > 0, fit.square() / power, 0.0)
        result = torch.where(gain > best, torch.where(power > 0, fit / power, 0.0) * integers, result)
        best = torch.maximum(best, gain)
    return result.reshape(weight.shape)


def mean_squares(model: PreTrainedModel, texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean square of each input of each linear layer, float32 [K], over some texts int64 [1, S]."""
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def add(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            sums[name] = sums.get(name, torch.zeros(())) + inputs[0].flatten(0, -2).square().sum(0)

        return add

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers(model)]
    for text in texts:
        model(text)
    for hook in hooks:
        hook.remove()
    return {name: total / sum(text.numel() for text in texts) for name, total in sums.items()}


def layers(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """Return the layers that are rounded to 4 bits: all linear ones but the head, by name."""
    head = model.get_output_embeddings()
    return [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head]


def read(path: Path, tokenizer: object) -> list[torch.Tensor]:
    """Return the texts of a file, int64 [1, S]."""
    tokens = (tokenizer(each.prompt, return_tensors="pt").input_ids for each in load(path))  # type: ignore[operator]
    return [each for each in tokens if each.shape[1] > 1]


def log_probabilities(model: PreTrainedModel, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the log probabilities of the tokens after each one, float32 [S, V] of each text."""
    return [model(text).logits[0].float().log_softmax(-1) for text in texts]


def perplexity(found: list[torch.Tensor], texts: list[torch.Tensor]) -> float:
    """Return the perplexity of texts under `log_probabilities`."""
    known = torch.ones(found[0].shape[1], dtype=torch.bool)
    return heldout.perplexity((each.numpy() for each in found), texts, known)


def acceptance(target: list[torch.Tensor], draft: list[torch.Tensor]) -> float:
    """Return the mean probability that a token drawn from the draft is accepted: the sum of min(p, q) (arXiv:2211.17192)."""
    rows = [torch.minimum(p.exp(), q.exp()).sum(-1) for p, q in zip(target, draft, strict=True)]
    return float(torch.cat(rows).mean())


def product_times(block: int) -> dict[bool, dict[int, float]]:
    """Return the milliseconds of ONNX Runtime's product, without and with zero points, by rows. The runs alternate."""
    inputs, outputs = WIDTHS
    random = np.random.default_rng(0)
    weights = random.integers(0, 256, (outputs, inputs // block, block // 2), dtype=np.uint8)
    scales = random.random(outputs * inputs // block, dtype=np.float32)
    zeros = random.integers(0, 256, outputs * (inputs // block // 2), dtype=np.uint8)
    sessions = {}
    for zero_points in (False, True):
        x = ir.Value(name="x", shape=ir.Shape(["rows", inputs]), type=ir.TensorType(ir.DataType.FLOAT))
        parts: dict[str, npt.NDArray[Any]] = {"weights": weights, "scales": scales}
        parts |= {"zeros": zeros} if zero_points else {}
        constants = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in parts.items()]
        sizes = {"K": inputs, "N": outputs, "bits": 4, "block_size": block, "accuracy_level": 4}
        node = ir.node("MatMulNBits", [x, *constants], sizes, domain=MICROSOFT)
        node.outputs[0].name = "y"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        opsets = {"": 21, MICROSOFT: 1}
        graph = ir.Graph([x], node.outputs, nodes=[node], initializers=constants, opset_imports=opsets, name="product")
        model = ir.serde.serialize_model(ir.Model(graph, ir_version=10)).SerializeToString()
        sessions[zero_points] = onnxruntime.InferenceSession(model, session_options(), providers=[CPU])
    medians: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for rows in (1, 5, 64):
        activations = random.random((rows, inputs), dtype=np.float32)
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(RUNS):
            for zero_points, session in sessions.items():
                started = time.perf_counter()
                session.run(None, {"x": activations})
                times[zero_points].append(1000 * (time.perf_counter() - started))
        for zero_points, each in times.items():
            medians[zero_points][rows] = statistics.median(each)
    return medians


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target")
@click.argument("draft")
@click.argument("texts", type=click.Path(path_type=Path, exists=True))
@click.argument("calibration", type=click.Path(path_type=Path, exists=True))
@click.option("--group-size", "sizes", type=int, multiple=True, default=(32, 128), show_default=True)
@torch.no_grad()
def main(target: str, draft: str, texts: Path, calibration: Path, sizes: tuple[int, ...]) -> None:
    """Print perplexities and acceptance of a pair by way of rounding, and the time of a product."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    read_texts, learned = read(texts, tokenizer), read(calibration, tokenizer)
    models = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (target, draft)]
    squares = [mean_squares(model, learned) for model in models]
    kept = [{name: layer.weight.clone() for name, layer in layers(model)} for model in models]
    whole = [log_probabilities(model, read_texts) for model in models]
    print("| group | rounding | perplexity: target | draft | acceptance | milliseconds of a product: 1, 5, 64 rows |")
    print("|---|---|---|---|---|---|")
    first, second = (perplexity(each, read_texts) for each in whole)
    print(f"| - | none (fp32) | {first:.3f} | {second:.3f} | {acceptance(*whole):.4f} | - |")
    for size in sizes:
        times = product_times(size)
        for label, way in WAYS.items():
            found = []
            for model, weights, means in zip(models, kept, squares, strict=True):
                for name, layer in layers(model):
                    block = next(each for each in (size, 64, 32, layer.in_features) if layer.in_features % each == 0)
                    layer.weight.copy_(rounded(weights[name], block, way, means[name]))
                found.append(log_probabilities(model, read_texts))
            first, second = (perplexity(each, read_texts) for each in found)
            timed = ", ".join(f"{each:.2f}" for each in times[way.zero_points].values())
            print(f"| {size} | {label} | {first:.3f} | {second:.3f} | {acceptance(*found):.4f} | {timed} |", flush=True)


if __name__ == "__main__":
    main()
