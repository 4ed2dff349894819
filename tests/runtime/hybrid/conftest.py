"""Checkpoints, exports and bundles of the target with recurrent layers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.tests.runtime.hybrid.hybrids import SHORT, K, endless
from outrider.tests.support import HYBRID, Made


def shorten(folder: Path) -> None:
    """Copy the target with its first and its last layer alone."""
    shutil.copytree(HYBRID, folder)
    config, tensors = json.loads((HYBRID / "config.json").read_text()), load_file(HYBRID / "model.safetensors")
    last = config["num_hidden_layers"] - 1
    kept = {f"model.layers.{layer}.": f"model.layers.{at}." for at, layer in enumerate((0, last))}
    changes = {"num_hidden_layers": len(kept), "layer_types": [config["layer_types"][layer] for layer in (0, last)]}
    (folder / "config.json").write_text(json.dumps(config | changes))
    shortened = {name: each for name, each in tensors.items() if not name.startswith("model.layers.")}
    for old, new in kept.items():
        shortened |= {name.replace(old, new): each for name, each in tensors.items() if name.startswith(old)}
    save_file(shortened, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def targets(once: Callable[[str, Callable[[Path], object]], Path]) -> Made[Path]:
    """The checkpoints by precision."""
    return Made(lambda precision: once("hybrid-short", shorten) if precision == SHORT else HYBRID)


@pytest.fixture(scope="module")
def exports(targets: Made[Path], once: Callable[[str, Callable[[Path], object]], Path]) -> Made[Path]:
    """The target and its head by precision."""

    def make(precision: str) -> Path:
        source, kind = str(targets[precision]), "fp32" if precision == SHORT else precision
        return once(f"hybrid-{precision}", lambda folder: export_pair(source, None, folder, precision=kind))

    return Made(make)


@pytest.fixture(scope="module")
def bundles(exports: Made[Path], once: Callable[[str, Callable[[Path], object]], Path]) -> Made[Path]:
    """Their bundles."""
    return Made(lambda precision: once(f"hybrid-bundle-{precision}", lambda folder: endless(exports[precision], folder, K)))


@pytest.fixture(scope="module")
def loaded(bundles: Made[Path]) -> Made[Outrider]:
    return Made(lambda precision: Outrider.load(bundles[precision]))
