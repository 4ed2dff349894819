"""Bad input gives one line for what happened, one for the hint, the right exit code, and no partial output."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outrider.bundle.folder import read_manifest
from outrider.tests.support import BROKEN_TEXT, COMMAND, PAIR, full_disk, llama, run, run_here, tokenizer, write_checkpoint


def refused(done: subprocess.CompletedProcess[str], code: int, message: str, option: str = "") -> None:
    """Check that standard error has one line for what happened and one for the hint, which begins with `option`."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    error = [line for line in done.stderr.splitlines() if not line.endswith("...")]
    assert len(error) == 2, done.stderr
    assert error[0].startswith("error: ")
    assert message in error[0]
    assert error[1].startswith(f"hint:  {option}")
    assert done.stdout == ""


def export_here(tmp_path: Path, target: Path = PAIR / "target", draft: Path = PAIR / "draft", **options: Any) -> Any:
    return run_here("export", "--target", target, "--draft", draft, "-o", tmp_path / "out", **options)


def nothing_written(folder: Path) -> bool:
    return not any(path.name in ("out", ".out.partial") for path in folder.iterdir())


def test_missing_checkpoint(tmp_path: Path) -> None:
    refused(
        run("export", "--target", tmp_path / "absent", "--draft", PAIR / "draft", "-o", tmp_path / "out"), 1, "does not exist"
    )
    assert nothing_written(tmp_path)


def test_truncated_checkpoint(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PAIR / "target", tmp_path / "cut"))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    refused(export_here(tmp_path, target=copy), 1, f"cannot read the weights in {weights}: ")
    assert nothing_written(tmp_path)


def test_unknown_architecture(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PAIR / "target", tmp_path / "odd"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model", "architectures": ["NoSuchModel"]}))
    refused(export_here(tmp_path, draft=copy), 1, "no_such_model")
    assert nothing_written(tmp_path)


def test_vocabulary_mismatch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", llama(), tokenizer())
    refused(export_here(tmp_path, draft=tmp_path / "other"), 1, "different tokenizers: token ")
    assert nothing_written(tmp_path)


def test_existing_output(tmp_path: Path, tiny_export: Path) -> None:
    (tmp_path / "out").mkdir()
    refused(export_here(tmp_path), 1, "already exists")
    refused(run_here("build-engine", tiny_export, "-o", tmp_path / "out"), 1, "already exists")
    assert list((tmp_path / "out").iterdir()) == []


def test_unwritable_output(tmp_path: Path, tiny_export: Path) -> None:
    (tmp_path / "file").touch()
    refused(run_here("build-engine", tiny_export, "-o", tmp_path / "file" / "out"), 1, "cannot write")
    refused(run_here("build-engine", tiny_export, "-o", "/proc/out"), 1, "cannot write")


def test_full_disk(tmp_path: Path, tiny_export: Path, checkpoints: Path) -> None:
    with full_disk(100_000):
        built = run_here("build-engine", tiny_export, "-o", tmp_path / "out", "--capacity", "100")
        refused(built, 1, "no room to write")
        assert nothing_written(tmp_path)
        refused(export_here(tmp_path, checkpoints / "target", checkpoints / "draft"), 1, "no room to write")
        assert nothing_written(tmp_path)


@pytest.mark.slow  # tests/bundle/test_folder.py kills what writes a folder
def test_killed_export_then_again(tmp_path: Path, checkpoints: Path) -> None:
    pair = checkpoints / "target", checkpoints / "draft"
    arguments = ["export", "--target", str(pair[0]), "--draft", str(pair[1]), "-o", str(tmp_path / "out")]
    kill_in_the_middle(arguments, "tracing the target", tmp_path)
    assert export_here(tmp_path, *pair).returncode == 0
    read_manifest(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_build_then_again(tmp_path: Path, tiny_export: Path) -> None:
    arguments = ["build-engine", str(tiny_export), "-o", str(tmp_path / "out"), "--capacity", "100"]
    kill_in_the_middle(arguments, "measuring the target", tmp_path)
    assert run_here(*arguments).returncode == 0
    assert run_here("inspect", tmp_path / "out").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def kill_in_the_middle(arguments: list[str], stage: str, folder: Path) -> None:
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if stage in line:
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "out").exists()


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def manifest(bundle: Path, change: dict[str, Any]) -> None:
    data = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(data | change))


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_corrupted_bundle(bundle: Path, command: str) -> None:
    weights = bundle / "draft" / "model.onnx.data"
    data = bytearray(weights.read_bytes())
    data[5000] ^= 1
    weights.write_bytes(data)
    refused(run_here(command, bundle, *(["--prompt", "x"] if command == "generate" else [])), 1, "not the file that was sealed")


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_newer_schema(bundle: Path, command: str) -> None:
    manifest(bundle, {"schema_version": 99, "later": {}})
    refused(run_here(command, bundle, *(["--prompt", "x"] if command == "generate" else [])), 1, "schema 99")


