"""Whatever a manifest says, commands answer it or refuse it in two lines, and show its text without obeying it."""

from __future__ import annotations

import copy
import io
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider.bundle.manifest import MANIFEST
from outrider.cli import main
from outrider.commands.output import printable, progress_bar

HOSTILE = "\x1b[31m\x9b2J\u202e\x07[red]x[/red]\x7f"
VALUES: dict[type, tuple[object, ...]] = {
    str: ("nothing", HOSTILE),
    int: (0, -1, 2**40),
    float: (0.0, -1.0, 1e300),
    bool: (None,),
    list: ([],),
    dict: ({},),
    type(None): (1, {}),
}
Place = tuple[str | int, ...]


@pytest.fixture
def folder(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # commands set it
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield every field at any depth, of lists and of dictionaries by file and engine only the first item."""
    if place:
        yield place, value
    if isinstance(value, dict):
        only_one = place in (("files",), ("build", "costs"))
        for key in list(value)[: 1 if only_one else None]:
            yield from places(value[key], (*place, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*place, 0))


def changed(data: dict[str, Any], place: Place, value: object) -> dict[str, Any]:
    data = copy.deepcopy(data)
    inside: Any = data
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return data


def answered_or_refused(done: Result, what: object) -> None:
    assert done.exception is None or isinstance(done.exception, SystemExit), (what, done.exception)
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]
    kinds = [line.split(":")[0] for line in lines]
    assert kinds == (["error", "hint"] if done.exit_code else []), (what, done.stderr)
    shown = done.stdout if done.exit_code or "generate" not in str(what) else ""  # a text may contain anything
    assert all(each.isprintable() for each in (shown + done.stderr).replace("\n", "")), (what, done.output)


COMMANDS = [["inspect"], ["generate", "--prompt", "the quick", "--max-new-tokens", "4"], ["plan"]]


@pytest.mark.parametrize(
    "commands",
    [COMMANDS, *(pytest.param([each], marks=pytest.mark.slow) for each in COMMANDS)],
    ids=["in turn", "inspect", "generate", "plan"],
)
def test_no_manifest_gives_a_traceback(folder: Path, commands: list[list[str]]) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    data["models"]["draft"] |= {
        "head_tokens": 320,
        "quantization": {"method": "rtn", "head_precision": "int8", "block": 32, "weights": 3, "kept": {"head": 1}},
    }
    count = 0
    for place, value in places(data):
        for other in VALUES[type(value)]:
            (folder / MANIFEST).write_text(json.dumps(changed(data, place, other)))
            command = commands[count % len(commands)]
            done = CliRunner().invoke(main, [command[0], str(folder), *command[1:]])
            answered_or_refused(done, (command[0], place, other))
            count += 1
    assert count > 100


def test_names_in_a_manifest_are_shown_and_not_obeyed(folder: Path) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    data["models"]["target"] |= {"source": HOSTILE, "architecture": "[bold]Llama[/bold]"}
    (folder / MANIFEST).write_text(json.dumps(data))
    table = CliRunner().invoke(main, ["inspect", str(folder)])
    assert r"\x1b[31m\x9b2J\u202e\x07[red]" in table.output
    assert "[bold]Llama[/bold]" in table.output
    encoded = CliRunner().invoke(main, ["inspect", str(folder), "--json"])
    assert encoded.stdout.isascii()
    assert "\x1b" not in encoded.stdout
    assert json.loads(encoded.stdout) == data


@pytest.mark.parametrize("name", [HOSTILE, "a\nb"])
def test_file_names_in_a_manifest_are_shown_and_not_obeyed(folder: Path, name: str) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(changed(data, ("files", name), {"sha256": "0" * 64, "size": 1})))
    answered_or_refused(CliRunner().invoke(main, ["inspect", str(folder)]), name)
    (folder / MANIFEST).write_text(json.dumps(data | {name: 1}))
    answered_or_refused(CliRunner().invoke(main, ["inspect", str(folder)]), name)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    with progress_bar() as progress:
        progress.stage(f"checking every file of {HOSTILE}")
    assert printable(HOSTILE) in terminal.getvalue()
