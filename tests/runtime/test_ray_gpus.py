"""Stages on GPUs that Ray gives to their actors; the GPUs only behave as such."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import ray

from outrider import Outrider
from outrider.backends.onnxruntime.backend import OnnxRuntimeBackend
from outrider.tests.deferred import deferred, opened, pretend
from outrider.tests.nodes import hosts, ray_nodes
from outrider.tests.runtime.stages import CAPACITY, CHUNK, SLOTS, K, alone, at_once, together
from outrider.tests.support import build

pytestmark = pytest.mark.slow
SIZES = {"k": [*K], "capacity": CAPACITY, "batch": SLOTS, "max_prompt_chunk": CHUNK}


def test_each_stage_on_a_gpu_gets_one_from_ray(shipped_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, the first asks for one, the second is on a CPU, and the last one's is that of the process that decodes."""
    whole = deferred(build(shipped_export, tmp_path / "whole", device="cuda", **SIZES), slots=SLOTS)
    staged = build(shipped_export, tmp_path / "staged", stages="3", stage_devices=("cuda:1", "cpu", "cuda:0"), **SIZES)
    monkeypatch.setattr(OnnxRuntimeBackend, "open", opened)
    with ray_nodes(0, 2, gpus=1, setup=pretend), closing(Outrider.load(staged, slots=None, stage_cores=1)) as outrider:
        assert len(hosts()) == 2
        assert ray.cluster_resources()["GPU"] == 2
        assert ray.available_resources()["GPU"] == 1
        want = alone(whole, 0, None, 8)
        for k in (0, 4, "auto"):
            assert alone(outrider, k, None, 8) == want, k
        assert at_once(outrider, 4, 8) == want
        assert together(outrider, "auto") == together(whole, 0)