def test_path_that_leaves_the_folder(bundle: Path) -> None:
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    manifest(bundle, {"files": files | {"../../etc/passwd": {"sha256": "0" * 64, "size": 1}}})
    refused(run_here("inspect", bundle), 1, "leaves the folder")


def test_no_bundle(tmp_path: Path) -> None:
    refused(run("generate", tmp_path / "absent", "--prompt", "x"), 1, "neither an export nor a bundle")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["fly"], "No such command"), (["export"], "Missing option"), (["inspect", "--deep"], "No such option")],
)
def test_unknown_commands_and_options(arguments: list[str], message: str) -> None:
    refused(run_here(*arguments), 2, message)


def test_verify_without_a_bundle_or_with_too_few_draws(tiny_export: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    refused(run_here("verify", tmp_path / "absent"), 1, "neither an export nor a bundle")
    refused(run_here("verify", tiny_export), 1, "is an export, not a bundle")
    refused(run_here("verify", tiny_bundle, "--draws", "99"), 2, "99 is not in the range x>=100")


@pytest.mark.parametrize("options", [[], ["--json"], ["--show"]])
def test_logits_with_nan(broken_bundle: Path, options: list[str]) -> None:
    done = run_here("generate", broken_bundle, "--prompt", BROKEN_TEXT, *options)
    refused(done, 1, "contain NaN or infinity")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", b"caf\xe9"], "not UTF-8"),
        (["--prompt", "word " * 200], "the bundle's capacity is 160"),
        (["--prompt", "x", "--k", "3"], "it has k = 0, 1, 2, 4, 8"),
        (["--prompt", "x", "--max-new-tokens", "0"], "at least 1"),
        (["--prompt", "x", "--chat"], "no chat template"),
        (["--prompt", "x", "--stop", ""], "stop is ''; it must be text"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0; it must be 0, or from 0.00001 to 100"),
        (["--prompt", "x", "--temperature", "nan"], "temperature is nan; it must be"),
        (["--prompt", "x", "--top-p", "0"], "top_p is 0.0; it must be above 0 and at most 1"),
        (["--prompt", "x", "--top-k", "-2"], "top_k is -2; it must be -1 or more"),
        (["--prompt", "x", "--min-p", "1.1"], "min_p is 1.1; it must be from 0 to 1"),
        (["--prompt", "x", "--repetition-penalty", "0"], "repetition_penalty is 0.0; it must be from 0.01 to 100"),
        (["--prompt", "x", "--presence-penalty", "3"], "presence_penalty is 3.0; it must be from -2 to 2"),
        (["--prompt", "x", "--frequency-penalty", "-3"], "frequency_penalty is -3.0; it must be from -2 to 2"),
        (["--prompt", "x", "--seed", str(2**64)], "it must be a whole number of 64 bits"),
        (["--prompt", "x", "--min-new-tokens", "257"], "min_new_tokens is 257; it must be from 0 to max_new_tokens"),
        (["--prompt", "x", "--stop-token-id", "320"], "stop_token_ids is 320; it must be one of the token ids 0 to 319"),
        (["--prompt", "x", "--logit-bias", "7"], "not of the form TOKEN_ID:BIAS"),
        (["--prompt", "x", "--logit-bias", "7:1", "--logit-bias", "7:2"], "the same token has two biases"),
        (["--prompt", "x", "--min-new-tokens", "200"], "min_new_tokens is 200, but after this prompt the bundle has room for"),
        (["--prompt", "x", "--logit-bias", "7:101"], "logit_bias is 101.0; it must be from -100 to 100"),
        (["--prompt", "x", "--logit-bias", "320:1"], "logit_bias is 320; it must be one of the token ids 0 to 319"),
        (["--prompt", "x", "--logprobs", "21", "--json"], "logprobs is 21; it must be from 0 to 20"),
        (["--prompt", "x", "--logprobs", "2"], "logprobs appear only in JSON output"),
        (["--prompt", "x", "--rule", "lenient"], "'lenient' is not one of 'rejection', 'exact-match'"),
        (["--prompt", "x", "--show", "--json"], "cannot be combined"),
        (["--prompt", "x", "--k", "many"], "is neither a number nor auto"),
        (["--prompt"], "requires an argument"),
    ],
)
def test_wrong_requests(tiny_bundle: Path, arguments: list[str | bytes], message: str) -> None:
    refused(run_here("generate", tiny_bundle, *map(os.fsdecode, arguments)), 2, message)


