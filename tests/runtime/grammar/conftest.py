"""Bundles that the tests of grammars share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.runtime.generation import Outrider
from outrider.tests.runtime.grammar.grammars import K
from outrider.tests.support import build


@pytest.fixture(scope="module")
def bundles(
    trained_bundles: Callable[..., Path],
    drafter_bundles: Callable[..., Path],
    self_export: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Outrider]:
    options: dict[str, Any] = {"capacity": 256, "max_prompt_chunk": 16, "k": list(K)}

    class Loaded(dict[str, Outrider]):
        def __missing__(self, name: str) -> Outrider:
            if name == "trained":
                bundle = trained_bundles("fp32", **options)
            elif name == "openvino":
                bundle = trained_bundles("fp32", backend="openvino", **options)
            elif name == "self":
                bundle = build(self_export, tmp_path_factory.mktemp("grammar") / "bundle", **options)
            else:
                bundle = drafter_bundles("int4" if name == "random head" else "fp32", name, **options)
            self[name] = Outrider.load(bundle)
            return self[name]

    return Loaded()
