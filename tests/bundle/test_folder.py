"""Folders are written whole or not at all, and read only as they were sealed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from outrider.backends.open import open_bundle
from outrider.bundle.folder import read_manifest, staged, write_whole
from outrider.bundle.integrity import FolderWatch, unchanged
from outrider.bundle.manifest import MANIFEST, FileEntry
from outrider.errors import FolderError
from outrider.runtime.generation import Outrider
from outrider.tests.support import build, full_disk, sealed_bundle


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return sealed_bundle(tmp_path / "bundle")


def rewrite(folder: Path, **changes: object) -> None:
    (folder / MANIFEST).write_bytes(msgspec.structs.replace(read_manifest(folder), **changes).encode())


def bind_socket(path: Path) -> None:
    """Make a socket in a folder, whose whole path may be too long for a socket's name."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def test_a_sealed_bundle_opens(copy: Path) -> None:
    open_bundle(copy)


def test_every_file_of_a_bundle_is_in_the_manifest(copy: Path) -> None:
    names = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()} - {MANIFEST}
    assert set(read_manifest(copy).files) == names


def refused_when_changed(copy: Path, read: Callable[[Path], object]) -> None:
    for name in read_manifest(copy).files:
        path = copy / name
        sealed = path.read_bytes()
        path.write_bytes(sealed[:-1] + bytes([sealed[-1] ^ 1]))
        with pytest.raises(FolderError, match=f"{path.name} is not the file that was sealed"):
            read(copy)
        path.write_bytes(sealed[:-1])
        with pytest.raises(FolderError, match=r"bytes; the manifest says"):
            read(copy)
        path.unlink()
        with pytest.raises(FolderError, match="cannot be read"):
            read(copy)
        path.write_bytes(sealed)
    read(copy)


def test_one_changed_byte_in_any_file_is_refused(copy: Path) -> None:
    refused_when_changed(copy, open_bundle)


def test_one_changed_byte_is_refused_where_engines_are_opened_meanwhile(tiny_bundle: Path, tmp_path: Path) -> None:
    refused_when_changed(Path(shutil.copytree(tiny_bundle, tmp_path / "bundle")), Outrider.load)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "target/../../secret", "C:/secret", "..\\secret", ""])
def test_a_path_that_leaves_the_folder_is_refused(copy: Path, name: str) -> None:
    files = read_manifest(copy).files
    rewrite(copy, files={**files, name: files["tokenizer.json"]})
    with pytest.raises(FolderError, match="leaves the folder"):
        read_manifest(copy)


def test_a_path_that_cannot_be_is_refused(copy: Path) -> None:
    files = read_manifest(copy).files
    rewrite(copy, files={**files, "a\0b": files["tokenizer.json"]})
    with pytest.raises(FolderError, match="an impossible path"):
        open_bundle(copy)
    (copy / "loop").symlink_to(copy / "loop")
    rewrite(copy, files={**files, "loop": files["tokenizer.json"]})
    with pytest.raises(FolderError, match="impossible path"):
        open_bundle(copy)


def test_a_manifest_that_is_a_link_to_elsewhere_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / MANIFEST).rename(tmp_path / "elsewhere.json")
    (copy / MANIFEST).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(FolderError, match="link that leaves the folder"):
        read_manifest(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "target/model.onnx", "draft/model.onnx.data"])
def test_a_file_that_the_manifest_leaves_out_is_not_trusted(copy: Path, name: str) -> None:
    files = dict(read_manifest(copy).files)
    del files[name]
    rewrite(copy, files=files)
    with pytest.raises(FolderError, match=f"does not list {name}"):
        open_bundle(copy)


def test_a_file_that_the_manifest_does_not_know_is_refused(copy: Path) -> None:
    (copy / "target" / "more.bin").touch()
    with pytest.raises(FolderError, match=r"more\.bin is not in the manifest"):
        open_bundle(copy)


