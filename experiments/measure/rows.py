"""Tell whether a row of quantized weights has the same bits alone and among others, and print a Markdown table.

Takes bundles, or a folder with a tokenizer. With that, it writes a random model with weights of each form in groups of several
sizes, exports it as it is, with blocks of the default size and of at most 128 inputs, and builds it for both CPU backends.

A row runs alone, among 2 to 16 rows, and beside another sequence. "in pairs" means that the kernels for one row give other
bits, so that the backend runs a second row beside it; "no" means that the bits depend on the number of rows even so.
"""

from __future__ import annotations

import datetime
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import click
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import outrider.backends.openvino.session as paged
from outrider.backends.onnxruntime import engine
from outrider.backends.open import open_bundle, open_engines
from outrider.builder.build import build_engine
from outrider.bundle.manifest import MANIFEST
from outrider.engines.threads import processor_name, thread_count
from outrider.experiments.measure.arguments import FOLDER
from outrider.export.pair import export_pair
from outrider.export.weights.rounding import AS_IS, BLOCKS

BACKENDS = ("onnxruntime", "openvino")
FORMS = {
    "int4": (4, False, False),
    "int4, act-order": (4, False, True),
    "uint4, zero points": (4, True, False),
    "uint4, zero points, act-order": (4, True, True),
    "int8": (8, False, False),
    "uint8, zero points": (8, True, False),
}
WIDTH, INNER = 512, 1536  # inputs of the products: several blocks of 128
SLOTS, BEGIN, ROWS, CAPACITY = 2, 16, 16, 64
COUNTS = (1, 2, 3, 4, 5, 9)  # rows of a pass


class Group(NamedTuple):
    """Inputs that share a scale."""

    inputs: int | None  # in the checkpoint; None for all of an output
    block: int | None  # at most in the kernels; None for the default


GROUPS = [Group(32, None), *(Group(size, most) for size in (64, 128, None) for most in (None, BLOCKS[0]))]


@click.command(help=__doc__)
@click.argument("sources", type=FOLDER, nargs=-1, required=True, metavar="SOURCE...")
def command(sources: tuple[Path, ...]) -> None:
    print(f"| weights | groups | blocks | {' | '.join(BACKENDS)} |\n|---|---|---|---|---|")
    for source in sources:
        if (source / MANIFEST).exists():
            _, build = open_bundle(source)
            cells = [outcome(source) if build.backend == each else "-" for each in BACKENDS]
            print(f"| {source.name} | - | - | {' | '.join(cells)} |", flush=True)
            continue
        for form in FORMS:
            for group in GROUPS:
                with tempfile.TemporaryDirectory() as folder:
                    cells = [outcome(bundle) for bundle in bundles(source, form, group, Path(folder))]
                block = min(group.inputs or INNER, group.block or min(BLOCKS))
                print(f"| {form} | {group.inputs or 'one for an output'} | {block} | {' | '.join(cells)} |", flush=True)
    print(f"\n{processor_name()}, {thread_count()} threads, {datetime.date.today()}")


def bundles(tokenizer: Path, form: str, group: Group, folder: Path) -> Iterator[Path]:
    """Yield the bundles of a random model with weights of a form."""
    write(tokenizer, folder / "model", *FORMS[form], group.inputs)
    export_pair(str(folder / "model"), None, folder / "onnx", precision=AS_IS, group_size=group.block)
    for backend in BACKENDS:
        build_engine(folder / "onnx", folder / backend, backend=backend, k=[1], capacity=CAPACITY, batch=SLOTS)
        yield folder / backend


def write(tokenizer: Path, folder: Path, bits: int, zeros: bool, order: bool, group: int | None) -> None:
    """Write a random Llama whose products have packed weights, as compressed-tensors stores them, perhaps with act-order."""
    torch.manual_seed(0)
    vocabulary = AutoConfig.from_pretrained(tokenizer).vocab_size
    sizes = {"vocab_size": vocabulary, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))
    tensors, words = dict[str, torch.Tensor](), 32 // bits

    def packed(integers: torch.Tensor) -> torch.Tensor:
        places = bits * torch.arange(words)
        return (integers.reshape(len(integers), -1, words).long() << places).sum(-1).to(torch.int32)

    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "lm_head")):
            tensors[name] = tensor.contiguous()
            continue
        groups = tensor.shape[1] // (group or tensor.shape[1])
        stored = {
            "weight_packed": packed(torch.randint(2**bits, tensor.shape)),
            "weight_scale": ((1 + torch.rand(len(tensor), groups)) * 0.04 / 2**bits).half(),
            "weight_shape": torch.tensor(tensor.shape),
        }
        if order:
            stored["weight_g_idx"] = (torch.randperm(tensor.shape[1]) * groups // tensor.shape[1]).int()
        if zeros:
            stored["weight_zero_point"] = packed(torch.randint(2**bits, (groups, len(tensor)))).T.contiguous()
        tensors |= {f"{module}.{part}": each for part, each in stored.items()}
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    scheme = {"num_bits": bits, "type": "int", "symmetric": not zeros}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": scheme}}}
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def outcome(bundle: Path) -> str:
    """Return whether the target's rows have the same bits in every pass."""
    if not same(bundle):
        return "no"
    with ExitStack() as stack:  # without the second row
        stack.enter_context(patch.object(engine, "lone_rows_differ", lambda _: False))
        stack.enter_context(patch.object(paged, "FEWEST", 1))
        return "yes" if same(bundle) else "in pairs"


def same(bundle: Path) -> bool:
    """Return whether rows have the same bits in passes of different sizes."""
    manifest, build = open_bundle(bundle)
    session = open_engines(bundle, manifest, build).session("target", build.batch)
    ids = np.random.default_rng(0).integers(0, manifest.vocab_tokens, (1, BEGIN + ROWS))
    for slot in range(build.batch):
        session.write(ids[:, :BEGIN], np.array([0]), slot)
    want = session.run(ids[:, BEGIN:], np.array([BEGIN]), 0)[0].copy()
    found = [
        np.array_equal(each, want[:count])
        for count in COUNTS
        for slots in {1, build.batch}
        for each in session.run(np.repeat(ids[:, BEGIN : BEGIN + count], slots, 0), np.full(slots, BEGIN), 0)
    ]
    for row in range(ROWS):
        at = BEGIN + row
        found.append(np.array_equal(session.run(ids[:, at : at + 1], np.array([at]), 0)[0, 0], want[row]))
    return all(found)
