"""Which Ray cluster is used, as far as no cluster is needed for it."""

from __future__ import annotations

import pytest

from outrider.engines import cluster
from outrider.errors import EngineError
from outrider.tests.serve.server import free_port


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "[::1]:{port}", "127.0.0.1:99999", "head..local:6379"])
def test_an_address_at_which_nothing_listens_is_an_error_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address.format(port=free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EngineError) as caught:
        cluster.connect()
    assert str(caught.value).startswith(f"no Ray cluster: {address} cannot be reached: ")
    assert "ray start" in caught.value.hint
