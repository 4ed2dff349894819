"""The commands as a user runs them: real processes, real exit codes, one line an error."""

from __future__ import annotations

import json
import os
import pty
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.engines.folder import read_manifest
from outrider.tests.support import PAIR, broken_bundle, llama, reseal, tokenizer, write_checkpoint

COMMAND = [sys.executable, "-c", "from outrider.cli import main; main()"]


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, **options)


def refused(done: subprocess.CompletedProcess[str], code: int, message: str) -> None:
    """One line that says what happened, one that says how to mend it, and no more."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    error = [line for line in done.stderr.splitlines() if not line.endswith("...")]
    if code == 2 and error[0].startswith(("Usage:", "Error:")):  # click's own
        assert message in done.stderr
        return
    assert len(error) == 2, done.stderr
    assert error[0].startswith("error: ")
    assert message in error[0]
    assert error[1].startswith("mend:  ")
    assert done.stdout == ""


def test_the_three_commands(checkpoints: Path, tmp_path: Path) -> None:
    export = run("export", "--target", checkpoints / "target", "--draft", checkpoints / "draft", "-o", tmp_path / "onnx")
    assert export.returncode == 0, export.stderr
    assert f"wrote {tmp_path}/onnx" in export.stdout
    built = run("build-engine", tmp_path / "onnx", "-o", tmp_path / "bundle", "--k", "1,4", "--capacity", "100", "--json")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["build"]["k"] == [1, 4]
    shown = run("generate", tmp_path / "bundle", "--prompt", "the quick", "--max-new-tokens", "12", "--show")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1].startswith("12 tokens in ")
    inspected = run("inspect", tmp_path / "bundle")
    assert inspected.returncode == 0, inspected.stderr
    assert "every file is as it was sealed" in inspected.stdout
    assert "target/model.onnx.data" in inspected.stdout


def test_json_is_one_object_and_nothing_else(shipped_bundle: Path) -> None:
    done = run("generate", shipped_bundle, "--prompt", "Once upon a time", "--max-new-tokens", "20", "--k", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    said = json.loads(done.stdout)
    assert len(said["token_ids"]) == len(said["from_draft"]) == said["stats"]["tokens"] == 20
    assert said["finish_reason"] == "length"
    plain = run("generate", shipped_bundle, "--prompt", "Once upon a time", "--max-new-tokens", "20", "--k", "0")
    assert plain.stdout == said["text"] + "\n"
    assert said["stats"]["mean_acceptance_length"] > 1


def test_the_prompt_may_come_on_standard_input(shipped_bundle: Path) -> None:
    by_option = run("generate", shipped_bundle, "--prompt", "naïve café 🙂", "--max-new-tokens", "9")
    by_input = run("generate", shipped_bundle, "--max-new-tokens", "9", input="naïve café 🙂\n")
    assert by_option.returncode == 0, by_option.stderr
    assert by_option.stdout == by_input.stdout


def test_chat_and_stop(shipped_bundle: Path) -> None:
    arguments = ("generate", shipped_bundle, "--prompt", "Hi, I would like a coffee.", "--chat", "--max-new-tokens", "60")
    whole = json.loads(run(*arguments, "--json").stdout)["text"]
    stop = whole.split()[3]
    done = run(*arguments, "--stop", stop, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["text"] == whole[: whole.index(stop)]
    assert said["finish_reason"] == "stop"
    bare = json.loads(run(*(word for word in arguments if word != "--chat"), "--json").stdout)["text"]
    assert bare != whole  # the template makes it an agent's answer


def test_a_full_cache_says_so(shipped_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(shipped_bundle, tmp_path / "bundle"))
    generation = read_manifest(copy).generation
    reseal(copy, generation=type(generation)(eos_token_ids=[], special_tokens={}))
    done = run("generate", copy, "--prompt", "Once upon a time", "--max-new-tokens", "5000")
    assert done.returncode == 0
    assert "the bundle's capacity is full" in done.stderr


def test_show_colours_the_text_by_origin_on_a_terminal(shipped_bundle: Path) -> None:
    arguments = ["generate", str(shipped_bundle), "--prompt", "Customer: Hi", "--max-new-tokens", "24", "--k", "4", "--show"]
    main, child = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=child, stderr=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm-256color"}
    )
    os.close(child)
    out = b""
    while True:
        try:
            block = os.read(main, 4096)
        except OSError:  # the child closed its end
            break
        if not block:
            break
        out += block
    os.close(main)
    assert process.wait() == 0
    assert b"\x1b[32m" in out  # accepted draft
    assert b"\x1b[33m" in out  # target's own
    assert b"mean acceptance length" in out


def test_help_lists_the_stages() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("export", "build-engine", "generate", "inspect"):
        assert command in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="shows what an output that takes nothing gets")
@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["generate", "--prompt", "x", "--json"], ["inspect"]])
def test_an_output_that_takes_nothing(tiny_bundle: Path, arguments: list[str]) -> None:
    command, *options = arguments
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, command, str(tiny_bundle), *options], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "error: input or output failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_output_that_lacks_characters(shipped_bundle: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run("generate", shipped_bundle, "--prompt", "naïve café", "--max-new-tokens", "9", "--show", env=environment)
    assert done.returncode == 0, done.stderr


class TestBadInput:
    def export(
        self, tmp_path: Path, target: Path | str = PAIR / "target", draft: Path | str = PAIR / "draft", **options: Any
    ) -> Any:
        return run("export", "--target", target, "--draft", draft, "-o", tmp_path / "out", **options)

    def nothing_written(self, folder: Path) -> bool:
        return not any(path.name in ("out", ".out.partial") for path in folder.iterdir())

    def test_missing_checkpoint(self, tmp_path: Path) -> None:
        refused(self.export(tmp_path, target=tmp_path / "absent"), 1, "does not exist")
        assert self.nothing_written(tmp_path)

    def test_truncated_checkpoint(self, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(PAIR / "target", tmp_path / "cut"))
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
        refused(self.export(tmp_path, target=copy), 1, "cannot read the weights of cut")
        assert self.nothing_written(tmp_path)

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(PAIR / "target", tmp_path / "odd"))
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(
            json.dumps(config | {"model_type": "no_such_model", "architectures": ["NoSuchModel"]})
        )
        refused(self.export(tmp_path, draft=copy), 1, "no_such_model")
        assert self.nothing_written(tmp_path)

    def test_vocabulary_mismatch(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "other", llama(), tokenizer())
        refused(self.export(tmp_path, draft=tmp_path / "other"), 1, "different tokenizers: token ")
        assert self.nothing_written(tmp_path)

    def test_existing_output(self, tmp_path: Path, tiny_export: Path) -> None:
        (tmp_path / "out").mkdir()
        refused(self.export(tmp_path), 1, "exists already")
        refused(run("build-engine", tiny_export, "-o", tmp_path / "out"), 1, "exists already")
        assert list((tmp_path / "out").iterdir()) == []

    def test_unwritable_output(self, tmp_path: Path, tiny_export: Path) -> None:
        (tmp_path / "file").touch()
        refused(run("build-engine", tiny_export, "-o", tmp_path / "file" / "out"), 1, "cannot write")
        refused(run("build-engine", tiny_export, "-o", "/proc/out"), 1, "cannot write")

    def test_full_disk(self, tmp_path: Path, tiny_export: Path) -> None:
        """Simulated by a limit on the size of a file, which fails a write in the middle as a full disk does."""
        limit: dict[str, Any] = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))}
        refused(run("build-engine", tiny_export, "-o", tmp_path / "out", "--capacity", "100", **limit), 1, "no room to write")
        assert self.nothing_written(tmp_path)
        refused(self.export(tmp_path, **limit), 1, "no room to write")
        assert self.nothing_written(tmp_path)

    def test_killed_export_then_again(self, tmp_path: Path, checkpoints: Path) -> None:
        arguments = [
            "export",
            "--target",
            str(checkpoints / "target"),
            "--draft",
            str(checkpoints / "draft"),
            "-o",
            str(tmp_path / "out"),
        ]
        self.kill_in_the_middle(arguments, "loading the draft", tmp_path)
        assert run(*arguments).returncode == 0
        read_manifest(tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_killed_build_then_again(self, tmp_path: Path, tiny_export: Path) -> None:
        arguments = ["build-engine", str(tiny_export), "-o", str(tmp_path / "out"), "--capacity", "100"]
        self.kill_in_the_middle(arguments, "measuring the target", tmp_path)
        assert run(*arguments).returncode == 0
        assert run("inspect", tmp_path / "out").returncode == 0
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def kill_in_the_middle(self, arguments: list[str], stage: str, folder: Path) -> None:
        with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if stage in line:
                    process.send_signal(signal.SIGKILL)
                    break
        assert process.wait() == -signal.SIGKILL
        assert not (folder / "out").exists()

    def test_interrupt_leaves_nothing(self, tmp_path: Path) -> None:
        arguments = ["export", "--target", str(PAIR / "target"), "--draft", str(PAIR / "draft"), "-o", str(tmp_path / "out")]
        with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if "tracing the target" in line:
                    time.sleep(0.3)
                    process.send_signal(signal.SIGINT)
                    break
            rest = process.stderr.read()
        assert process.wait() == 1
        assert "Traceback" not in rest
        assert self.nothing_written(tmp_path)

    @pytest.fixture
    def bundle(self, tiny_bundle: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))

    def manifest(self, bundle: Path, change: dict[str, Any]) -> None:
        data = json.loads((bundle / "manifest.json").read_text())
        (bundle / "manifest.json").write_text(json.dumps(data | change))

    @pytest.mark.parametrize("command", ["generate", "inspect"])
    def test_corrupted_bundle(self, bundle: Path, command: str) -> None:
        weights = bundle / "draft" / "model.onnx.data"
        data = bytearray(weights.read_bytes())
        data[5000] ^= 1
        weights.write_bytes(data)
        refused(run(command, bundle, *(["--prompt", "x"] if command == "generate" else [])), 1, "not the file that was sealed")

    @pytest.mark.parametrize("command", ["generate", "inspect"])
    def test_newer_schema(self, bundle: Path, command: str) -> None:
        self.manifest(bundle, {"schema_version": 99, "later": {}})
        refused(run(command, bundle, *(["--prompt", "x"] if command == "generate" else [])), 1, "schema 99")

    def test_path_that_leaves_the_folder(self, bundle: Path) -> None:
        self.manifest(bundle, {"files": {"../../etc/passwd": {"sha256": "0" * 64, "size": 1}}})
        refused(run("inspect", bundle), 1, "leaves the folder")

    def test_no_bundle(self, tmp_path: Path) -> None:
        refused(run("generate", tmp_path / "absent", "--prompt", "x"), 1, "no export and no bundle")

    @pytest.mark.parametrize("options", [[], ["--json"], ["--show"]])
    def test_logits_that_are_no_numbers(self, tmp_path: Path, options: list[str]) -> None:
        bundle = broken_bundle(tmp_path, token=tokenizer().encode("a").ids[0])
        done = run("generate", bundle, "--prompt", "a", *options)
        refused(done, 1, "not finite numbers")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--prompt", ""], "prompt is empty"),
            (["--prompt", b"caf\xe9"], "not UTF-8"),
            (["--prompt", "word " * 200], "the bundle's capacity is 160"),
            (["--prompt", "x", "--k", "3"], "it has k = 0, 1, 2, 4, 8"),
            (["--prompt", "x", "--max-new-tokens", "0"], "at least 1"),
            (["--prompt", "x", "--chat"], "no chat template"),
            (["--prompt", "x", "--stop", ""], "stop string is empty"),
            (["--prompt", "x", "--show", "--json"], "exclude each other"),
            (["--prompt", "x", "--k", "many"], "not a valid integer"),
            (["--prompt"], "requires an argument"),
        ],
    )
    def test_wrong_requests(self, tiny_bundle: Path, arguments: list[Any], message: str) -> None:
        done = subprocess.run([*COMMAND, "generate", str(tiny_bundle), *arguments], capture_output=True)
        text = subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
        refused(text, 2, message)

    @pytest.mark.parametrize(("text", "message"), [(b"", "prompt is empty"), (b"caf\xe9", "not UTF-8")])
    def test_wrong_standard_input(self, tiny_bundle: Path, text: bytes, message: str) -> None:
        done = subprocess.run([*COMMAND, "generate", str(tiny_bundle)], input=text, capture_output=True)
        refused(subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode()), 2, message)

    def test_closed_standard_input(self, tiny_bundle: Path) -> None:
        command = shlex.join([*COMMAND, "generate", str(tiny_bundle)]) + " <&-"
        refused(subprocess.run(command, shell=True, capture_output=True, text=True), 2, "standard input is closed")

    def test_a_checkpoint_with_code_of_its_own(self, tmp_path: Path) -> None:
        """It is not run, and nobody is asked whether it may."""
        copy = Path(shutil.copytree(PAIR / "target", tmp_path / "coded"))
        config = json.loads((copy / "config.json").read_text())
        own = {"model_type": "coded", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
        (copy / "config.json").write_text(json.dumps(config | own))
        (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        refused(self.export(tmp_path, target=copy, input="y\ny\n", timeout=120), 1, "cannot read the configuration of coded")
        assert not (tmp_path / "ran").exists()
        assert self.nothing_written(tmp_path)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--k", "1,x"], "no list of numbers"),
            (["--k", "0"], "at least 1"),
            (["--capacity", "4"], "does not hold k = 8"),
            (["--capacity", "100000"], "made for 256 positions"),
            (["--batch", "0"], "batch is 0"),
            (["--backend", "abacus"], "is not 'onnxruntime'"),
        ],
    )
    def test_wrong_builds(self, tiny_export: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
        done = run("build-engine", tiny_export, "-o", tmp_path / "out", *arguments)
        refused(done, 2, message)
        assert self.nothing_written(tmp_path)
