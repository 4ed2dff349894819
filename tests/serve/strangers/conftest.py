"""A bundle and its server, which strangers can reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.tests.serve.server import Server, chat_bundle, serving


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_bundle(trained_export, tmp_path_factory.mktemp("strangers") / "bundle", batch=2)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    with serving(bundle) as server:
        yield server
