"""Stages of a bundle for ONNX Runtime compute what the export does, whether they are fused or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from outrider.backends.onnxruntime.fusion import fuse as fusion
from outrider.backends.rewriting.stages import cut
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import model_file
from outrider.engines.contract import BOUNDARY
from outrider.errors import EngineError
from outrider.export.pair import export_pair
from outrider.tests.runtime.stages import SLOTS, loaded, results
from outrider.tests.support import build, llama, write_checkpoint

UNFUSED = [({"batch": 65}, "fp32"), ({"device": "cuda"}, "fp32"), ({"device": "cuda"}, "int4")]


def wrong(model: ir.Model, ends: Sequence[int]) -> list[ir.Model]:
    """The stages of a model, of which the last one bounds what it takes."""
    stages = cut(model, ends)
    (taken,) = (each for each in stages[-1].graph.inputs if str(each.name).startswith(BOUNDARY))
    users = [*taken.uses()]
    bounded = ir.node("Tanh", [taken])
    bounded.outputs[0].type, bounded.outputs[0].shape = taken.type, taken.shape
    stages[-1].graph.insert_before(stages[-1].graph[0], bounded)
    for use in users:
        use.node.replace_input_with(use.idx, bounded.outputs[0])
    return stages


@pytest.mark.filterwarnings("ignore:the target stays as exported")
@pytest.mark.parametrize(("options", "precision"), [({}, "fp32"), *UNFUSED])
def test_a_wrong_cut_is_refused(
    trained_exports: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    precision: str,
) -> None:
    monkeypatch.setattr("outrider.backends.rewriting.stages.cut", wrong)
    with pytest.raises(EngineError, match="the rewritten target's results would differ by more than") as refused:
        build(trained_exports(precision), tmp_path / "bundle", stages="2", **options)
    assert refused.value.hint.startswith("build the export without --stages")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("options", "precision"), UNFUSED)
def test_stages_that_are_not_fused_compute_the_same(
    trained_exports: Callable[[str], Path], tmp_path: Path, options: dict[str, Any], precision: str
) -> None:
    made = read_manifest(build(trained_exports(precision), tmp_path / "bundle", stages="2", **options)).build
    assert made is not None
    assert len(made.stages) == 2
    assert "target" not in made.rewrites


@pytest.mark.filterwarnings("ignore:the target stays as exported")
def test_stages_of_which_one_is_not_fused_all_stay_as_they_were_cut(
    trained_exports: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is loaded once for the whole build, and what is left of an attempt to fuse it is not written."""
    fuse, load, loaded = fusion.fuse, ir.load, list[str]()

    def failing(model: ir.Model, path: Path, *rest: Any) -> Any:
        if path.name == "layers-1-1.onnx":
            raise RuntimeError("it cannot be fused")
        return fuse(model, path, *rest)

    def counted(path: Path) -> ir.Model:
        loaded.append(str(path))
        return load(path)

    monkeypatch.setattr(fusion, "fuse", failing)
    monkeypatch.setattr(ir, "load", counted)
    export = trained_exports("fp32")
    bundle = build(export, tmp_path / "bundle", stages="2")
    assert loaded.count(str(export / model_file("target"))) == 1
    made = read_manifest(bundle).build
    assert made is not None
    for name in made.files("target"):
        assert {node.domain for node in load(bundle / name).graph} == {""}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("int4", marks=pytest.mark.slow)])
def test_sums_of_biased_layers_have_the_bits_of_the_whole(tmp_path: Path, precision: str) -> None:
    """A layer's bias is added before the residual stream, also where a norm follows that is fused with the sums."""
    model = llama(hidden_size=64, intermediate_size=96, mlp_bias=True, attention_bias=True)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # fresh biases are zeros
            parameter.data += torch.randn_like(parameter)
    export = tmp_path / "export"
    export_pair(str(write_checkpoint(tmp_path / "model", model)), None, export, precision=precision)
    made = [loaded(export, tmp_path / str(stages), stages) for stages in (None, "2")]
    assert [each.build.rewrites["target"]["norms of sums"] for each in made] == [4, 4]
    want, got = ([*map(np.array, results(each.engines.session("target", SLOTS)))] for each in made)
    for theirs, ours in zip(want, got, strict=True):
        np.testing.assert_array_equal(ours, theirs)
