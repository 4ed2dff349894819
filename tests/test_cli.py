"""The commands as a user runs them, in real processes with real exit codes."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import CHAT_TEMPLATE, TOKENIZER
from outrider.commands.generate import GROUPS
from outrider.runtime.generation import Outrider
from outrider.runtime.params import RANGES, SamplingParams
from outrider.tests.support import COMMAND, reseal, run, run_here


def test_export_build_and_generate(checkpoints: Path, tmp_path: Path) -> None:
    (template := tmp_path / "template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    pair = "--target", checkpoints / "target", "--draft", checkpoints / "draft"
    export = run_here("export", *pair, "--chat-template", template, "-o", tmp_path / "onnx")
    assert export.returncode == 0, export.stderr
    assert (tmp_path / "onnx" / CHAT_TEMPLATE).read_text() == template.read_text()
    assert f"wrote {tmp_path}/onnx" in export.stdout
    built = run("build-engine", tmp_path / "onnx", "-o", tmp_path / "bundle", "--k", "1,4", "--capacity", "100", "--json")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["build"]["k"] == [1, 4]
    shown = run("generate", tmp_path / "bundle", "--prompt", "the quick", "--max-new-tokens", "12", "--show")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1].startswith("12 tokens in ")
    inspected = run_here("inspect", tmp_path / "bundle")
    assert inspected.returncode == 0, inspected.stderr
    assert "all files match their digests" in inspected.stdout
    assert "target/model.onnx.data" in inspected.stdout
    for row in ("schema, contract", "tokens", "end of text", "capacity, batch", "windows", "max prompt chunk", "layers"):
        assert row in inspected.stdout


def test_json_is_one_object_and_nothing_else(trained_bundle: Path) -> None:
    done = run("generate", trained_bundle, "--prompt", "Once upon a time", "--max-new-tokens", "20", "--k", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    result = json.loads(done.stdout)
    assert len(result["token_ids"]) == len(result["from_draft"]) == result["stats"]["tokens"] == 20
    assert result["finish_reason"] == "length"
    plain = run_here("generate", trained_bundle, "--prompt", "Once upon a time", "--max-new-tokens", "20", "--k", "0")
    assert plain.stdout == result["text"] + "\n"
    assert result["stats"]["mean_acceptance_length"] > 1


def test_a_file_remembers_the_last_run(trained_bundle: Path, tmp_path: Path) -> None:
    options = "--prompt", "Once upon a time", "--max-new-tokens", "20", "--k", "4", "--drafter", "memory", "--json"
    first, second = (
        json.loads(run_here("generate", trained_bundle, *options, "--memory", tmp_path / "memory").stdout) for _ in range(2)
    )
    assert first["text"] == second["text"]
    assert first["stats"]["drafted"] == 0
    assert second["stats"]["accepted"] == second["stats"]["drafted"] > 10


def test_the_prompt_may_come_on_standard_input(trained_bundle: Path) -> None:
    by_option = run_here("generate", trained_bundle, "--prompt", "naïve café 🙂", "--max-new-tokens", "9")
    by_input = run("generate", trained_bundle, "--max-new-tokens", "9", input="naïve café 🙂\n")
    assert by_option.returncode == 0, by_option.stderr
    assert by_option.stdout == by_input.stdout


def test_chat_and_stop(trained_bundle: Path) -> None:
    arguments = ("generate", trained_bundle, "--prompt", "Hi, I would like a coffee.", "--chat", "--max-new-tokens", "60")
    whole = json.loads(run_here(*arguments, "--json").stdout)["text"]
    stop = whole.split()[3]
    done = run_here(*arguments, "--stop", stop, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["text"] == whole[: whole.index(stop)]
    assert result["finish_reason"] == "stop"
    bare = json.loads(run_here(*(word for word in arguments if word != "--chat"), "--json").stdout)["text"]
    assert bare != whole  # with the template, an agent answers


def test_a_full_cache_says_so(trained_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained_bundle, tmp_path / "bundle"))
    generation = read_manifest(copy).generation
    reseal(copy, generation=type(generation)(eos_token_ids=[], special_tokens={}))
    done = run_here("generate", copy, "--prompt", "Once upon a time", "--max-new-tokens", "5000")
    assert done.returncode == 0
    assert "the cache is full" in done.stderr


def test_show_colours_the_text_by_origin_on_a_terminal(trained_bundle: Path) -> None:
    arguments = ["generate", str(trained_bundle), "--prompt", "Customer: Hi", "--max-new-tokens", "24", "--k", "4", "--show"]
    out = on_terminal(arguments)
    assert b"\x1b[32m" in out  # accepted draft
    assert b"\x1b[33m" in out  # target's own
    assert b"mean acceptance length" in out


def test_a_terminal_obeys_no_control_character_of_the_text(trained_bundle: Path) -> None:
    escape = tokenizers.Tokenizer.from_file(str(trained_bundle / TOKENIZER)).encode("\x1b", add_special_tokens=False).ids
    arguments = ["generate", str(trained_bundle), "--prompt", "x", "--max-new-tokens", "2", "--logit-bias", f"{escape[0]}:100"]
    assert b"\x1b" in run(*arguments).stdout.encode()
    out = on_terminal(arguments)
    assert b"\\x1b" in out
    assert b"\x1b" not in out


def on_terminal(arguments: list[str]) -> bytes:
    """Return what a command prints on a terminal, if it succeeds."""
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
    return out


@pytest.mark.parametrize("module", ["outrider", "outrider.cli"])
def test_help_lists_the_stages(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("export", "build-engine", "verify", "generate", "inspect"):
        assert command in done.stdout


def test_help_of_generate_groups_its_options_and_names_their_ranges() -> None:
    text = " ".join(run_here("generate", "--help").stdout.split())
    places = [text.index(f" {group}: ") for group in GROUPS]
    assert places == sorted(places)
    for name, (_, _, wanted) in RANGES.items():
        option = text.index(f" --{name.replace('_', '-')} ")
        assert f"Range: {wanted}." in text[option:]


def test_sampling_options_reach_the_sampler(trained_bundle: Path) -> None:
    # With a fixed k, because auto depends on timing, and the last bits of probabilities depend on the number of rows.
    arguments = ("generate", trained_bundle, "--prompt", "Once upon a time", "--max-new-tokens", "24", "--json", "--k", "4")
    sampling = ("--temperature", "0.9", "--top-p", "0.95", "--top-k", "50", "--min-p", "0.01", "--seed", "5")
    penalties = ("--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.1")
    other = ("--logit-bias", "300:-100", "--logit-bias", "301:2", "--stop-token-id", "9", "--min-new-tokens", "24")
    result = json.loads(run_here(*arguments, *sampling, *penalties, *other, "--rule", "exact-match", "--logprobs", "2").stdout)
    params = SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        min_p=0.01,
        seed=5,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={300: -100, 301: 2},
        stop_token_ids=[9],
        min_new_tokens=24,
        max_new_tokens=24,
        rule="exact-match",
        logprobs=2,
    )
    events = list(Outrider.load(trained_bundle).generate("Once upon a time", params, k=4))
    assert result["token_ids"] == [token for event in events for token in event.token_ids]
    assert result["logprobs"] == [
        {"logprob": each.logprob, "top": [list(top) for top in each.top]} for event in events for each in event.logprobs or ()
    ]
    assert len(result["logprobs"]) == 24


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, to which nothing can be written")
@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["generate", "--prompt", "x", "--json"], ["inspect"]])
def test_an_output_that_cannot_be_written(tiny_bundle: Path, arguments: list[str]) -> None:
    command, *options = arguments
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, command, str(tiny_bundle), *options], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "error: input or output failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_output_encoding_that_lacks_characters(trained_bundle: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ids = tokenizers.Tokenizer.from_file(str(trained_bundle / TOKENIZER)).encode("é", add_special_tokens=False).ids
    arguments = ("generate", trained_bundle, "--prompt", "naïve café", "--max-new-tokens", "9", "--show")
    done = run(*arguments, "--logit-bias", f"{ids[0]}:100", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("?????????\n")  # the first of its two bytes is no character
