"""Weights whose digests were right are not read again while nothing of the folder changes, where the caller keeps this."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import checking
from outrider.bundle.manifest import WEIGHTS
from outrider.errors import FolderError
from outrider.progress import Progress
from outrider.tests.support import sealed_bundle


class Read(Progress):
    """Counts the bytes of which digests are computed."""

    def __init__(self) -> None:
        self.expected = self.size = 0

    def stage(self, name: str, total: int | None = None) -> None:
        self.expected = total or 0

    def advance(self, size: int) -> None:
        self.size += size


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return sealed_bundle(tmp_path / "bundle")


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    return tmp_path / "bundle.checked"


def read(bundle: Path, checked: Path | None) -> int:
    """Check a bundle, and return how many bytes that took."""
    progress = Read()
    with checking(bundle, read_manifest(bundle), progress, checked):
        pass
    assert progress.size == progress.expected
    return progress.size


def sizes(bundle: Path) -> tuple[int, int]:
    """Return the bytes of all files, and of those that are no weights."""
    files = read_manifest(bundle).files
    return sum(each.size for each in files.values()), sum(
        each.size for name, each in files.items() if not name.endswith(WEIGHTS)
    )


def test_weights_are_read_once_and_everything_else_each_time(bundle: Path, checked: Path) -> None:
    everything, others = sizes(bundle)
    assert 0 < others < everything
    assert [read(bundle, each) for each in (None, checked, checked, None)] == [everything, everything, others, everything]


def test_weights_of_the_same_size_and_time_are_noticed(bundle: Path, checked: Path) -> None:
    read(bundle, checked)
    weights = next(bundle.rglob(f"*{WEIGHTS}"))
    before, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FolderError, match="is not the file that was sealed"):
        read(bundle, checked)


def test_what_is_no_weights_is_read_whatever_was_kept(bundle: Path, checked: Path) -> None:
    read(bundle, checked)
    tokenizer = bundle / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1] + b"]")
    with pytest.raises(FolderError, match=r"tokenizer\.json is not the file that was sealed"):
        read(bundle, checked)


def test_a_damaged_folder_is_not_kept_as_checked(bundle: Path, checked: Path) -> None:
    weights = next(bundle.rglob(f"*{WEIGHTS}"))
    weights.write_bytes(bytes(weights.stat().st_size))
    for _ in range(2):
        with pytest.raises(FolderError, match="is not the file that was sealed"):
            read(bundle, checked)


def test_a_copy_is_read_again(bundle: Path, checked: Path, tmp_path: Path) -> None:
    read(bundle, checked)
    bundle.rename(tmp_path / "other")
    shutil.copytree(tmp_path / "other", bundle)
    assert read(bundle, checked) == sizes(bundle)[0]


def test_what_cannot_be_kept_is_read_each_time(bundle: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "missing" / "bundle.checked"
    assert [read(bundle, nowhere) for _ in range(2)] == [sizes(bundle)[0]] * 2
