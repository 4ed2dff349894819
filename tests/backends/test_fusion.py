"""Bundles that are fused for ONNX Runtime: they compute what their exports do, and what cannot be fused stays as exported."""

from __future__ import annotations

import builtins
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from outrider.backends.comparison import check_same
from outrider.backends.onnxruntime.fuse_bundle import fuse_bundle
from outrider.backends.onnxruntime.fusion.attention import GroupQueryAttention
from outrider.backends.onnxruntime.fusion.fuse import fuse
from outrider.backends.open import open_bundle, open_engines
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import Build, model_file
from outrider.errors import OutriderWarning
from outrider.progress import SILENT
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.backends.fused_graphs import CAPACITY, operators
from outrider.tests.support import build, run_here


def made_of(bundle: Path) -> Build:
    made = read_manifest(bundle).build
    assert made is not None
    return made


def test_every_layer_is_fused(trained_bundle: Path) -> None:
    layers = {"target": 2, "draft": 2}
    for role, count in layers.items():
        found = operators(trained_bundle / role / "model.onnx")
        assert found["GroupQueryAttention"] == count
        assert (found["SimplifiedLayerNormalization"], found["SkipSimplifiedLayerNormalization"]) == (1, 2 * count)
        assert not found.keys() & {"Attention", "TensorScatter", "RotaryEmbedding", "Neg", "Pow"}
        assert made_of(trained_bundle).rewrites[role] == {
            "norms": 2 * count + 1,
            "norms of sums": 2 * count,
            "rotary embeddings": 2 * count,
            "attention": count,
            "heads joined": count,
            "logits of some rows": 1,
        }
    shown = run_here("inspect", trained_bundle)
    assert "5 norms, 4 norms of sums" in shown.stdout


def test_the_fused_graphs_compute_what_the_exported_ones_do(tiny_bundle: Path, tiny_export: Path) -> None:
    done = run_here("verify", tiny_bundle, "--engines", tiny_export)
    assert done.returncode == 0, done.stdout
    assert "the engines agree with ONNX Runtime" in done.stdout


def test_each_sequence_of_a_batch_has_its_own_attention(tiny_export: Path, tmp_path: Path) -> None:
    bundle = build(tiny_export, tmp_path / "bundle", batch=3)
    assert made_of(bundle).rewrites["target"]["attention"] == 2
    found = operators(bundle / "target" / "model.onnx")
    assert found["GroupQueryAttention"] == 3 * 2
    assert not found.keys() & {"Attention", "TensorScatter"}
    plain = operators(build(tiny_export, tmp_path / "plain") / "target" / "model.onnx")
    assert found["MatMul"] == plain["MatMul"]


@pytest.mark.parametrize(("precision", "rewritten"), [("fp16", True), pytest.param("fp32", False, marks=pytest.mark.slow)])
def test_for_cuda_attention_has_no_mask(
    trained_exports: Callable[[str], Path], tmp_path: Path, precision: str, rewritten: bool
) -> None:
    """It is compared with the exported one over ragged batches on the CPU, whose kernels have the same semantics."""
    export = trained_exports(precision)
    folder, manifest = Path(shutil.copytree(export, tmp_path / "bundle")), read_manifest(export)
    build = Build("onnxruntime", "", "cuda", k=[1, 4], capacity=128, batch=3, max_prompt_chunk=16, windows=[64, 128])
    counts = fuse_bundle(export, folder, manifest, build, SILENT)
    assert counts == ({role: {"attention without a mask": n} for role, n in (("target", 2), ("draft", 2))} if rewritten else {})
    graph = onnx.load(folder / "target" / "model.onnx", load_external_data=False).graph
    attention = [node for node in graph.node if node.op_type == "Attention"]
    assert [(len(node.input), node.input[3] == "") for node in attention] == [(7, True) if rewritten else (4, False)] * 2
    assert ("LessOrEqual" in operators(folder / "target" / "model.onnx")) != rewritten


def texts(bundle: Path) -> list[list[int]]:
    loaded = Outrider.load(bundle)
    params = SamplingParams(max_new_tokens=60)
    return [[t for event in loaded.generate("the quick", params, k=k) for t in event.token_ids] for k in (0, 4)]


