"""Drafting from a client's earlier requests, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import UsageError
from outrider.runtime.generation import Outrider
from outrider.serve.network.access import owner_of
from outrider.serve.settings import Settings
from outrider.tests.serve.server import PROMPT, Reached, fetch, serving_here, text_of

KEYS = ("first-key", "second-key")
DRAFTED = 'outrider_spec_decode_num_drafts_total{drafter="memory"}'


def metric(server: Reached, name: str) -> float:
    lines = fetch(f"{server.url}/metrics", Authorization=f"Bearer {KEYS[0]}")[2].decode().splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), 0.0)


def asked(server: Reached, key: str, **fields: Any) -> tuple[str, float]:
    """Return the text of an answer, and how many of its rounds drafted from memory."""
    before = metric(server, DRAFTED)
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, **fields}
    status, _, answer = fetch(f"{server.url}/v1/completions", json.dumps(body).encode(), Authorization=f"Bearer {key}")
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["text"], metric(server, DRAFTED) - before


def test_a_client_is_drafted_from_its_own_requests_which_a_file_keeps(bundle: Path, alone: Outrider, tmp_path: Path) -> None:
    plain, file = text_of(alone, PROMPT, max_new_tokens=20), tmp_path / "memory"
    options: dict[str, Any] = {"keys": KEYS, "k": 4, "drafter": "memory", "memory_file": file}
    with serving_here(bundle, **options) as server:
        assert metric(server, "outrider_memory_tokens") == 0  # the server's own request is not kept
        assert asked(server, KEYS[0], memory=False) == (plain, 0)
        assert asked(server, KEYS[0]) == (plain, 0)  # the first one that may be kept
        assert metric(server, "outrider_memory_tokens") > 20
        assert asked(server, KEYS[0], memory=False) == (plain, 0)
        assert asked(server, KEYS[1]) == (plain, 0)
        for key in KEYS:
            text, drafted = asked(server, key)
            assert text == plain
            assert drafted > 0
    options["keys"] = (KEYS[1], "new-key", KEYS[0])  # in the file of keys, others stand before it now
    with serving_here(bundle, **options) as server:
        assert metric(server, "outrider_memory_tokens") > 20  # before the first request
        assert asked(server, "new-key")[1] == 0
        assert asked(server, KEYS[0])[1] > 0


@pytest.mark.parametrize(
    ("settings", "owners", "shares"),
    [
        ({"keys": KEYS}, [*map(owner_of, KEYS), "127.0.0.1"], [32_000, 32_000, 0]),
        ({"hosts": ("localhost",)}, ["127.0.0.1", "::1", "a"], [16_000] * 3),
        ({}, ["10.0.0.1", "10.0.0.2"], [4_000] * 2),
    ],
    ids=["keys", "this machine", "anyone"],
)
def test_how_the_memory_is_shared(settings: dict[str, Any], owners: list[str], shares: list[int]) -> None:
    memory = Settings(Path("none"), memory_tokens=64_000, **settings).memory()
    assert memory is not None
    for owner, share in zip(owners, shares, strict=True):
        before = len(memory)
        memory.append(owner, list(range(40_000)), 0)
        assert len(memory) - before == share


@pytest.mark.parametrize("unused", [{"memory_tokens": 0}, {"k": 0}, {"k": 4}, {"drafter": "ngram"}])
def test_there_is_no_memory_where_nothing_would_be_drafted_from_it(unused: dict[str, Any]) -> None:
    assert Settings(Path("none"), **unused).memory() is None
    with pytest.raises(UsageError, match="nothing would be drafted from it"):
        Settings(Path("none"), memory_file=Path("file"), **unused).memory()


def test_a_memory_drafter_needs_a_memory() -> None:
    with pytest.raises(UsageError, match="remembers nothing"):
        Settings(Path("none"), drafter="memory", memory_tokens=0).memory()
