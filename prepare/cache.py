"""The user's cache of exports and bundles: one folder and one record each, by a digest of what it was made from.

An entry that a process uses is never removed: the process keeps a shared lock on the record. The least recently used entries
are removed first; a record's modification time is its last use.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import msgspec
import platformdirs

import outrider
from outrider.bundle.folder import read_manifest, write_error, write_whole
from outrider.errors import FolderError, OutriderError, UsageError, reason_of
from outrider.progress import Progress

CACHE, LIMIT = "OUTRIDER_CACHE", "OUTRIDER_CACHE_LIMIT"  # environment variables: the folder, and its most gigabytes
DEFAULT_LIMIT = 50.0  # gigabytes
KINDS = ("exports", "bundles")
RECORD, CHECKED, PARTIAL = ".json", ".checked", ".partial"
DIGITS = 12  # of the digest in an entry's name
CODE = ("backends", "builder", "bundle", "engines", "export", "prepare", "runtime")  # the folders that entries come from

used_records: list[int] = []  # descriptors of the records of entries that this process uses


@functools.cache
def release() -> str:
    """Return the version and a digest of the code, since installations of several commits may have one version."""
    digest, root = hashlib.sha256(), Path(outrider.__file__).parent
    for path in sorted(path for folder in CODE for path in (root / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{outrider.__version__}+{digest.hexdigest()[:8]}"


class Record(msgspec.Struct):
    """What an entry was made from, and by which release."""

    release: str
    made_from: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """An export or a bundle in the cache."""

    folder: Path
    size: int  # bytes
    used: float  # seconds since the epoch
    release: str | None  # None if it is unfinished, or its record is damaged
    in_use: bool

    @property
    def name(self) -> str:
        """Return the name by which `cache prune` takes it."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache in the folder `root` of at most `limit` bytes."""

    root: Path
    limit: int

    @classmethod
    def of_user(cls) -> Cache:
        """Return the cache in `$OUTRIDER_CACHE`, or else in the platform's folder for caches.

        Raises:
            UsageError: the limit in `$OUTRIDER_CACHE_LIMIT` is not a number.
        """
        given = os.environ.get(LIMIT) or str(DEFAULT_LIMIT)
        try:
            gigabytes = float(given)
            if not 0 <= gigabytes < 1e6:
                raise ValueError
        except ValueError:
            raise UsageError(f"${LIMIT} is {given[:50]!r}, not a number of gigabytes", f"set it to {DEFAULT_LIMIT:g}") from None
        return cls(
            Path(os.environ.get(CACHE) or platformdirs.user_cache_dir("outrider", False)).expanduser().absolute(),
            int(gigabytes * 1e9),
        )

    def get(
        self, kind: str, label: str, made_from: dict[str, Any], make: Callable[[Path], object], progress: Progress
    ) -> tuple[Path, bool]:
        """Return the entry made from `made_from`, and whether this call made it. It is in use until the process ends.

        Another process that makes the same entry is waited for. If the new entry makes the cache too large, others are removed.
        A cache that may only be read gives what it has.

        Args:
            kind: one of `KINDS`.
            label: the first part of its name, for people.
            make: writes the folder, completely or not at all.

        Raises:
            FolderError: the cache cannot be written.
            OutriderError: those of `make`.
        """
        encoded = msgspec.json.encode([made_from, release()], order="deterministic")
        name = f"{re.sub(r'[^A-Za-z0-9.]+', '-', label).strip('-.')[:60]}-{hashlib.sha256(encoded).hexdigest()[:DIGITS]}"
        folder = self.root / kind / name
        record = folder.with_name(name + RECORD)
        with self._locked(folder, record, progress):
            made = not _complete(folder, record)
            if made:
                _remove(folder, record)
                make(folder)
                write_whole(record, msgspec.json.encode(Record(release(), made_from)))
            _use(record)
        if made:
            self.prune()
        return folder, made

    def entries(self) -> list[Entry]:
        """Return the entries, the most recently used first, with what killed processes left.

        Raises:
            FolderError: the cache cannot be read.
        """
        found = []
        for kind in KINDS:
            try:
                folders = [path for path in (self.root / kind).iterdir() if path.is_dir()]
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._error("read", error) from error
            for folder in folders:
                with suppress(OSError):  # another process may just have renamed or removed it
                    found.append(_entry(folder, folder.with_name(folder.name + RECORD)))
        return sorted(found, key=lambda entry: -entry.used)

    def prune(self, names: Collection[str] | None = None) -> tuple[list[Entry], dict[str, str]]:
        """Remove entries that no process uses. Returns them, and for the name of each that should go and stays, why.

        Args:
            names: which ones; None removes what killed processes left, and then the least recently used until the cache is
                within its limit.

        Raises:
            UsageError: there is no entry of a name.
        """
        entries = self.entries()
        if unknown := sorted({*(names or ())} - {entry.name for entry in entries}):
            raise UsageError(f"the cache has no entry {unknown[0]}", "outrider cache list shows them")
        total, removed, kept = sum(entry.size for entry in entries), [], {}
        for entry in reversed(entries):
            wanted = entry.name in names if names is not None else entry.release is None or total > self.limit
            if not wanted:
                continue
            if reason := self._remove_unused(entry.folder):
                kept[entry.name] = reason
            else:
                total -= entry.size
                removed.append(entry)
        return removed, kept

    def _remove_unused(self, folder: Path) -> str:
        """Remove an entry, unless a process makes or uses it; return why it stays, or nothing."""
        record = folder.with_name(folder.name + RECORD)
        try:
            with _lock(folder).acquire(timeout=0):
                if _in_use(record):
                    return "a process uses it"
                _remove(folder, record)
        except filelock.Timeout:
            return "a process makes it"
        except OSError as error:
            return error.strerror or reason_of(error)
        except FolderError as error:
            return str(error)
        return ""

    @contextmanager
    def _locked(self, folder: Path, record: Path, progress: Progress) -> Iterator[None]:
        lock = _lock(folder)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                progress.stage("waiting for another process that is making the same entry")
                lock.acquire()
        except OSError as error:
            if _complete(folder, record):
                yield
                return
            raise self._error("write", error) from error
        try:
            yield
        finally:
            lock.release()

    def _error(self, verb: str, error: OSError) -> FolderError:
        what = f"cannot {verb} the cache {self.root}: {error.strerror or error}"
        return FolderError(what, f"set ${CACHE} to a folder that you can write")


