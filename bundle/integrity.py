"""Checks that a sealed folder is intact: when it is read, while it is read, and as long as it is served."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.bundle.folder import FOLLOW_LINKS, UNFINISHED, digest, open_regular, read_manifest, write_whole
from outrider.bundle.manifest import MANIFEST, WEIGHTS, FileEntry, Manifest
from outrider.errors import FolderError
from outrider.progress import SILENT, Progress


@contextmanager
def unchanged(folder: Path) -> Iterator[Path]:
    """Yield the folder's real path, and afterwards check that no file in it was changed or replaced.

    Engines are opened by path, before or while the digests are computed. Without this check, the two could read different
    files.

    Raises:
        FolderError: the folder has no readable manifest, or something was changed or replaced.
    """
    folder = Path(os.path.realpath(folder))
    names = read_manifest(folder).files
    before = _statuses(folder, names)

    def check(cause: Exception | None = None) -> None:
        if _statuses(folder, names) != before:
            message = f"{folder} was changed or replaced while it was being read"
            raise FolderError(message, "run this again once nothing is writing there") from cause

    try:
        yield folder
    except Exception as error:  # a missing file or a wrong digest may be a consequence of the change
        check(error)
        raise
    check()


def _statuses(folder: Path, names: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the identity of a folder, of its files `names`, and of the folders between; an empty tuple for a missing one.

    The inode's change time (ctime) shows that something was renamed away and back again.
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

    It keeps every file open. Only a change in place harms a process that has loaded the files: if another file is renamed into
    their place, the process keeps the file that it has opened.
    """

    def __init__(self, folder: Path):
        """Open every file of the folder.

        Raises:
            FolderError: there is no manifest, or a file is missing or not a regular file.
        """
        self._manifest = folder / MANIFEST
        self._files: dict[str, tuple[int, os.stat_result]] = {}
        for name in (MANIFEST, *read_manifest(folder).files):
            try:
                descriptor = open_regular(folder / name)
            except (OSError, ValueError) as error:
                self.close()
                raise FolderError(f"{folder / name} cannot be read: {error}", "build the bundle again") from error
            self._files[name] = descriptor, os.fstat(descriptor)

    def changed(self) -> str | None:
        """Return the first file, other than the manifest, that has been written to or truncated; None if there is none."""
        for name, (descriptor, before) in self._files.items():
            now = os.fstat(descriptor)
            if name != MANIFEST and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                return name
        return None

    def replaced(self) -> bool:
        """Return whether the folder is gone, or has been replaced by another folder or given another manifest."""
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
        FolderError: a file is missing, differs, is not in the manifest, is not a regular file, or is a link that leaves the
            folder.
    """
    with checking(folder, manifest, progress):
        pass


@contextmanager
def checking(folder: Path, manifest: Manifest, progress: Progress = SILENT, checked: Path | None = None) -> Iterator[None]:
    """Do the same as `check_files`, but compute the digests of weights while the block runs.

    Weights are only numbers, which lead no reader to other files. The caller must not let any result computed with them out
    before the block has ended.

    Args:
        checked: a file that keeps how the folder was when its digests were right. If it still is, those of its weights are not
            computed again.

    Raises:
        FolderError: as above; also in place of an error of the block, which damaged weights would explain.
    """
    statuses = repr(_statuses(folder, manifest.files)).encode()
    known = checked is not None and _content(checked) == statuses
    weights = sorted(name for name in manifest.files if name.endswith(WEIGHTS))
    unread = sum(manifest.files[name].size for name in weights) if known else 0
    progress.stage(f"checking every file of {folder}", sum(entry.size for entry in manifest.files.values()) - unread)
    for name, entry in manifest.files.items():
        check_file(folder, name, entry, progress if name not in weights else None)
    listed = {folder / name for name in (*manifest.files, MANIFEST)}
    for path in sorted(folder.rglob("*")):
        if path not in listed and (path.is_symlink() or not path.is_dir()) and path != folder / UNFINISHED:
            raise FolderError(f"{path} is not in the manifest", "remove it, or copy the folder again from its source")
    stoppable = _Stoppable(progress)

    def check_weights() -> None:
        for name in [] if known else weights:
            check_file(folder, name, manifest.files[name], stoppable)

    with ThreadPoolExecutor(1) as pool:
        digests = pool.submit(check_weights)
        try:
            try:
                yield
            except Exception:
                digests.result()
                raise
            digests.result()
        finally:
            stoppable.stopped = True  # an interrupt does not wait for the other files
    if checked is not None and not known and repr(_statuses(folder, manifest.files)).encode() == statuses:
        with suppress(FolderError):  # of a cache that this user may only read
            write_whole(checked, statuses)


def _content(path: Path) -> bytes | None:
    """Return what a file has, or nothing if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


class _Stoppable(Progress):
    """Passes progress on. Once stopped, it raises an error in the thread that reports progress."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self.stopped = False

    def advance(self, size: int) -> None:
        if self.stopped:
            raise InterruptedError
        self._progress.advance(size)


def check_file(folder: Path, name: str, entry: FileEntry, progress: Progress | None) -> None:
    """Check one file: its place, kind and size, and if there is a `progress` to report to, its digest.

    Raises:
        FolderError: as `check_files` does.
    """
    again = "copy the folder again from its source, or build it again"
    path = folder / name
    try:
        if not path.resolve(strict=True).is_relative_to(folder.resolve()):
            raise FolderError(f"{path} is a link that leaves the folder", FOLLOW_LINKS)
        size = path.stat().st_size
        if size != entry.size:
            raise FolderError(f"{path} has {size:,} bytes; the manifest says {entry.size:,}", again)
        if progress is None:
            os.close(open_regular(path))
        elif digest(path, progress).sha256 != entry.sha256:
            raise FolderError(f"{path} is not the file that was sealed: its SHA-256 differs", again)
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}", again) from error
    except (ValueError, RuntimeError) as error:  # a NUL in the name, a loop of links
        raise FolderError(f"{folder}/{MANIFEST} names an impossible path: {name!r}", again) from error