def test_a_link_that_leaves_the_folder_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (copy / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(FolderError, match="link that leaves the folder"):
        open_bundle(copy)


@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json", "target/model.onnx.data"])
@pytest.mark.parametrize("special", [os.mkfifo, bind_socket, Path.mkdir])
def test_what_is_no_regular_file_is_refused_without_waiting(copy: Path, name: str, special: Callable[[Path], object]) -> None:
    files = read_manifest(copy).files
    rewrite(copy, files={**files, "tokenizer.json": FileEntry(sha256="0" * 64, size=0)})  # the size of a pipe
    (copy / name).unlink()
    special(copy / name)
    for read in (open_bundle, FolderWatch):
        with pytest.raises(FolderError, match=r"not a regular file|cannot be read|neither an export nor|bytes; the"):
            read(copy)


@pytest.mark.parametrize("special", [os.mkfifo, bind_socket])
def test_an_export_with_a_pipe_or_a_socket_is_not_built(
    tiny_export: Path, tmp_path: Path, special: Callable[[Path], object]
) -> None:
    export = Path(shutil.copytree(tiny_export, tmp_path / "onnx"))
    special(export / "more")
    with pytest.raises(FolderError, match="more is not in the manifest"):
        build(export, tmp_path / "out")
    (export / "more").unlink()
    (export / MANIFEST).unlink()
    special(export / MANIFEST)
    with pytest.raises(FolderError, match=r"is not a regular file|neither an export nor a bundle"):
        build(export, tmp_path / "out")


def test_a_link_to_a_folder_is_refused_inside_a_bundle_and_followed_to_one(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(copy)
    open_bundle(tmp_path / "current")
    (tmp_path / "elsewhere").mkdir()
    for destination in (tmp_path / "elsewhere", copy / "target", tmp_path / "absent"):
        (copy / "more").symlink_to(destination)
        with pytest.raises(FolderError, match="more is not in the manifest"):
            open_bundle(copy)
        (copy / "more").unlink()
    (copy / "target").rename(tmp_path / "target")
    (copy / "target").symlink_to(tmp_path / "target")
    with pytest.raises(FolderError, match="link that leaves the folder"):
        open_bundle(copy)


def test_what_is_no_bundle_is_refused(tmp_path: Path, tiny_export: Path) -> None:
    with pytest.raises(FolderError, match="neither an export nor a bundle"):
        open_bundle(tmp_path)
    with pytest.raises(FolderError, match="is an export, not a bundle") as caught:
        open_bundle(tiny_export)
    assert "outrider build-engine" in caught.value.hint


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "out") as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(FolderError, match="already exists"), staged(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "precious").exists()


def test_an_output_that_appears_meanwhile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="created by something else"), staged(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file" / "out", tmp_path / ("a" * 300) / "out"):
        with pytest.raises(FolderError, match="cannot write"), staged(output):
            pass
    with pytest.raises(FolderError, match="already exists"), staged(tmp_path / "new" / ".."):
        pass


def test_folders_made_on_the_way_vanish_with_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "a" / "b" / "out"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_nobody_may_write_until_the_folder_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, refused = os.rename, []

    def watched(source: Path, destination: Path) -> None:
        with pytest.raises(FolderError, match="another process is writing") as caught, staged(tmp_path / "out"):
            pass
        refused.append(caught.value)
        rename(source, destination)

    monkeypatch.setattr(os, "rename", watched)
    with staged(tmp_path / "out") as folder:
        (folder / "whole").touch()
    assert refused
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]


WRITER = """
import sys, time
from pathlib import Path
from outrider.bundle.folder import staged
with staged(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    (folder / "sub").mkdir()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_two_writers_do_not_mix_and_a_killed_one_is_cleared_away(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(output)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        with pytest.raises(FolderError, match="another process is writing"), staged(output):
            pass
        os.kill(writer.pid, signal.SIGKILL)
    assert not output.exists()
    assert (tmp_path / ".out.partial" / "half").exists()
    with staged(output) as folder:
        assert list(folder.iterdir()) == []
        (folder / "whole").touch()
    assert [path.name for path in output.iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_whole(path, b"old")
    with pytest.raises(FolderError, match="no room to write"), full_disk(2):
        write_whole(path, b"newer")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_folder_is_there_only_when_it_is_whole(tmp_path: Path) -> None:
    with staged(tmp_path / "out") as folder:
        (folder / "half").touch()
        assert not (tmp_path / "out").exists()
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["half"]


def test_a_change_in_place_is_noticed_while_a_bundle_is_served(copy: Path) -> None:
    watch = FolderWatch(copy)
    assert (watch.changed(), watch.replaced()) == (None, False)
    weights = copy / "target" / "model.onnx.data"
    with open(weights, "r+b") as file:  # as many bytes as before
        file.write(b"X")
    os.utime(weights, ns=(1, 1))
    assert watch.changed() == "target/model.onnx.data"
    watch.close()
    watch = FolderWatch(copy)
    (copy / "next").write_bytes((copy / MANIFEST).read_bytes())
    (copy / "next").rename(copy / MANIFEST)
    assert (watch.changed(), watch.replaced()) == (None, True)
    watch.close()


def test_what_changes_while_it_is_read_is_refused(copy: Path) -> None:
    weights = copy / "draft" / "model.onnx.data"
    with pytest.raises(FolderError, match="was changed or replaced while it was being read"), unchanged(copy):
        content = weights.read_bytes()
        weights.rename(copy / "away")
        weights.write_bytes(content)
        (copy / "away").unlink()
    with unchanged(copy):
        pass
