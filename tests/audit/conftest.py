"""Audits of drafts that may read only the end of a text, as short as the audit's are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.tests.runtime.policies import short_windows


@pytest.fixture(autouse=True, scope="module")
def windows() -> Iterator[None]:
    with short_windows():
        yield
