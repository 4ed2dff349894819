"""The manifest is read strictly: other versions and damage are refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.bundle.decoding import decode_manifest
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import MANIFEST, SCHEMA_VERSION, Manifest
from outrider.engines.contract import CONTRACT_VERSION
from outrider.errors import FolderError
from outrider.tests.support import sealed_bundle


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((sealed_bundle(tmp_path / "bundle") / MANIFEST).read_text())
    return loaded


def decode(data: dict[str, Any]) -> Manifest:
    return decode_manifest(json.dumps(data).encode())


def test_a_manifest_reads_back_as_it_was_written(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    assert decode_manifest(manifest.encode()) == manifest


@pytest.mark.parametrize("name", ["schema_version", "contract_version"])
def test_a_newer_version_is_refused_even_where_its_fields_are_unknown(data: dict[str, Any], name: str) -> None:
    data[name] += 1
    data["invented_later"] = True
    with pytest.raises(FolderError, match="this outrider reads up to") as caught:
        decode(data)
    assert "upgrade outrider" in caught.value.hint


def test_an_older_version_is_refused(data: dict[str, Any]) -> None:
    for older in ({"schema_version": SCHEMA_VERSION - 1}, {"contract_version": CONTRACT_VERSION - 1}):
        with pytest.raises(FolderError, match="older outrider"):
            decode(data | older)


def test_damage_is_named(data: dict[str, Any]) -> None:
    with pytest.raises(FolderError, match="damaged"):
        decode_manifest(b"{")
    with pytest.raises(FolderError, match=r"unknown field `surprise`"):
        decode(data | {"surprise": 1})
    with pytest.raises(FolderError, match="missing required field `files`"):
        decode({name: value for name, value in data.items() if name != "files"})
    data["build"]["capacity"] = "160"
    with pytest.raises(FolderError, match=r"Expected `int`, got `str` - at `\$\.build\.capacity`"):
        decode(data)


@pytest.mark.parametrize(
    "change",
    [
        {"k": []},
        {"k": [-1]},
        {"k": [4, 2]},
        {"windows": []},
        {"windows": [64, 128, 4096]},
        {"capacity": -1},
        {"capacity": 4096},
        {"max_prompt_chunk": 0},
        {"max_prompt_chunk": 161},
        {"batch": 10**30},
        {"costs": {"target": [{}], "draft": []}},
        {"costs": {"target": [{"rows": 0}]}},
    ],
)
def test_numbers_that_cannot_be_are_damage(data: dict[str, Any], change: dict[str, Any]) -> None:
    data["build"] |= change
    with pytest.raises(FolderError, match="damaged"):
        decode(data)


def test_a_capacity_beyond_the_models_or_an_end_of_text_beyond_the_vocabulary_is_damage(data: dict[str, Any]) -> None:
    data["models"]["draft"]["max_positions"] = 16
    with pytest.raises(FolderError, match="exceeds a model's maximum positions"):
        decode(data)
    data["generation"]["eos_token_ids"] = [320]
    with pytest.raises(FolderError, match="end-of-text id is not in the vocabulary"):
        decode(data)


def test_bytes_that_are_no_text_are_damage() -> None:
    start = b'{"schema_version": %d, "a": ' % SCHEMA_VERSION
    for broken in (start + b'"\xff"}', start + b"[" * 100_000):
        with pytest.raises(FolderError, match="damaged"):
            decode_manifest(broken)


def test_a_manifest_without_a_draft_is_one_without_a_target_is_not(data: dict[str, Any]) -> None:
    models = data["models"]
    data["models"] = {"target": models["target"]}
    assert decode(data).roles == ("target",)
    data["models"] = {"draft": models["draft"]}
    with pytest.raises(FolderError, match=r"its models are \['draft'\]"):
        decode(data)
