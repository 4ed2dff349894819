"""`outrider verify` on a target in stages: every way passes a right bundle, and fails one whose stages pass on wrong values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from outrider.audit.audit import CONTROLLED, MASKED, Scope, audit
from outrider.audit.prompts import PROMPTS
from outrider.audit.report import Audit
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import step_file
from outrider.runtime.generation import Outrider
from outrider.tests.support import PAIR, reseal, run_here

OTHERS = ("openvino", "onnxruntime,openvino", "openvino,onnxruntime")
FEW = Scope(PROMPTS[:1], MASKED[1:2], (CONTROLLED,), length=16, controls=False)


@pytest.fixture(scope="module", params=["onnxruntime", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def staged(request: pytest.FixtureRequest, trained_bundles: Callable[..., Path]) -> Path:
    *mixed, last = request.param.split(",")
    backends = {"stage_backends": (*mixed, last)} if mixed else {"backend": last}
    return trained_bundles(capacity=255, k=[4], batch=2, stages="2", **backends)


@pytest.fixture(scope="module")
def damaged(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, sealed again, with a first stage that adds to what it passes on for each row of a pass but one."""
    copy = Path(shutil.copytree(staged, tmp_path_factory.mktemp("damaged") / "bundle"))
    made = read_manifest(copy).build
    assert made is not None
    path = copy / step_file("target", made.stages[0])
    model = onnx.load(path, load_external_data=False)
    given = made.stages[0].gives[0].name
    (node,) = (each for each in model.graph.node if given in each.output)
    node.output[[*node.output].index(given)] = "right"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.float32), "one"))
    for kind, inputs, output in (
        ("Size", ["input_ids"], "size"),
        ("Cast", ["size"], "rows"),
        ("Sub", ["rows", "one"], "more"),
        ("Add", ["right", "more"], given),
    ):
        model.graph.node.append(onnx.helper.make_node(kind, inputs, [output]))
    next(node for node in model.graph.node if node.output[0] == "rows").attribute.append(onnx.helper.make_attribute("to", 1))
    onnx.save(model, path)
    reseal(copy)
    return copy


def audited(bundle: Path) -> Audit:
    return audit(Outrider.load(bundle, slots=None), draws=2, scope=FEW)


def test_the_audit_passes_stages(staged: Path) -> None:
    report = audited(staged)
    assert report.passed
    assert report.batched is not None
    assert report.counters.accepted > 20
    assert not report.greedy.near_ties


def test_the_audit_fails_stages_whose_results_depend_on_the_rows_of_a_pass(damaged: Path) -> None:
    """Then a drafted token is not judged as the target alone would choose it."""
    report = audited(damaged)
    assert not report.passed
    failed = {name for name, passed in report.verdicts().items() if not passed}
    assert "batched" in failed
    assert "arithmetic" not in failed  # samplers decide rightly for what they are given


@pytest.mark.parametrize("option", ["--engines", pytest.param("--against", marks=pytest.mark.slow)])
def test_other_ways_to_verify_pass_right_stages_and_fail_wrong_ones(
    staged: Path, damaged: Path, trained_export: Path, option: str
) -> None:
    """The engines against those of the export, and the answers against those of transformers."""
    reference = trained_export if option == "--engines" else PAIR / "target"
    for bundle, right in ((staged, True), (damaged, False)):
        done = run_here("verify", bundle, option, reference, "--json")
        assert (done.returncode, json.loads(done.stdout)["passed"]) == (0 if right else 1, right), done.stdout
