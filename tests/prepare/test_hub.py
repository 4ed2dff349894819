"""Models on a hub are found, downloaded once, and refused with a reason. The hub is a small one of the tests' own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import SourceError
from outrider.export.checkpoints.hub import Snapshot, download
from outrider.progress import Progress
from outrider.tests.prepare.hub import Hub

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
    download(REPO, progress)
    assert sorted(hub.requests) == sorted(snapshot.files)
    assert progress.stages == [(f"downloading {REPO}", sum(snapshot.files.values()))]
    assert progress.size == sum(snapshot.files.values())
    download(REPO, again := Counted())
    assert (sorted(hub.requests), again.stages) == (sorted(snapshot.files), [])


def test_without_a_connection_what_was_downloaded_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    download(REPO, Progress())
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert Snapshot.read(REPO) == Snapshot(hub.revision(REPO), {})
    download(REPO, progress := Counted())
    assert progress.stages == []
    with pytest.raises(
        SourceError, match="other/target is neither a file nor a folder, was not downloaded, and the hub cannot be reached"
    ):
        Snapshot.read("other/target")


def test_a_download_that_stops_says_so_and_is_continued(hub: Hub) -> None:
    hub.broken.add("model.safetensors")
    with pytest.raises(SourceError, match=r"the download of tiny/target stopped at model\.safetensors") as caught:
        download(REPO, Progress())
    assert "run again: what was downloaded is kept" in caught.value.hint
    hub.broken.clear()
    hub.requests.clear()
    download(REPO, Progress())
    assert "model.safetensors" in hub.requests
    assert "config.json" not in hub.requests


def test_a_refusal_says_what_to_do(hub: Hub) -> None:
    hub.gated.add(REPO)
    with pytest.raises(SourceError, match="tiny/target is gated") as gated:
        download(REPO, Progress())
    assert "HF_TOKEN" in gated.value.hint
    with pytest.raises(SourceError, match="the hub has no public model of that name"):
        Snapshot.read("tiny/absent")
    with pytest.raises(SourceError, match="is not a valid id on the hub"):
        Snapshot.read("tiny/a--b")