@pytest.mark.parametrize(
    ("arguments", "option"), [(["--prompt", ""], "--prompt"), (["--prompt", "x", "--stop-token-id", "320"], "--stop-token-id")]
)
def test_a_hint_begins_with_the_option(tiny_bundle: Path, arguments: list[str], option: str) -> None:
    refused(run_here("generate", tiny_bundle, *arguments), 2, "", f"{option}: ")


@pytest.mark.parametrize(("text", "message"), [(b"", "prompt is empty"), (b"caf\xe9", "not UTF-8")])
def test_wrong_standard_input(tiny_bundle: Path, text: bytes, message: str) -> None:
    done = subprocess.run([*COMMAND, "generate", str(tiny_bundle)], input=text, capture_output=True)
    refused(subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode()), 2, message)


def test_closed_standard_input(tiny_bundle: Path) -> None:
    command = shlex.join([*COMMAND, "generate", str(tiny_bundle)]) + " <&-"
    refused(subprocess.run(command, shell=True, capture_output=True, text=True), 2, "standard input is closed")


@pytest.mark.parametrize(
    "arguments",
    [["generate", "--prompt", "x"], pytest.param(["generate", "--prompt", "x", "--json"], marks=pytest.mark.slow), ["inspect"]],
)
def test_closed_standard_output(tiny_bundle: Path, arguments: list[str]) -> None:
    command = shlex.join([*COMMAND, arguments[0], str(tiny_bundle), *arguments[1:]])
    refused(subprocess.run(command + " >&-", shell=True, capture_output=True, text=True), 2, "standard output is closed")
    done = subprocess.run(command + " 2>&-", shell=True, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout


def test_a_checkpoint_with_code_of_its_own(tmp_path: Path) -> None:
    """The code is not run, and there is no prompt that asks for permission."""
    copy = Path(shutil.copytree(PAIR / "target", tmp_path / "coded"))
    config = json.loads((copy / "config.json").read_text())
    own = {"model_type": "coded", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (copy / "config.json").write_text(json.dumps(config | own))
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    refused(export_here(tmp_path, target=copy, input="y\ny\n"), 1, "cannot read the configuration of coded")
    assert not (tmp_path / "ran").exists()
    assert nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "1,x"], "not a list of numbers"),
        (["--k", "0"], "at least 1"),
        (["--capacity", "4"], "does not hold k = 8"),
        (["--capacity", "100000"], "supports 256 positions"),
        (["--batch", "0"], "batch is 0"),
        (["--backend", "abacus"], "is not one of 'auto', 'onnxruntime', 'openvino', 'tensorrt-rtx', 'tensorrt'"),
    ],
)
def test_wrong_builds(tiny_export: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    refused(run_here("build-engine", tiny_export, "-o", tmp_path / "out", *arguments), 2, message)
    assert nothing_written(tmp_path)


def test_a_memory_that_cannot_be_used(tmp_path: Path, trained_bundle: Path) -> None:
    refused(run_here("serve", trained_bundle, "--memory", tmp_path / "memory", "--memory-tokens", "0"), 2, "--memory cannot")
    refused(run_here("serve", trained_bundle, "--memory", tmp_path / "memory", "--ray"), 2, "--memory cannot be used")
    for command in ("serve", "generate", "chat"):
        asked = ("--prompt", "T") if command == "generate" else ("--port", "0") if command == "serve" else ()
        refused(run_here(command, trained_bundle, *asked, "--memory", tmp_path / "none" / "memory"), 1, "cannot write")
        refused(run_here(command, trained_bundle, *asked, "--memory", __file__), 1, "cannot read the memory")
