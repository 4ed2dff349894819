"""No request makes the server fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

from outrider.tests.serve.server import Reached, chat_bundle, serving_here


@pytest.fixture(scope="module")
def server(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reached]:
    # A small capacity keeps the answers short.
    with serving_here(chat_bundle(trained_export, tmp_path_factory.mktemp("schema") / "bundle", capacity=63)) as server:
        yield server


@pytest.mark.parametrize(
    "mode",
    [GenerationMode.NEGATIVE, pytest.param(GenerationMode.POSITIVE, marks=pytest.mark.slow)],
    ids=["negative", "positive"],
)
def test_no_request_makes_the_server_fail(server: Reached, mode: GenerationMode) -> None:
    """Valid and invalid requests, generated from the server's OpenAPI document."""
    tried = 0
    for each in schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations():
        assert isinstance(each, Ok)

        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=each.ok().as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            nonlocal tried
            tried += 1
            case.call_and_validate(checks=[not_a_server_error], timeout=60)

        with contextlib.suppress(Unsatisfiable):  # a request without parameters cannot be invalid
            check()
    assert tried > 30
    assert server.health() == (200, {"status": "ok", "running": 0})
