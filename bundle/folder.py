"""Sealed folders: written under a temporary name, renamed when complete, and checked file by file when read."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import filelock

from outrider.bundle.manifest import MANIFEST, WEIGHTS, FileEntry, Manifest, decode_manifest
from outrider.errors import FolderError
from outrider.progress import SILENT, Progress

BLOCK = 1 << 22
NUMPY_CUT_SHORT = re.compile(r"requested and \d+ written|problem writing element")  # its errors do not say why
UNFINISHED = f".{MANIFEST}.partial"  # beside a manifest that is being replaced
FOLLOW_LINKS = "if you trust where it leads, copy the folder with what its links lead to: cp -rL FOLDER COPY"


def check_absent(destination: Path) -> Path:
    """Return the absolute path of a destination, without `..`, which nothing can be renamed to.

    Raises:
        FolderError: it exists.
    """
    final = Path(os.path.abspath(destination))
    if os.path.lexists(final):
        raise FolderError(f"{destination} already exists", f"choose another output, or remove it: rm -r {destination}")
    return final


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `destination` when the block succeeds and is removed when it does not.

    A process killed in the middle leaves only `.NAME.partial` and `.NAME.lock` beside the destination; the next one
    removes them.

    Raises:
        FolderError: the destination exists, cannot be written, or is being written; or the disk is full.
    """
    final = check_absent(destination)
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
    cut_short = error.errno is None and NUMPY_CUT_SHORT.search(str(error))
    if cut_short or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FolderError(f"no room to write {destination}: {error.strerror or error}", "free some disk space and run again")
    return FolderError(f"cannot write {destination}: {error.strerror or error}", "choose an output that can be written")


def _open(path: Path) -> int:
    """Return a descriptor of a regular file for reading, without waiting for a writer as a named pipe would.

    Raises:
        FolderError: it is something else.
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
    with open(_open(path), "rb") as file:
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
            raise FolderError(f"{folder / MANIFEST} is a link that leaves the folder", FOLLOW_LINKS)
        with open(_open(folder / MANIFEST), "rb") as file:
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


@contextmanager
def unchanged(folder: Path) -> Iterator[Path]:
    """Yield a folder, with the links on the way to it resolved; then check that nothing in it was changed or replaced.

    Engines are opened by their paths, and digests are taken before that or meanwhile. Without this check, both could be of
    different files.

    Raises:
        FolderError: the folder has no manifest that can be read, or something was changed or replaced meanwhile.
    """
    folder = Path(os.path.realpath(folder))
    names = read_manifest(folder).files
    before = _statuses(folder, names)

    def check(cause: Exception | None = None) -> None:
        if _statuses(folder, names) != before:
            message = f"{folder} was changed or replaced while it was being read"
            raise FolderError(message, "run this again when nothing writes there any more") from cause

    try:
        yield folder
    except Exception as error:  # a missing file, or a digest that differs, is a consequence
        check(error)
        raise
    check()


def _statuses(folder: Path, names: Iterable[str]) -> list[tuple[int, ...]]:
    """Return what identifies a folder, its files of these names, and the folders between; nothing for what is missing.

    The time of the last change of the status tells when something is renamed away and back again.
    """
    files = [folder / MANIFEST, *(folder / name for name in names)]
    statuses: list[tuple[int, ...]] = []
    for path in sorted({*files, *(parent for file in files for parent in file.parents if parent.is_relative_to(folder))}):
        try:
            status = path.stat()
        except (OSError, ValueError):  # a ValueError is a NUL in the name
            statuses.append(())
        else:
            times = status.st_mtime_ns, status.st_ctime_ns
            statuses.append((status.st_dev, status.st_ino, status.st_size, *times))
    return statuses


class FolderWatch:
    """Notices when a file of a folder is changed in place, and when the folder is replaced.

    Every file is kept open. Only a change in place harms processes that have loaded the files: those that opened a file keep it
    when another is renamed into its place.
    """

    def __init__(self, folder: Path):
        """Open every file of the folder.

        Raises:
            FolderError: there is no manifest, or a file is missing or is not a regular file.
        """
        self._manifest = folder / MANIFEST
        self._files: dict[str, tuple[int, os.stat_result]] = {}
        for name in (MANIFEST, *read_manifest(folder).files):
            try:
                descriptor = _open(folder / name)
            except (OSError, ValueError) as error:
                self.close()
                raise FolderError(f"{folder / name} cannot be read: {error}", "build the bundle again") from error
            self._files[name] = descriptor, os.fstat(descriptor)

    def changed(self) -> str | None:
        """Return the first file but the manifest that has been written to or truncated since, if there is one."""
        for name, (descriptor, before) in self._files.items():
            now = os.fstat(descriptor)
            if name != MANIFEST and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                return name
        return None

    def replaced(self) -> bool:
        """Return whether another folder, or nothing, is in the folder's place now, or has another manifest."""
        try:
            return not os.path.samestat(self._manifest.stat(), self._files[MANIFEST][1])
        except OSError:
            return True

    def close(self) -> None:
        """Close the files."""
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()


