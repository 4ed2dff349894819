"""Ray clusters, and bundles whose stages run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.tests.nodes import ray_nodes
from outrider.tests.runtime.ray_bundles import EXPORTS, MACHINE, STAGES, Bundles
from outrider.tests.runtime.stages import loaded
from outrider.tests.support import Made


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Room for two stages on the node of this process, which has the last one, or on a node for each."""
    with ray_nodes(2, 0) if request.param == MACHINE else ray_nodes(0, 2):
        yield


@pytest.fixture(scope="module")
def bundles(named_exports: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Made[Bundles]:
    folder = tmp_path_factory.mktemp("ray")

    def make(name: str) -> Bundles:
        backend = "openvino" if name == "openvino" else "onnxruntime"
        source, made = named_exports(EXPORTS[name]), Bundles(folder / f"{name} whole", folder / f"{name} staged")
        for path, stages in zip(made, (None, STAGES.get(name, "2")), strict=True):
            loaded(source, path, stages, backend=backend).close()
        return made

    return Made(make)
