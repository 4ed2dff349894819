"""Models on a hub are found, downloaded once, and refused with a reason. The hub is a small one of the tests' own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.errors import OutriderError, SourceError
from outrider.export.checkpoints.checkpoint import read_config
from outrider.export.checkpoints.hub import Snapshot
from outrider.export.checkpoints.source import Source
from outrider.progress import SILENT, Progress
from outrider.tests.prepare.hub import Hub
from outrider.tests.support import full_disk

REPO = "tiny/target"


class Counted(Progress):
    """Adds up what is reported."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.size = 0

    def stage(self, name: str, total: int | None = None) -> None:
        self.stages.append((name, total))

    def advance(self, size: int) -> None:
        self.size += size


@pytest.fixture
def hub(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Return a hub with the tiny target, which this process asks, with an empty cache of downloads."""
    shutil.copytree(checkpoints / "target", tmp_path / "hub" / REPO)
    (tmp_path / "hub" / REPO / "README.md").write_text("nothing that an export reads")
    (tmp_path / "hub" / REPO / "pytorch_model.bin").write_bytes(bytes(1000))
    with Hub(tmp_path / "hub").running() as running:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "downloads"))
        yield running


def test_what_an_export_reads_is_downloaded_once_with_progress(hub: Hub) -> None:
    snapshot, progress = Snapshot.read(REPO), Counted()
    assert snapshot.revision == hub.revision(REPO)
    assert {"README.md", "pytorch_model.bin"} & snapshot.files.keys() == set()
    Snapshot.read(REPO).download(progress)
    assert sorted(hub.requests) == sorted(snapshot.files)
    assert progress.stages == [(f"downloading {REPO}", sum(snapshot.files.values()))]
    assert progress.size == sum(snapshot.files.values())
    Snapshot.read(REPO).download(again := Counted())
    assert (sorted(hub.requests), again.stages) == (sorted(snapshot.files), [])


def test_without_a_connection_what_was_downloaded_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = Snapshot.read(REPO)
    online.download(Progress())
    (hub.root / REPO / "config.json").write_text("{}")
    Source.parse(REPO).file("config.json")  # another commit, whose other files are not here
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert Snapshot.read(REPO) == online
    Snapshot.read(REPO).download(progress := Counted())
    assert progress.stages == []
    with pytest.raises(
        SourceError, match="other/target is neither a file nor a folder, was not downloaded completely, and the hub cannot be"
    ):
        Snapshot.read("other/target")


def test_a_push_to_the_hub_changes_nothing_that_was_found(hub: Hub) -> None:
    found, commit, config = Source.parse(REPO), hub.revision(REPO), hub.root / REPO / "config.json"
    before = config.read_bytes()
    config.write_text("{}")
    (hub.root / REPO / "tokenizer.json").unlink()
    found.download(SILENT)
    assert Path(found.location).name == commit
    assert (Path(found.location) / "config.json").read_bytes() == before
    assert found.file("tokenizer.json") is not None
    assert read_config(found).model_type == "llama"
    assert Source.parse(REPO).config() == {}


SEVERAL = ["m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf"]
CHECKPOINT = ["config.json", "model.safetensors"]


def fill(hub: Hub, files: list[str]) -> None:
    (hub.root / "tiny/some").mkdir()
    for name in files:
        (hub.root / "tiny/some" / name).write_text(name)


@pytest.mark.parametrize(
    ("files", "tag", "found"),
    [
        (SEVERAL, ":q8_0", ["m-Q8_0.gguf"]),
        (SEVERAL, ":m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        (["a.gguf", "README.md"], "", ["a.gguf"]),
        ([*CHECKPOINT, "a.gguf"], ":a", ["a.gguf"]),
        ([*CHECKPOINT, "a.gguf"], "", CHECKPOINT),
    ],
)
def test_a_gguf_file_is_named_by_its_tag(hub: Hub, files: list[str], tag: str, found: list[str]) -> None:
    fill(hub, files)
    source = Source.parse(f"tiny/some{tag}")
    assert source.snapshot is not None
    assert [*source.snapshot.files] == found
    assert source.options == ({"gguf_file": found[0]} if found[0].endswith(".gguf") else {})
    source.download(SILENT)
    assert all((Path(source.location) / name).read_text() == name for name in found)


@pytest.mark.parametrize(
    ("files", "tag", "said"),
    [
        (SEVERAL, "", "tiny/some has several GGUF files; name one of them, as in tiny/some:Q4_K_M; it has Q4_K_M, Q8_0"),
        (SEVERAL, ":Q5", "tiny/some has no GGUF file Q5; name one of them, as in tiny/some:Q4_K_M; it has Q4_K_M, Q8_0"),
        (SEVERAL, ":bf16", "m-BF16-00001-of-00002.gguf of tiny/some is one of 2 files of a model"),
        (["a.Q4_0.gguf", "b.Q4_0.gguf"], ":Q4_0", "several GGUF files Q4_0; name one of them, as in tiny/some:a.Q4_0;"),
        (CHECKPOINT, ":Q4_0", "tiny/some has no GGUF file Q4_0; leave the tag out"),
    ],
)
def test_a_tag_that_names_no_file_or_several_lists_them(hub: Hub, files: list[str], tag: str, said: str) -> None:
    fill(hub, files)
    with pytest.raises(OutriderError) as caught:
        Source.parse(f"tiny/some{tag}")
    assert said in f"{caught.value}; {caught.value.hint}"


def test_a_download_that_stops_says_so_and_is_continued(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.broken.add("model.safetensors")
    with pytest.raises(SourceError, match=r"the download of tiny/target stopped at model\.safetensors") as caught:
        Snapshot.read(REPO).download(Progress())
    assert "run again: complete files are kept" in caught.value.hint
    with monkeypatch.context() as patched, pytest.raises(SourceError, match="not downloaded completely, and the hub cannot"):
        patched.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        Snapshot.read(REPO)
    hub.broken.clear()
    hub.requests.clear()
    Snapshot.read(REPO).download(Progress())
    assert "model.safetensors" in hub.requests
    assert "config.json" not in hub.requests


def test_a_file_that_was_cut_is_downloaded_again(hub: Hub) -> None:
    snapshot = Snapshot.read(REPO)
    snapshot.download(Progress())
    weights = snapshot.folder / "model.safetensors"
    content = weights.read_bytes()
    os.truncate(weights, 1000)
    hub.requests.clear()
    Snapshot.read(REPO).download(Progress())
    assert hub.requests == ["model.safetensors"]
    assert weights.read_bytes() == content


def test_a_full_disk_is_named_before_a_download_and_in_its_middle(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot.read(REPO)
    with monkeypatch.context() as patched, pytest.raises(SourceError, match=r"no room to download tiny/target: the files take"):
        patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=sum(snapshot.files.values()) - 1))
        snapshot.download(Progress())
    assert hub.requests == []
    with full_disk(100_000), pytest.raises(SourceError, match="no room to download tiny/target") as caught:
        snapshot.download(Progress())
    assert "complete files are kept" in caught.value.hint
    assert not [path for path in snapshot.folder.parents[1].rglob("*") if path.name.endswith(".incomplete")]
    hub.requests.clear()
    Snapshot.read(REPO).download(Progress())
    assert "config.json" not in hub.requests
    assert (snapshot.folder / "model.safetensors").stat().st_size == snapshot.files["model.safetensors"]


def test_a_refusal_says_what_to_do(hub: Hub) -> None:
    hub.gated.add(REPO)
    with pytest.raises(SourceError, match="tiny/target is gated") as gated:
        Snapshot.read(REPO).download(Progress())
    assert "HF_TOKEN" in gated.value.hint
    with pytest.raises(SourceError, match="the hub has no public model of that name"):
        Snapshot.read("tiny/absent")
    with pytest.raises(SourceError, match="is not a valid id on the hub"):
        Snapshot.read("tiny/a--b")
