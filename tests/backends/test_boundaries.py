"""What stages pass on is what the manifest says, or a bundle is refused when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from outrider.backends.open import open_bundle, open_engines
from outrider.engines.contract import Stage, Tensor
from outrider.errors import EngineError
from outrider.tests.support import build


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def bundle(request: pytest.FixtureRequest, tiny_export: Path, once: Callable[..., Path]) -> Path:
    name = f"tiny-stages-{request.param}"
    return once(name, lambda output: build(tiny_export, output, backend=request.param, stages="2"))


def passing(stages: list[Stage], tensors: list[Tensor]) -> list[Stage]:
    """The two stages with other tensors between them."""
    first, second = stages
    return [replace(first, gives=tensors), replace(second, takes=tensors)]


@pytest.mark.parametrize("change", ["narrower", "another type", "one more", "none"])
def test_a_boundary_that_is_not_what_the_manifest_says_is_refused(bundle: Path, change: str) -> None:
    """Else a session would read beyond what the stage before has given, or give it nothing to write to."""
    manifest, made = open_bundle(bundle)
    (tensor,) = made.stages[0].gives
    *rows, width = tensor.shape
    assert isinstance(width, int)
    stages = {
        "narrower": passing(made.stages, [replace(tensor, shape=(*rows, width // 2))]),
        "another type": passing(made.stages, [replace(tensor, dtype="float16")]),
        "one more": passing(made.stages, [tensor, replace(tensor, name="boundary.0.1")]),
        "none": passing(made.stages, []),
    }
    changed = msgspec.structs.replace(made, stages=stages[change])
    with pytest.raises(EngineError, match="is not the engine that the manifest describes: boundary"):
        open_engines(bundle, msgspec.structs.replace(manifest, build=changed), changed).session("target", batch=1)