def check_files(folder: Path, manifest: Manifest, progress: Progress = SILENT) -> None:
    """Check that a folder has exactly the files of its manifest, each inside the folder and with its digest.

    Raises:
        FolderError: a file is missing, is a link to outside or no regular file, differs, or is not in the manifest.
    """
    with checking(folder, manifest, progress):
        pass


@contextmanager
def checking(folder: Path, manifest: Manifest, progress: Progress = SILENT) -> Iterator[None]:
    """Do what `check_files` does, but take the digests of weights while the block runs: they are numbers, which no reader
    follows anywhere, and nothing that was computed with them may leave the block's caller before it ends.

    Raises:
        FolderError: as above; also in place of an error of the block, which damaged weights would explain.
    """
    weights = sorted(name for name in manifest.files if name.endswith(WEIGHTS))
    progress.stage(f"checking every file of {folder}", sum(entry.size for entry in manifest.files.values()))
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry, progress if name not in weights else None)
    listed = {folder / name for name in (*manifest.files, MANIFEST)}
    for path in sorted(folder.rglob("*")):
        if path not in listed and (path.is_symlink() or not path.is_dir()) and path != folder / UNFINISHED:
            raise FolderError(f"{path} is not in the manifest", "remove it, or copy the folder again from its source")
    stoppable = _Stoppable(progress)

    def check_weights() -> None:
        for name in weights:
            _check_file(folder, name, manifest.files[name], stoppable)

    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(check_weights)
        try:
            try:
                yield
            except Exception:
                checked.result()
                raise
            checked.result()
        finally:
            stoppable.stopped = True  # an interrupt does not wait for the other files


class _Stoppable(Progress):
    """Passes progress on until it is stopped; from then on what reports progress fails."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self.stopped = False

    def advance(self, size: int) -> None:
        if self.stopped:
            raise InterruptedError
        self._progress.advance(size)


def _check_file(folder: Path, name: str, entry: FileEntry, progress: Progress | None) -> None:
    """Check one file: its place, kind and size, and its digest if there is a `progress` to tell."""
    again = "copy the folder again from its source, or build it again"
    path = folder / name
    try:
        if not path.resolve(strict=True).is_relative_to(folder.resolve()):
            raise FolderError(f"{path} is a link that leaves the folder", FOLLOW_LINKS)
        size = path.stat().st_size
        if size != entry.size:
            raise FolderError(f"{path} has {size:,} bytes; the manifest says {entry.size:,}", again)
        if progress is None:
            os.close(_open(path))
        elif digest(path, progress).sha256 != entry.sha256:
            raise FolderError(f"{path} is not the file that was sealed: its SHA-256 differs", again)
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}", again) from error
    except (ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
        raise FolderError(f"{folder}/{MANIFEST} names an impossible path: {name!r}", again) from error
