"""What commands print and return, in this process and without engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import numpy as np
import pytest

from outrider import errors
from outrider.audit import audit as audit_module
from outrider.audit import engine_checks
from outrider.audit.engine_checks import Compared
from outrider.audit.report import Arithmetic, Audit, ComparedTexts, Control, Counters, Divergence, Sampled
from outrider.audit.statistics import compare
from outrider.backends import open as open_module
from outrider.bundle.folder import read_manifest
from outrider.cli import main
from outrider.errors import EngineError, OutriderError, UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.rounds.reference import Fault
from outrider.serve.network.access import KEYS, allowed_hosts, read_keys
from outrider.tests.support import run_here, sealed_bundle

INSTALL = "pip install 'outrider[serve,ray]'"
EQUAL, OTHER = np.zeros(200, np.int64), np.ones(200, np.int64)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return sealed_bundle(tmp_path / "bundle")


def passing() -> Audit:
    """The report of a bundle in which all is well."""
    same, differ = compare("first", EQUAL, EQUAL, 1e-6), compare("first", EQUAL, OTHER, 1e-6)
    controls = [Control(fault.value, Sampled("hot", 4, [differ])) for fault in Fault]
    controls.append(Control(None, Sampled("hot", 4, [same])))
    texts = ComparedTexts(requests=4, compared=8)
    return Audit(
        Arithmetic(checked=100), texts, ComparedTexts(2, 2), [Sampled("hot", 4, [same], 100)], controls, Counters(4, 8, 6, 2)
    )


def wrong(part: str) -> Audit:
    """The same, with one part that fails."""
    report = passing()
    differ = compare("second", EQUAL, OTHER, 1e-6)
    where = Divergence("Once", 0.0, "model, k = 4", 3, 5, 6)
    changes: dict[str, Callable[[], object]] = {
        "arithmetic": lambda: setattr(report.arithmetic, "disagreed", 2),
        "greedy": lambda: report.greedy.differences.append(where),
        "batched": lambda: (report.batched or report.greedy).differences.append(where),
        "sampled": lambda: report.sampled[0].comparisons.append(differ),
        "support": lambda: setattr(report.sampled[0], "excluded", 1),
        "controls": lambda: setattr(report.controls[0], "sampled", report.controls[-1].sampled),
        "counters": lambda: setattr(report.counters, "unbalanced", 1),
    }
    changes[part]()
    return report


def verified(monkeypatch: pytest.MonkeyPatch, report: Audit, *options: str) -> Any:
    monkeypatch.setattr(audit_module, "audit", lambda *_, **__: report)
    monkeypatch.setattr(Outrider, "load", lambda *_, **__: None)
    return run_here("verify", "bundle", *options)


def test_verify_passes_only_if_every_part_does(monkeypatch: pytest.MonkeyPatch) -> None:
    done = verified(monkeypatch, passing())
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "the bundle passes")
    assert "FAIL" not in done.stdout
    done = verified(monkeypatch, passing(), "--json")
    parts = json.loads(done.stdout)["verdicts"]
    assert (done.returncode, {*parts.values()}) == (0, {True})
    for part in parts:
        done = verified(monkeypatch, wrong(part))
        assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "the bundle FAILS"), part
        assert [line.split()[0] for line in done.stdout.splitlines() if " FAIL " in line] == [part]
        done = verified(monkeypatch, wrong(part), "--json")
        result = json.loads(done.stdout)
        assert (done.returncode, result["passed"]) == (1, False)
        assert [name for name, passed in result["verdicts"].items() if not passed] == [part]
        assert {"arithmetic", "greedy", "batched", "sampled", "controls", "counters"} <= result.keys()


def test_engines_that_do_not_agree_fail(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    monkeypatch.setattr(open_module, "open_engines", lambda *_: None)
    for options in ((), ("--json",)):
        for compared, code in (
            ([(1e-6, 1.0), (1e-5, 1.0)], 0),
            ([(2e-3, 1.0), (1e-5, 1.0)], 1),
            ([(1e-6, 1.0), (1e-5, 0.9)], 1),
            ([(float("nan"), 1.0)], 1),
        ):
            results = [Compared("target", 1, difference, 1e-3, same) for difference, same in compared]
            monkeypatch.setattr(engine_checks, "compare_engines", lambda *_, results=results: iter(results))
            done = run_here("verify", bundle, "--engines", bundle, *options)
            assert done.returncode == code, done.stdout
            if options:
                shown = json.loads(done.stdout)
                assert (shown["passed"], len(shown["engines"])) == (code == 0, len(results))
                assert {*shown["engines"][0]} == {*results[0].as_dict(), "passed"}
            else:
                assert ("do NOT agree" in done.stdout) == ("FAIL" in done.stdout) == (code == 1)


def test_inspect_reads_every_file(bundle: Path) -> None:
    done = run_here("inspect", bundle)
    assert (done.returncode, "all files match their digests" in done.stdout) == (0, True)
    manifest = read_manifest(bundle)
    assert all(name in done.stdout for name in manifest.files)
    shown = run_here("inspect", bundle, "--json")
    assert msgspec.json.decode(shown.stdout) == msgspec.json.decode((bundle / "manifest.json").read_bytes())
    for name in manifest.files:
        whole = (bundle / name).read_bytes()
        (bundle / name).write_bytes(whole[::-1])
        for options in ((), ("--json",)):
            done = run_here("inspect", bundle, *options)
            assert (done.returncode, done.stdout) == (1, ""), name
            assert "is not the file that was sealed" in done.stderr
        (bundle / name).write_bytes(whole)


def test_each_failure_has_its_exit_code_and_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code, message, hint in (
        (UsageError("k is 3", "use 4", param="k"), 2, "k is 3", "--k: use 4"),
        (UsageError("k is 3", "use --k 4", param="k"), 2, "k is 3", "use --k 4"),
        (EngineError("the device\nis \x1b[2Jgone", "restart"), 1, "the device is \\x1b[2Jgone", "restart"),
        (click.BadParameter("no"), 2, "Invalid value: no", "see main fails --help"),
        (MemoryError(), 1, "out of memory", "use a smaller model, precision, capacity or batch"),
        (
            ModuleNotFoundError("", name="ray.serve"),
            1,
            "this command needs the package ray.serve, which is not installed",
            INSTALL,
        ),
    ):

        def fails(k: int, error: Exception = error) -> None:
            raise error

        monkeypatch.setitem(main.commands, "fails", click.Command("fails", None, fails, [click.Option(["--k"], default=1)]))
        done = run_here("fails")
        assert done.returncode == code, error
        assert done.stderr.splitlines() == [f"error: {message}", f"hint:  {hint}"]


def test_every_error_of_ours_is_one() -> None:
    ours = {name: each for name, each in vars(errors).items() if isinstance(each, type) and each.__module__ == errors.__name__}
    assert issubclass(ours.pop("OutriderWarning"), UserWarning)
    assert len(ours) == 10
    for name, error in ours.items():
        made = error("what happened", "what to do", param="k")
        assert (isinstance(made, OutriderError), str(made), made.hint, made.param) == (True, "what happened", "what to do", "k")
        assert made.exit_code == (2 if name == "UsageError" else 1)
        assert isinstance(made, EngineError) == (name in ("EngineError", "DeviceError", "StageError"))


def test_a_bug_is_no_expected_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ModuleNotFoundError("", name="outrider.nothing")

    monkeypatch.setitem(main.commands, "fails", click.Command("fails", None, fails))
    with pytest.raises(ModuleNotFoundError):
        run_here("fails")


def test_serve_asks_for_keys_where_strangers_can_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS, raising=False)
    for host in ("localhost", "127.0.0.1", "127.0.0.9", "::1"):
        assert host in allowed_hosts(host, keys=False, no_auth=False)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(UsageError, match="there are no API keys"):
            allowed_hosts(host, keys=False, no_auth=False)
        assert allowed_hosts(host, keys=True, no_auth=False) == allowed_hosts(host, keys=False, no_auth=True) == ()
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfone\n# two\n\n three \n")
    assert read_keys(path) == ("one", "three")
    for content in (b"", b"# one\n", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(UsageError):
            read_keys(path)
    for value in ("", " , "):
        monkeypatch.setenv(KEYS, value)
        with pytest.raises(UsageError, match="contains no key"):
            read_keys(None)
    monkeypatch.setenv(KEYS, "a, b,")
    assert read_keys(None) == ("a", "b")


def test_generated_json_has_every_field_of_all_rounds(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.runtime.request import Event
    from outrider.runtime.rounds.logprobs import Logprobs
    from outrider.runtime.stats import Stats

    stats = Stats(prompt_tokens=2)
    stats.count("model", 2, 1, 1, 1)
    stats.count("model", 2, 0, 1, 1)
    events = [
        Event(
            (1, 2), (True, False), (("On", True), ("ce", False)), stats, None, (Logprobs(-1, ()), Logprobs(-2, ((2, -2.0),)))
        ),
        Event((3,), (False,), (("!", False),), stats, "length", (Logprobs(-3, ()),)),
    ]
    asked: dict[str, Any] = {}
    loaded = SimpleNamespace(
        generate=lambda text, params, **named: asked.update(named, text=text, params=params) or iter(events)
    )
    monkeypatch.setattr(Outrider, "load", lambda *_, **__: loaded)
    done = run_here("generate", tiny_bundle, "--prompt", "x", "--json", "--k", "2", "--logprobs", "1", "--seed", "5")
    result = json.loads(done.stdout)
    assert (result.pop("stats"), done.stderr.count("error")) == (json.loads(json.dumps(stats.as_dict())), 0)
    assert result == {
        "text": "Once!",
        "token_ids": [1, 2, 3],
        "from_draft": [True, False, False],
        "finish_reason": "length",
        "logprobs": [{"logprob": -1, "top": []}, {"logprob": -2, "top": [[2, -2.0]]}, {"logprob": -3, "top": []}],
    }
    assert (asked["text"], asked["k"], asked["params"].logprobs, asked["params"].seed) == ("x", 2, 1, 5)
