"""Exports and bundles that several tests read: made once for all processes of a run, and never written to."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.export.checkpoints.checkpoint import open_model
from outrider.export.checkpoints.source import Source
from outrider.export.graph.step_model import trace
from outrider.export.pair import export_pair
from outrider.export.parity import reference
from outrider.runtime.generation import Outrider
from outrider.tests.drafts import parallel_draft, plain_block_head, random_block_head, random_head, random_parallel_head
from outrider.tests.samplers import Graphs, sampler_graphs
from outrider.tests.support import HYBRID, PAIR, SHIPPED, broken_export, build, llama, run, write_checkpoint
from outrider.tests.traces import share_traces

torch.set_num_threads(2)
gc.freeze()  # what torch and transformers have loaded is not looked through again

Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of the run share."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session", autouse=True)
def _traces(shared: Path, pytestconfig: pytest.Config) -> None:
    """Share traces in `make test`; `make test-all` shares none."""
    if pytestconfig.option.markexpr == "not slow":
        share_traces(shared / "traces")


@functools.cache
def _freeze() -> None:
    """Once more, for what torch loads when it first traces."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def once(shared: Path) -> Once:
    """Make a folder once for all processes of the run: `once(name, make)` calls `make(path)` in the first that asks."""
    root = Path(os.environ.get("OUTRIDER_TEST_FOLDERS", shared))  # those of another run, for tests/mutants/plant.py

    def made(name: str, make: Callable[[Path], object]) -> Path:
        output = root / name
        with filelock.FileLock(f"{output}.lock"):
            if not output.exists():
                partial = root / f"{name}.making"  # a test that fails half-way leaves nothing that looks whole
                shutil.rmtree(partial, ignore_errors=True)
                make(partial)
                partial.rename(output)
                _freeze()
        return output

    return made


@pytest.fixture(scope="session")
def checkpoints(once: Once) -> Path:
    """Return the folder of two tiny random Llamas with one vocabulary: `target` and `draft`."""

    def make(folder: Path) -> None:
        write_checkpoint(folder / "target", llama(seed=0))
        write_checkpoint(folder / "draft", llama(seed=1, num_hidden_layers=1))

    return once("checkpoints", make)


@pytest.fixture(scope="session")
def tiny_exports(checkpoints: Path, once: Once) -> Callable[[str], Path]:
    """Return a function from a precision to the tiny random pair's export in it."""

    def made(precision: str) -> Path:
        target, draft = str(checkpoints / "target"), str(checkpoints / "draft")
        return once(f"tiny-{precision}", lambda output: export_pair(target, draft, output, precision=precision))

    return made


@pytest.fixture(scope="session")
def tiny_export(tiny_exports: Callable[[str], Path]) -> Path:
    """Return the export of the tiny random pair."""
    return tiny_exports("fp32")


@pytest.fixture(scope="session")
def tiny_bundle(tiny_export: Path, once: Once) -> Path:
    """Return the bundle of the tiny random pair."""
    return once("tiny-bundle", lambda output: build(tiny_export, output))


@pytest.fixture(scope="session")
def rtx_bundle(tiny_export: Path, once: Once) -> Path:
    """Return the bundle of the tiny random pair for TensorRT-RTX, in a folder with what the command wrote."""

    def make(folder: Path) -> None:
        folder.mkdir()
        done = run(
            *("build-engine", tiny_export, "-o", folder / "bundle", "--backend", "tensorrt-rtx", "--batch", "3", "--k", "1,4"),
            *("--capacity", "100", "--compute-capability", "12.0,8.9", "--workspace", "1", "--optimization-level", "0"),
            *("--verbosity", "warning"),
        )
        assert done.returncode == 0, done.stderr
        (folder / "stdout").write_text(done.stdout)
        (folder / "stderr").write_text(done.stderr)

    return once("tiny-rtx", make) / "bundle"


@pytest.fixture(scope="session")
def graphs_of(once: Once) -> Callable[[str, Any], Path]:
    """Return a function from the name of an architecture and its configuration to a folder with a random checkpoint, `model`,
    and its graph, `fp32.onnx`."""

    def made(name: str, config: Any) -> Path:
        def make(folder: Path) -> None:
            torch.manual_seed(0)
            fresh = AutoModelForCausalLM.from_config(config)
            for parameter in fresh.parameters():  # fresh norms and biases are ones and zeros, which would hide mistakes
                if parameter.dim() == 1:
                    parameter.data += 0.1 * torch.randn_like(parameter)
            model, weights = open_model(Source.parse(str(write_checkpoint(folder / "model", fresh))), "fp32")
            layout = reference(model, torch.ones((1, 20), dtype=torch.int64)).layout
            with weights.tracing():
                program = trace(model, layout)
                weights.attach(program.model.graph)
            program.save(folder / "fp32.onnx", external_data=True)

        return once(f"graph-of-{re.sub('[^a-zA-Z0-9]', '', name)}", make)

    return made


@pytest.fixture(scope="session")
def broken(once: Once) -> Path:
    """Return an export in which some tokens lead to logits that contain NaN."""
    return once("broken-onnx", broken_export)


