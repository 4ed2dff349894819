"""The user's cache: entries are made once, kept while they are used, and removed when it is full."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cli import main
from outrider.errors import FolderError, OutriderError, UsageError
from outrider.prepare import cache as module
from outrider.prepare.cache import Cache
from outrider.progress import SILENT, Progress


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Return an empty cache."""
    return Cache(tmp_path / "cache", 10**9)


@pytest.fixture
def make(tiny_export: Path) -> Callable[[Path], None]:
    """Return a function that writes an entry: a copy of the tiny export."""

    def made(folder: Path) -> None:
        shutil.copytree(tiny_export, folder)

    return made


@pytest.fixture(autouse=True)
def _let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use entries for the length of a test instead of a process."""
    monkeypatch.setattr(module, "used_records", [])


def test_an_entry_is_made_once_for_each_source(cache: Cache, make: Callable[[Path], None]) -> None:
    first, made = cache.get("exports", "org/a model", {"revision": "1"}, make, SILENT)
    assert made
    assert first.name.startswith("org-a-model-")
    assert cache.get("exports", "org/a model", {"revision": "1"}, make, SILENT) == (first, False)
    other, made = cache.get("exports", "org/a model", {"revision": "2"}, make, SILENT)
    assert (made, other == first) == (True, False)


def test_other_code_makes_its_own_entry(cache: Cache, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.release().startswith("0.1.0+")
    first, _ = cache.get("exports", "a", {}, make, SILENT)
    monkeypatch.setattr(module, "release", lambda: "0.1.0+other")
    assert cache.get("exports", "a", {}, make, SILENT)[0] != first


def test_a_cache_that_may_only_be_read_gives_what_it_has(cache: Cache, make: Callable[[Path], None]) -> None:
    folder, _ = cache.get("exports", "a", {}, make, SILENT)
    lock = folder.with_name(f".{folder.name}.entry.lock")
    lock.unlink()
    lock.mkdir()  # nobody can open it, not even root
    assert cache.get("exports", "a", {}, make, SILENT) == (folder, False)
    os.truncate(folder / "tokenizer.json", 10)
    with pytest.raises(FolderError, match="cannot write the cache"):
        cache.get("exports", "a", {}, make, SILENT)


def test_two_at_once_make_it_once(cache: Cache, make: Callable[[Path], None]) -> None:
    begun, stages, made = threading.Event(), list[str](), list[Path]()

    class Noted(Progress):
        def stage(self, name: str, total: int | None = None) -> None:
            stages.append(name)
            waiting.set()

    waiting = threading.Event()

    def slow(folder: Path) -> None:
        begun.set()
        assert waiting.wait(60)
        made.append(folder)
        make(folder)

    thread = threading.Thread(target=cache.get, args=("exports", "a", {}, slow, SILENT))
    thread.start()
    assert begun.wait(60)
    assert cache.get("exports", "a", {}, slow, Noted())[1] is False
    thread.join()
    assert (len(made), stages) == (1, ["waiting for another process that is making the same entry"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OutriderError("no", "hint")])
def test_what_fails_leaves_nothing(cache: Cache, make: Callable[[Path], None], error: BaseException) -> None:
    def failing(_: Path) -> None:
        raise error

    with pytest.raises(type(error)):
        cache.get("exports", "a", {}, failing, SILENT)
    assert cache.entries() == []
    assert cache.get("exports", "a", {}, make, SILENT)[1]


def test_an_entry_that_is_not_whole_is_made_again(cache: Cache, make: Callable[[Path], None]) -> None:
    folder, _ = cache.get("exports", "a", {}, make, SILENT)
    os.truncate(folder / "tokenizer.json", 10)
    assert cache.get("exports", "a", {}, make, SILENT) == (folder, True)
    record = folder.with_name(folder.name + ".json")
    record.write_bytes(b"\xff")
    assert [entry.release for entry in cache.entries()] == [None]
    record.unlink()  # as after a kill before it was written
    assert cache.get("exports", "a", {}, make, SILENT) == (folder, True)


def test_the_limit_is_kept_by_removing_what_was_not_used_for_longest(
    cache: Cache, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 0
    folders = []
    for number in range(3):
        folder, _ = cache.get("exports", f"m{number}", {}, make, SILENT)
        folders.append(folder)
        os.utime(folder.with_name(folder.name + ".json"), (number, number))
        size = cache.entries()[0].size
    cache.get("exports", "m0", {}, make, SILENT)  # used again
    small = Cache(cache.root, int(2.5 * size))
    assert small.prune()[0] == []  # all are in use by this process
    for descriptor in module.used_records:
        os.close(descriptor)
    module.used_records.clear()
    removed, _ = small.prune()
    assert [entry.folder for entry in removed] == [folders[1]]
    assert [folder.exists() for folder in folders] == [True, False, True]
    code = f"""
from pathlib import Path
from outrider.prepare.cache import Cache
cache = Cache(Path({str(cache.root)!r}), 10**9)
cache.get("exports", "m2", {{}}, None, None)
print("holding", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holding\n"
        names = [entry.name for entry in cache.entries()]
        last = f"exports/{folders[2].name}"
        monkeypatch.setenv("OUTRIDER_CACHE", str(cache.root))
        refused = CliRunner().invoke(main, ["cache", "prune", last])
        assert (refused.exit_code, f"error: not removed: {last} (a process uses it)" in refused.stderr) == (1, True)
        removed, kept = cache.prune(names)
        assert ([entry.folder for entry in removed], [*kept]) == ([folders[0]], [last])
        other.communicate("\n")
    assert [entry.folder for entry in cache.prune([last])[0]] == [folders[2]]


def test_what_other_releases_and_kills_left_is_removed(
    cache: Cache, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = cache.get("exports", "a", {}, make, SILENT)
    record = folder.with_name(folder.name + ".json")
    record.write_text(record.read_text().replace("0.1.0", "0.0.9"))
    folder.with_name(f"{folder.name}.checked").touch()
    (cache.root / "bundles" / ".b-0123.partial").mkdir(parents=True)
    for descriptor in module.used_records:
        os.close(descriptor)
    module.used_records.clear()
    assert [entry.folder.name for entry in cache.prune()[0]] == [".b-0123.partial"]  # two releases may share a cache
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache.root))
    pruned = CliRunner().invoke(main, ["cache", "prune"])
    assert pruned.stdout.splitlines()[0] == f"removed exports/{folder.name}"
    assert cache.entries() == []
    assert not [*folder.parent.glob(f"{folder.name}*")]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="cannot write the cache") as caught:
        Cache(tmp_path / "file" / "cache", 1).get("exports", "a", {}, make, SILENT)
    assert "$OUTRIDER_CACHE" in caught.value.hint


def test_settings_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setenv("OUTRIDER_CACHE_LIMIT", "1.5")
    assert Cache.of_user() == Cache(tmp_path, 1_500_000_000)
    monkeypatch.setenv("OUTRIDER_CACHE_LIMIT", "much")
    with pytest.raises(UsageError, match="'much', not a number of gigabytes"):
        Cache.of_user()
    with pytest.raises(UsageError, match="no entry exports/absent"):
        Cache(tmp_path, 1).prune(["exports/absent"])