def test_a_fused_graph_with_different_results_is_not_used(
    tiny_export: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(graph: ir.Model, output: Path, *sizes: Any) -> tuple[dict[str, int], list[str]]:
        done = fuse(graph, output, *sizes)
        model = onnx.load(output, load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "epsilon":
                    attribute.f = 10.0
        onnx.save(model, output)
        return done

    monkeypatch.setattr("outrider.backends.onnxruntime.fusion.fuse.fuse", wrong)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bundle = build(tiny_export, tmp_path / "bundle")
    messages = [str(each.message) for each in caught if each.category is OutriderWarning]
    assert [each.split(":")[0] for each in messages] == [
        f"the {role} stays as exported, which is slower" for role in ("target", "draft")
    ]
    assert all("would differ by more than" in each for each in messages)
    assert made_of(bundle).rewrites == {}
    assert "Attention" in operators(bundle / "target" / "model.onnx")
    assert texts(bundle) == texts(tiny_bundle)


def test_without_the_packages_that_fuse_it_says_what_to_install(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name == "outrider.backends.onnxruntime.fusion.fuse":
            raise ImportError("No module named 'onnxscript'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.warns(OutriderWarning, match=r"stay as exported, which is slower: .*; pip install 'outrider\[build\]'"):
        bundle = build(tiny_export, tmp_path / "bundle")
    assert made_of(bundle).rewrites == {}
    open_bundle(bundle)


def test_there_is_no_warning_if_everything_is_fused(tiny_export: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bundle = build(tiny_export, tmp_path / "bundle")
    assert made_of(bundle).rewrites["target"]["attention"] == 2
    assert not (bundle / "fused").exists()
    assert not (bundle / "final").exists()
    assert np.array_equal(texts(bundle)[0], texts(bundle)[1])


@pytest.mark.parametrize("precision", ["int4", pytest.param("int8", marks=pytest.mark.slow)])  # test_onnxruntime_rows.py has it
def test_a_row_has_the_same_bits_alone_and_batched(
    trained_exports: Callable[[str], Path], tmp_path: Path, precision: str
) -> None:
    """Alone, or in a pass of 2, 3, 5, 9 or 64 rows: what makes speculative text plain text where activations are rounded."""
    bundle = build(trained_exports(precision), tmp_path / "bundle", max_prompt_chunk=64)
    assert made_of(bundle).rewrites["target"]["attention"] == 2
    assert operators(bundle / "target" / "model.onnx")["MatMulNBits"] == 2 * 4 + 1
    session = open_engines(bundle, *open_bundle(bundle)).session("target", batch=1)
    ids = np.random.default_rng(0).integers(0, session.vocab_rows, (1, CAPACITY))

    def logits(rows: int) -> np.ndarray:
        session.run(ids[:, :16], np.array([0]))
        passes = [session.run(ids[:, at : at + rows], np.array([at]))[0].copy() for at in range(16, CAPACITY - rows + 1, rows)]
        return np.concatenate(passes)[:135]

    alone = logits(1)
    for rows in (2, 3, 5, 9, 64):
        found = logits(rows)
        np.testing.assert_array_equal(found, alone[: len(found)])
    for at in (0, 64):  # and so are the caches, which the next prompt may continue from
        session.write(ids[:, at : at + 64], np.array([at]))
    np.testing.assert_array_equal(session.run(ids[:, 128:129], np.array([128]))[0], alone[112:113])
    np.testing.assert_array_equal(session.run(ids[:, -1:], np.array([CAPACITY - 1])).shape, (1, 1, session.vocab_rows))

    # Beside other sequences, at another place in each, in any slots.
    many = build(trained_exports(precision), tmp_path / "many", batch=4)
    batched = open_engines(many, *open_bundle(many)).session("target", 4)
    assert made_of(many).rewrites["target"]["attention"] == 2
    for slot, begin in enumerate((16, 40, 64, 90)):
        for at in range(0, begin, 16):
            batched.write(ids[:, at : min(at + 16, begin)], np.array([at]), slot)
    for first, begins in ((0, (16, 40, 64, 90)), (1, (40, 64)), (2, (64, 90)), (3, (90,)), (0, (16,))):
        for rows in (1, 2, 5):
            given = np.concatenate([ids[:, at : at + rows] for at in begins])
            for found, at in zip(batched.run(given, np.array(begins), first), begins, strict=True):
                np.testing.assert_array_equal(found, alone[at - 16 : at - 16 + rows])


def test_attention_that_is_not_fused_is_reported(tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupQueryAttention, "check", lambda self, context, **_: self.refuse("a shape that nobody has seen"))
    message = "attention of 2 of 2 layers of the target stays as exported, which is slower: it has a shape that nobody has seen"
    with pytest.warns(OutriderWarning) as caught:
        build(tiny_export, tmp_path / "bundle")
    assert message in [str(each.message) for each in caught]


def test_a_graph_that_cannot_be_rewritten_stays_as_exported(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object) -> dict[str, int]:
        raise KeyError("a node of a kind that nobody has seen")

    monkeypatch.setattr("outrider.backends.onnxruntime.fusion.fuse.fuse", stumble)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bundle = build(tiny_export, tmp_path / "bundle")
    assert any("the target stays as exported, which is slower: 'a node" in str(each.message) for each in caught)
    assert made_of(bundle).rewrites == {}
    assert {each.name for each in bundle.iterdir()} >= {"target", "draft", "sampler"}


def test_a_head_that_stays_as_exported_keeps_its_weights(
    drafter_exports: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it has in common with the target are in the target's file, which is replaced."""

    def without_the_head(graph: ir.Model, output: Path, *sizes: Any) -> tuple[dict[str, int], list[str]]:
        if output.name == Path(model_file("head")).name:
            raise KeyError("a node of a kind that nobody has seen")
        return fuse(graph, output, *sizes)

    monkeypatch.setattr("outrider.backends.onnxruntime.fusion.fuse.fuse", without_the_head)
    with pytest.warns(OutriderWarning, match="the head stays as exported"):
        bundle = build(drafter_exports("fp32", "trained head"), tmp_path / "bundle")
    assert made_of(bundle).rewrites.keys() == {"target", "draft"}
    check_same(drafter_exports("fp32", "trained head"), open_engines(bundle, *open_bundle(bundle)), "head")