@pytest.fixture(scope="session")
def broken_bundle(broken: Path, once: Once) -> Path:
    """Return the bundle of that export."""
    return once("broken-bundle", lambda output: build(broken, output))


@pytest.fixture(scope="session")
def trained_exports(once: Once) -> Callable[[str], Path]:
    """Return a function from a precision to the export of `tests/pair` in it."""

    def made(precision: str) -> Path:
        target, draft = str(PAIR / "target"), str(PAIR / "draft")
        return once(f"trained-{precision}", lambda output: export_pair(target, draft, output, precision=precision))

    return made


@pytest.fixture(scope="session")
def wide_exports(once: Once) -> Callable[[str], Path]:
    """Return a function from a precision to the export in it of a random target as wide as the shipped one: kernels divide
    such matrices into blocks, and small ones not."""

    def made(precision: str) -> Path:
        def make(output: Path) -> None:
            sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
            model = llama(**sizes, num_key_value_heads=4, num_hidden_layers=1)
            checkpoint = write_checkpoint(output.with_name(f"wide-{precision}-model"), model)
            export_pair(str(checkpoint), None, output, precision=precision)

        return once(f"wide-{precision}", make)

    return made


@pytest.fixture(scope="session")
def self_export(once: Once) -> Path:
    """Return the export of that target as its own draft."""
    target = str(PAIR / "target")
    return once("trained-self", lambda output: export_pair(target, target, output, precision="fp32"))


@pytest.fixture(scope="session")
def trained_bundles(trained_exports: Callable[[str], Path], once: Once) -> Callable[..., Path]:
    """Return a function from a precision, and what `build` takes, to a bundle of that pair."""

    def made(precision: str = "fp32", **options: Any) -> Path:
        named = "".join(f"-{key}={value}".replace(" ", "") for key, value in sorted(options.items()))
        return once(f"trained-bundle-{precision}{named}", lambda output: build(trained_exports(precision), output, **options))

    return made


@pytest.fixture(scope="session")
def drafter_exports(once: Once) -> Callable[[str, str], Path]:
    """Return a function from a precision and a drafter to an export of that pair with the drafter beside its draft."""

    def made(precision: str, drafter: str) -> Path:
        makers = {
            "random head": random_head,
            "random parallel": parallel_draft,
            "random parallel-head": random_parallel_head,
            "random block": random_block_head,
            "plain block": plain_block_head,
        }
        kind, what = drafter.split()
        source = PAIR / what if kind == "trained" else once(drafter.replace(" ", "-"), makers[drafter])
        target, drafts = str(PAIR / "target"), [str(PAIR / "draft"), str(source)]
        name = f"{what}-{kind}-{precision}"
        return once(name, lambda output: export_pair(target, drafts, output, precision=precision))

    return made


@pytest.fixture(scope="session")
def named_exports(
    shipped_export: Path, trained_exports: Callable[[str], Path], drafter_exports: Callable[[str, str], Path], once: Once
) -> Callable[[str], Path]:
    """Return a function from a name to an export: "shipped", or a precision and "pair", "hybrid" or a drafter."""

    def made(name: str) -> Path:
        precision, _, what = name.partition(" ")
        if name == "shipped":
            return shipped_export
        if what == "hybrid":
            return once(f"hybrid-{precision}", lambda output: export_pair(str(HYBRID), None, output, precision=precision))
        return trained_exports(precision) if what == "pair" else drafter_exports(precision, what)

    return made


@pytest.fixture(scope="session")
def drafter_bundles(drafter_exports: Callable[[str, str], Path], once: Once) -> Callable[..., Path]:
    """Return a function from a precision and a drafter, and what `build` takes, to a bundle of that export."""

    def made(precision: str, drafter: str, **options: Any) -> Path:
        named = "".join(f"-{key}={value}".replace(" ", "") for key, value in sorted(options.items()))
        name = f"{drafter.replace(' ', '-')}-bundle-{precision}{named}"
        return once(name, lambda output: build(drafter_exports(precision, drafter), output, **options))

    return made


@pytest.fixture(scope="session")
def shipped_export(once: Once) -> Path:
    """Return the export of the shipped pair."""
    target, draft = str(SHIPPED / "target"), str(SHIPPED / "draft")
    return once("shipped", lambda output: export_pair(target, draft, output, precision="fp32"))


@pytest.fixture(scope="session")
def trained_export(trained_exports: Callable[[str], Path]) -> Path:
    """Return the export of that pair."""
    return trained_exports("fp32")


@pytest.fixture(scope="session")
def trained_bundle(trained_bundles: Callable[..., Path]) -> Path:
    """Return the bundle of that pair, with the capacity that it was trained for."""
    return trained_bundles(capacity=512)


@pytest.fixture(scope="session")
def tiny(tiny_bundle: Path) -> Outrider:
    return Outrider.load(tiny_bundle)


@pytest.fixture(scope="session")
def trained(trained_bundle: Path) -> Outrider:
    return Outrider.load(trained_bundle)


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return sampler_graphs(tmp_path_factory.mktemp("samplers"))
