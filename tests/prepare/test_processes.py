"""`outrider generate MODEL` in processes that end in the middle or run at once: the next one finds nothing half-written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.prepare.cache import Cache
from outrider.tests.prepare.hub import Hub
from outrider.tests.support import COMMAND

MODEL = "tiny/target"
START = Callable[[], "subprocess.Popen[str]"]
INTERRUPTED = ["error: interrupted", "hint:  nothing half-written was left; run the same command again"]
pytestmark = pytest.mark.slow  # test_cache.py, test_hub.py and test_prepare.py do the same within their process


@pytest.fixture
def hub(checkpoints: Path, tmp_path: Path) -> Iterator[Hub]:
    """Return a hub with the tiny target."""
    shutil.copytree(checkpoints / "target", tmp_path / "hub" / MODEL)
    with Hub(tmp_path / "hub").running() as running:
        yield running


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> START:
    """Return a function that starts a command, with an empty cache of downloads and one of bundles before the first."""
    folders = {"HF_HOME": str(tmp_path / "downloads"), "OUTRIDER_CACHE": str(tmp_path / "cache")}
    words = [*COMMAND, "generate", MODEL, "--prompt", "the quick brown", "--capacity", "256", "--max-new-tokens", "200"]

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            env=os.environ | folders | {"HF_ENDPOINT": hub.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs start with SIGINT ignored
        )

    return started


def check_whole(folder: Path, kinds: list[str]) -> None:
    """Check that the caches have entries of these kinds, and nothing that is unfinished."""
    entries = Cache(folder / "cache", 10**9).entries()
    assert sorted(entry.folder.parent.name for entry in entries if entry.release is not None) == kinds
    assert all(entry.release is not None for entry in entries)
    assert not [path for path in folder.rglob("*") if path.suffix in (".partial", ".incomplete")]


def errors(text: str) -> list[str]:
    """Return the lines of standard error, without progress."""
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith(("error: ", "hint: "))]


def test_ctrl_c_at_any_stage_leaves_nothing_half_written(hub: Hub, start: START, tmp_path: Path) -> None:
    """Each command ends in a later stage, since it uses what the one before has completed."""

    def interrupt(process: subprocess.Popen[str], stage: str) -> None:
        assert process.stderr is not None
        assert process.stdout is not None
        before = process.stdout.read(1) if not stage else next(line for line in process.stderr if line.startswith(stage))
        assert before
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
        assert process.returncode in (130, -signal.SIGINT)  # the second if Python was within exec; a shell shows 130 for both
        assert errors(rest) == INTERRUPTED

    for stage, kinds in (
        ("importing torch", []),
        ("downloading", []),
        ("tracing", []),
        ("sealing", []),
        ("fusing", ["exports"]),
        ("measuring", ["exports"]),
        ("", ["bundles", "exports"]),
    ):
        hub.stuck = {"model.safetensors"} if stage == "downloading" else set()
        interrupt(start(), stage)
        check_whole(tmp_path, kinds)
    text, report = start().communicate(timeout=60)
    assert text
    assert [line for line in report.splitlines() if line.startswith("using ")]


def test_a_hub_that_goes_away_in_the_middle_and_comes_back(hub: Hub, start: START, tmp_path: Path) -> None:
    url = hub.url
    hub.broken = {"model.safetensors"}
    first = errors(start().communicate(timeout=60)[1])
    assert first[0].startswith(f"error: the download of {MODEL} stopped at model.safetensors: ")
    check_whole(tmp_path, [])
    hub.url = "http://127.0.0.1:9"  # nobody answers
    second = errors(start().communicate(timeout=60)[1])
    assert f"{MODEL} is neither a file nor a folder, was not downloaded completely, and the hub cannot be reached" in second[0]
    hub.url, hub.broken = url, set()
    hub.requests.clear()
    assert start().communicate(timeout=60)[0]
    assert "config.json" not in hub.requests
    hub.url = "http://127.0.0.1:9"
    assert start().communicate(timeout=60)[0]
    assert [len(first), len(second)] == [2, 2]


def test_two_at_once_prepare_a_model_once(start: START, tmp_path: Path) -> None:
    first = start()
    assert first.stderr is not None
    assert next(line for line in first.stderr if line.startswith("importing"))
    second = start()
    (text, report), (same, waited) = (each.communicate(timeout=60) for each in (first, second))
    assert text == same != ""
    assert "\nmade " in report
    assert waited.startswith("waiting for another process that is making the same entry ...\nusing ")
    check_whole(tmp_path, ["bundles", "exports"])
