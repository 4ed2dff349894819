"""Sealed folders: written under a temporary name, renamed when complete, and described by a manifest."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import filelock

from outrider.bundle.decoding import decode_manifest
from outrider.bundle.manifest import MANIFEST, FileEntry, Manifest
from outrider.errors import FolderError
from outrider.progress import SILENT, Progress

BLOCK = 1 << 22
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the errors of a full disk, of a quota, and of a limit on files
NUMPY_CUT_SHORT = re.compile(r"requested and \d+ written|problem writing element")  # NumPy's errors do not give the reason
UNFINISHED = f".{MANIFEST}.partial"  # beside a manifest that is being replaced
FOLLOW_LINKS = "if you trust the target of the link, copy the folder and follow its links: cp -rL FOLDER COPY"


def check_absent(destination: Path) -> Path:
    """Return the absolute path of a destination, without `..`, because nothing can be renamed to such a path.

    Raises:
        FolderError: it exists.
    """
    final = Path(os.path.abspath(destination))
    if os.path.lexists(final):
        raise FolderError(f"{destination} already exists", f"choose another output, or remove it: rm -r {destination}")
    return final


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """Yield a folder to write into. It becomes `destination` if the block succeeds, and is removed if not.

    A process that is killed leaves only `.NAME.partial` and `.NAME.lock` beside the destination. The next process removes
    them.

    Raises:
        FolderError: the destination exists, cannot be written, or is being written; or the disk is full.
    """
    final = check_absent(destination)
    parent, name = final.parent, final.name
    partial, lock = parent / f".{name}.partial", filelock.FileLock(parent / f".{name}.lock", timeout=0)
    created: list[Path] = []
    try:
        created += [folder for folder in (parent, *parent.parents) if not folder.exists()]
        partial.mkdir(parents=True, exist_ok=True)  # before the lock, which has a worse message if writing is not allowed
        lock.acquire()
    except filelock.Timeout:
        raise FolderError(f"another process is writing {destination}", "wait for it, or choose another output") from None
    except OSError as error:
        _remove_empty(created)
        raise write_error(destination, error) from error
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir()
        yield partial
        if os.path.lexists(final):  # rename would silently replace an empty folder
            raise FolderError(f"{destination} was created by something else in the meantime", "choose another output")
        os.rename(partial, final)
    except OSError as error:
        raise write_error(destination, error) from error
    finally:
        # The lock is held to the end, or this could remove another writer's folder.
        shutil.rmtree(partial, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        _remove_empty(created)


def _remove_empty(folders: list[Path]) -> None:
    """Remove those of `folders` that are empty. They are ordered from the innermost outwards."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def write_error(destination: Path, error: OSError) -> FolderError:
    """Return the `FolderError` for a failed write."""
    cut_short = error.errno is None and NUMPY_CUT_SHORT.search(str(error))
    if cut_short or error.errno in FULL:
        return FolderError(f"no room to write {destination}: {error.strerror or error}", "free some disk space and run again")
    return FolderError(f"cannot write {destination}: {error.strerror or error}", "choose an output that can be written")


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor. A named pipe does not block it.

    Raises:
        FolderError: it is not a regular file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FolderError(f"{path} is not a regular file", "do not use this folder")
    return descriptor


def digest(path: Path, progress: Progress = SILENT) -> FileEntry:
    """Return the size and SHA-256 of one file.

    Raises:
        FolderError: it is not a regular file.
    """
    sha256 = hashlib.sha256()
    size = 0
    with open(open_regular(path), "rb") as file:
        while block := file.read(BLOCK):
            sha256.update(block)
            size += len(block)
            progress.advance(len(block))
    return FileEntry(sha256=sha256.hexdigest(), size=size)


def digest_all(folder: Path, progress: Progress = SILENT) -> dict[str, FileEntry]:
    """Return the entry of every file below `folder`, by its relative path with forward slashes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    progress.stage("sealing", sum(path.stat().st_size for path in paths))
    return {path.relative_to(folder).as_posix(): digest(path, progress) for path in paths}


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically: readers see either the old content or the new. Permissions are `mode`, less the umask.

    Raises:
        FolderError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        unfinished.unlink(missing_ok=True)
        with open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):  # this may fail for the same reason
            unfinished.unlink()
        raise write_error(path, error) from error


def has_manifest(folder: Path) -> bool:
    """Return whether a folder is a bundle or an export, as far as its names tell."""
    try:
        return (folder / MANIFEST).exists()
    except (OSError, ValueError):  # the path is too long, contains NUL, or may not be read
        return False


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of an export or a bundle, after checking its file names. The files are not checked.

    Raises:
        FolderError: the folder has no manifest, or it is damaged, of another version, or names a path that leaves the folder.
    """
    try:
        if not (folder / MANIFEST).resolve(strict=True).is_relative_to(folder.resolve()):
            raise FolderError(f"{folder / MANIFEST} is a link that leaves the folder", FOLLOW_LINKS)
        with open(open_regular(folder / MANIFEST), "rb") as file:
            manifest = decode_manifest(file.read())
    except OSError as error:
        raise FolderError(
            f"{folder} is neither an export nor a bundle: {MANIFEST}: {error.strerror}",
            "pass a folder that outrider export or outrider build-engine wrote",
        ) from error
    for name in manifest.files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
            raise FolderError(f"{folder}/{MANIFEST} names a path that leaves the folder: {name!r}", "do not use this folder")
    return manifest
