"""Sealed folders: written under a temporary name, renamed when complete, and checked file by file when read."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import filelock

from outrider.bundle.manifest import MANIFEST, FileEntry, Manifest, decode_manifest
from outrider.errors import FolderError
from outrider.progress import SILENT, Progress

BLOCK = 1 << 22
UNFINISHED = f".{MANIFEST}.partial"  # beside a manifest that is being replaced


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `destination` when the block succeeds and is removed when it does not.

    A process killed in the middle leaves only `.NAME.partial` and `.NAME.lock` beside the destination; the next one
    removes them.

    Raises:
        FolderError: the destination exists, cannot be written, or is being written; or the disk is full.
    """
    final = Path(os.path.abspath(destination))  # without `..`, which nothing can be renamed to
    if os.path.lexists(final):
        raise FolderError(f"{destination} already exists", f"choose another output, or remove it: rm -r {destination}")
    parent, name = final.parent, final.name
    partial, lock = parent / f".{name}.partial", filelock.FileLock(parent / f".{name}.lock", timeout=0)
    created: list[Path] = []
    try:
        created += [folder for folder in (parent, *parent.parents) if not folder.exists()]
        partial.mkdir(parents=True, exist_ok=True)  # fails before the lock and with a better message if writing is not allowed
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
            raise FolderError(f"{destination} was created by something else meanwhile", "choose another output")
        os.rename(partial, final)
    except OSError as error:
        raise write_error(destination, error) from error
    finally:
        # The lock is held to the very end, or this could remove another writer's folder.
        shutil.rmtree(partial, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
        _remove_empty(created)


def _remove_empty(folders: list[Path]) -> None:
    """Remove the empty ones of `folders`, which are ordered from the innermost outwards."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def write_error(destination: Path, error: OSError) -> FolderError:
    """Return the `FolderError` for an operating system's refusal to write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FolderError(f"no room to write {destination}: {error.strerror}", "free some disk space and run again")
    return FolderError(f"cannot write {destination}: {error.strerror or error}", "choose an output that can be written")


def digest(path: Path, progress: Progress = SILENT) -> FileEntry:
    """Return the size and SHA-256 of one file."""
    sha256 = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
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


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new, never a part of it.

    Raises:
        FolderError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):  # whatever prevented the writing may prevent this, too
            unfinished.unlink()
        raise write_error(path, error) from error


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of an export or a bundle, with its file names checked but not the files.

    Raises:
        FolderError: the folder has none, or it is damaged, of another version, or names a path that leaves the folder.
    """
    try:
        if not (folder / MANIFEST).resolve(strict=True).is_relative_to(folder.resolve()):
            raise FolderError(f"{folder / MANIFEST} is a link that leaves the folder", "do not use this folder")
        manifest = decode_manifest((folder / MANIFEST).read_bytes())
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


class FolderWatch:
    """Notices when a file of a folder is changed in place.

    Every file is kept open. Replacing one by another file of the same name is harmless and not reported, because
    processes that opened the first one keep it.
    """

    def __init__(self, folder: Path):
        """Open every file of the folder.

        Raises:
            FolderError: there is no manifest, or a file is missing.
        """
        self._files: dict[str, tuple[int, tuple[int, int]]] = {}
        for name in read_manifest(folder).files:
            try:
                descriptor = os.open(folder / name, os.O_RDONLY)
            except OSError as error:
                self.close()
                raise FolderError(f"{folder / name}: {error.strerror}", "build the bundle again") from error
            self._files[name] = descriptor, _size_and_time(descriptor)

    def changed(self) -> str | None:
        """Return the first file that has been written to or truncated since, if there is one."""
        files = self._files.items()
        return next((name for name, (descriptor, before) in files if _size_and_time(descriptor) != before), None)

    def close(self) -> None:
        """Close the files."""
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()


def _size_and_time(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def check_files(folder: Path, manifest: Manifest, progress: Progress = SILENT) -> None:
    """Check that a folder has exactly the files of its manifest, each inside the folder and with its digest.

    Raises:
        FolderError: a file is missing, is a link to outside, differs, or is not in the manifest.
    """
    again = "copy the folder again from its source, or build it again"
    root = folder.resolve()
    progress.stage(f"checking every file of {folder}", sum(entry.size for entry in manifest.files.values()))
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            if not path.resolve(strict=True).is_relative_to(root):
                raise FolderError(f"{path} is a link that leaves the folder", "do not use this folder")
            size = path.stat().st_size
            if size != entry.size:
                raise FolderError(f"{path} has {size:,} bytes; the manifest says {entry.size:,}", again)
            if digest(path, progress).sha256 != entry.sha256:
                raise FolderError(f"{path} is not the file that was sealed: its SHA-256 differs", again)
        except OSError as error:
            raise FolderError(f"{path} cannot be read: {error.strerror}", again) from error
        except (ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
            raise FolderError(f"{folder}/{MANIFEST} names an impossible path: {name!r}", again) from error
    listed = {folder / name for name in (*manifest.files, MANIFEST)}
    for path in sorted(folder.rglob("*")):
        if path not in listed and not path.is_dir() and path != folder / UNFINISHED:
            raise FolderError(f"{path} is not in the manifest", "remove it, or copy the folder again from its source")