def checked(folder: Path) -> Path:
    """Return the file that keeps how an entry was when its digests were right; see `bundle.integrity.checking`."""
    return folder.with_name(folder.name + CHECKED)


def _lock(folder: Path) -> filelock.BaseFileLock:
    """Return the lock of an entry, or of what `bundle.folder.staged` left of it; `staged` has one of its own."""
    return filelock.FileLock(folder.with_name(f".{folder.name.removeprefix('.').removesuffix(PARTIAL)}.entry.lock"))


def _complete(folder: Path, record: Path) -> bool:
    """Return whether an entry was made completely, and its files still have their sizes. Loading it checks their contents."""
    try:
        manifest = read_manifest(folder)
        return record.is_file() and all((folder / name).stat().st_size == file.size for name, file in manifest.files.items())
    except (OSError, OutriderError):
        return False


def _use(record: Path) -> None:
    """Mark an entry as used now, and as in use until the process ends."""
    descriptor = os.open(record, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    used_records.append(descriptor)
    with suppress(OSError):  # of a cache that others fill and this user may only read
        os.utime(record)


def _in_use(record: Path) -> bool:
    try:
        descriptor = os.open(record, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(folder: Path, record: Path) -> None:
    """Remove an entry, its record first: what is left after an interrupt has none."""
    try:
        for path in (record, checked(folder)):
            path.unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise write_error(folder, error) from error


def _entry(folder: Path, record: Path) -> Entry:
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # a process that makes the entry may just have moved it
            size += path.stat().st_size if path.is_file() else 0
    try:
        release = msgspec.json.decode(record.read_bytes(), type=Record).release
        used = record.stat().st_mtime
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Entry(folder, size, folder.stat().st_mtime, None, False)
    return Entry(folder, size, used, release, _in_use(record))
