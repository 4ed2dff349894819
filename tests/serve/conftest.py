"""What the modules about the HTTP API share; each has a `server` of its own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from outrider.tests.serve.server import Reached


@pytest.fixture
def client(server: Reached) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
