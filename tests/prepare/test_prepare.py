"""`outrider generate MODEL`: what is missing is made, kept, and used again; the answers are those of the commands by hand."""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from click.testing import CliRunner, Result

from outrider.builder.build import build_engine
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import Manifest, MergedAdapter
from outrider.cli import main
from outrider.engines.precisions import PRECISIONS
from outrider.errors import OutriderError, ParityError
from outrider.export.arguments import ExportArguments
from outrider.export.checkpoints.checkpoint import read_config
from outrider.export.checkpoints.source import Source
from outrider.prepare.cache import Cache
from outrider.prepare.precision import default_precision, weight_bits, why
from outrider.prepare.wanted import Wanted
from outrider.progress import SILENT, Progress
from outrider.tests.export import quantized
from outrider.tests.export.gguf_files import write
from outrider.tests.export.test_lora import write_ones
from outrider.tests.prepare.hub import Hub
from outrider.tests.support import PAIR, full_disk, ready_made

PROMPT = ["--prompt", "the quick brown", "--max-new-tokens", "8"]
Run = Callable[..., Result]


def without_measuring(source: Path, output: Path, **options: Any) -> Manifest:
    """Build with ready-made costs."""
    chosen = options | {"max_prompt_chunk": min(64, options["capacity"])}
    return build_engine(source, output, **chosen, measured=ready_made(read_manifest(source), chosen))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command with an empty cache, where builds take ready-made costs."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("outrider.prepare.prepare.build_engine", without_measuring)
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


def made(result: Result) -> Path:
    """Return the bundle that a command made or used."""
    assert result.exit_code == 0, result.output
    return Path(result.stderr.splitlines()[-2 if "checking" in result.stderr.splitlines()[-1] else -1].split()[1].strip(",;"))


def connect(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process ask a hub, with an empty cache of downloads."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "downloads"))


def test_a_checkpoint_is_exported_and_built_once(run: Run, checkpoints: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoints / "target", tmp_path / "model")
    words = ("generate", model, *PROMPT)
    first = run(*words)
    assert "precision int4 in groups of 32: the fastest" in first.stderr
    by_hand = [line.removeprefix("by hand: outrider ") for line in first.stderr.splitlines() if line.startswith("by hand: ")]
    assert len(by_hand) == 2
    assert len([line for line in first.stderr.splitlines() if not line.endswith("...")]) == 6
    bundle = made(first)
    checked = bundle.with_name(f"{bundle.name}.checked")
    kept = checked.stat()  # the weights were checked, so the next time they are not
    again = run(*words)
    assert (again.stdout, made(again)) == (first.stdout, bundle)
    assert checked.stat().st_ino == kept.st_ino
    assert not any(words in again.stderr for words in ("by hand", "exporting"))

    # The commands that it prints make the same export, and of it, a bundle of the same engines.
    assert by_hand[0] == f"export --target {model} --precision int4 -o EXPORT"
    (export,) = (path for path in (tmp_path / "cache" / "exports").iterdir() if path.is_dir())
    folders = {"EXPORT": str(tmp_path / "export"), "BUNDLE": str(tmp_path / "bundle")}
    assert run(*(folders.get(word, word) for word in shlex.split(by_hand[0]))).exit_code == 0
    ours, theirs = (read_manifest(folder).files for folder in (tmp_path / "export", export))
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} <= {"target/model.onnx"}  # as shared traces do
    assert run("generate", tmp_path / "export", *PROMPT).stdout == first.stdout
    folders["EXPORT"] = str(export)
    assert run(*(folders.get(word, word) for word in shlex.split(by_hand[1])), "--costs", bundle).exit_code == 0
    assert read_manifest(tmp_path / "bundle").files == read_manifest(bundle).files
    assert run("generate", tmp_path / "bundle", *PROMPT).stdout == first.stdout

    # Other options make another bundle of the same export.
    assert made(run(*words, "--capacity", "64")) != bundle
    assert len(list((tmp_path / "cache" / "exports").glob("*.json"))) == 1
    listed = run("cache", "list")
    assert "bundles/model-" in listed.stdout.replace("\n", "")


def test_a_checkpoint_in_four_bits_is_kept_as_it_is(run: Run, tmp_path: Path) -> None:
    model = quantized.write(PAIR / "target", tmp_path / "model", "awq")
    first = run("generate", model, *PROMPT)
    assert "precision as-is: the checkpoint's own 4 bits" in first.stderr
    assert f"by hand: outrider export --target {model} --precision as-is -o EXPORT" in first.stderr
    rounded = read_manifest(made(first)).models["target"].quantization
    assert rounded is not None
    assert (rounded.method, rounded.rounded) == ("as-is", ["lm_head"])


def test_an_adapter_is_merged_and_its_content_is_part_of_the_key(
    run: Run, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OutriderError("another export", "")

    model, adapter = checkpoints / "target", tmp_path / "adapter"
    write_ones(adapter, {"model.layers.0.self_attn.o_proj": (32, 32)})
    words = ("generate", model, *PROMPT, "--lora", f"{adapter}=0.001")
    first = run(*words)
    assert f"by hand: outrider export --target {model} --lora {adapter}=0.001 --precision int4 -o EXPORT" in first.stderr
    bundle = made(first)
    assert read_manifest(bundle).models["target"].adapters == [MergedAdapter(source="adapter", weight=0.001)]
    assert made(run(*words)) == bundle
    shutil.rmtree(adapter)
    write_ones(adapter, {"model.layers.1.self_attn.o_proj": (32, 32)})
    with monkeypatch.context() as patched:
        patched.setattr("outrider.export.pair.export", failing)
        assert "another export" in run(*words).stderr
    refused = run("generate", bundle, *PROMPT, "--lora", adapter)
    assert "a bundle, which is made already, and --lora does not apply to it" in refused.stderr


@pytest.mark.parametrize(
    ("kind", "precision", "times"),
    [("F32", "int4", None), ("Q4_0", "as-is", 0.9), ("Q4_1", "int4", 1.0), ("Q5_0", "int4", 1.5), ("Q8_0", "int4", 1.5)],
)
def test_a_gguf_file_is_kept_as_it_is_if_that_is_as_fast_or_the_model_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, precision: str, times: float | None
) -> None:
    """Matrices in Q4_0 are int4 with a scale for 32 weights; Q4_1 needs a second product, and the others 8 bits."""
    weights = sum(each.numel() for each in write(tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType[kind]).parameters())
    source = Source.parse(str(tmp_path / "model.gguf"))
    wanted, adapted = (Wanted(str(tmp_path), lora=lora) for lora in ((), ("adapter",)))
    assert default_precision(wanted, source) == ("int4" if times is None else "as-is")
    memory = f"the file's {kind} weights, in {times} times the memory"
    cost = f"{memory} of int4, which costs models of less than a billion parameters much accuracy"
    assert why("as-is", wanted, source) == ("the checkpoint's own 4 bits" if kind in ("F32", "Q4_0") else cost)
    assert default_precision(adapted, source) == "int4"  # it changes what is stored
    monkeypatch.setattr("outrider.prepare.precision.SMALL", weights // 2)
    assert default_precision(wanted, source) == precision
    assert why("int4", wanted, source) == "the fastest" + f"; as-is would keep {memory} of int4" * (times is not None)
    assert why("int4", adapted, source) == "the fastest"


def test_a_small_gguf_file_is_run_as_it_is(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType.Q5_0)
    first = run("generate", tmp_path / "model.gguf", "--draft", "none", *PROMPT)
    assert "precision as-is: the file's Q5_0 weights, in 1.5 times the memory of int4, which costs models of" in first.stderr
    assert f"outrider export --target {tmp_path}/model.gguf --draft none --precision as-is -o EXPORT" in first.stderr
    rounded = read_manifest(made(first)).models["target"].quantization
    assert (rounded and rounded.method) == "as-is"


def test_an_export_is_built_and_a_bundle_is_used_as_it_is(run: Run, tiny_export: Path, tiny_bundle: Path) -> None:
    built = run("generate", tiny_export, *PROMPT)
    assert "precision fp32: the export's" in built.stderr
    direct = run("generate", tiny_bundle, *PROMPT)
    assert (direct.exit_code, direct.stdout) == (0, built.stdout)
    assert "cache" not in direct.stderr
    for model, option in ((tiny_export, "--precision=int8"), (tiny_export, "--draft=x"), (tiny_bundle, "--capacity=64")):
        refused = run("generate", model, option, *PROMPT)
        assert (refused.exit_code, "does not apply to it" in refused.stderr) == (2, True), refused.output


def test_a_model_of_the_hub_is_found_by_its_commit(
    run: Run, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(checkpoints / "target", tmp_path / "hub" / "tiny" / "target")
    with Hub(tmp_path / "hub").running() as hub:
        connect(hub, tmp_path, monkeypatch)
        first = made(run("generate", "tiny/target", "--precision", "fp32", *PROMPT))
        assert read_manifest(first).models["target"].source == "tiny/target"
        assert made(run("generate", "tiny/target", "--precision", "fp32", *PROMPT)) == first
        absent = run("generate", "tiny/absent", *PROMPT)
        assert (absent.exit_code, "the hub has no public model of that name" in absent.stderr) == (1, True), absent.output
        (export,) = (path for path in (tmp_path / "cache" / "exports").iterdir() if path.is_dir())
        monkeypatch.setattr("outrider.export.pair.export", lambda wanted, _: shutil.copytree(export, wanted.output))
        commit = hub.revision("tiny/target")
        (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
        assert hub.revision("tiny/target") != commit
        assert made(run("generate", "tiny/target", "--precision", "fp32", *PROMPT)) != first
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody answers: what was downloaded last
    assert run("generate", "tiny/target", "--precision", "fp32", *PROMPT).exit_code == 0


def test_a_disk_without_room_is_named_before_the_work(run: Run, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.prepare.prepare.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    done = run("generate", checkpoints / "target", *PROMPT)
    assert (done.exit_code, "error: no room in the cache" in done.stderr) == (1, True), done.output
    assert "loading the target" not in done.stderr


@pytest.mark.parametrize(("form", "bits"), [("F32", 4), ("Q4_0", 5), ("Q8_0", 9), ("awq", 4), ("gptq-8-bits", 8)])
def test_what_is_kept_as_it_is_needs_the_room_of_its_own_bits(form: str, bits: float, tmp_path: Path) -> None:
    """Those of a GGUF file include scales. What is not quantized is the draft of such a target, and rounded to 4 bits."""
    source = tmp_path / "model"
    if form in quantized.METHODS:
        quantized.write(PAIR / "target", source, form)
    else:
        write(source, kind=gguf.GGMLQuantizationType[form])
    assert [weight_bits(each, Source.parse(str(source))) for each in ("as-is", "fp16")] == [bits, 16]


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_half_written(run: Run, checkpoints: Path, tmp_path: Path) -> None:
    """While exporting, and with less room again, while building: the next run uses what was complete."""
    words, cache = ("generate", checkpoints / "target", *PROMPT), tmp_path / "cache"

    def refused(kind: str) -> str:
        with full_disk(20_000):
            done = run(*words)
        assert (done.exit_code, f"error: no room to write {cache / kind}" in done.stderr) == (1, True), done.output
        assert done.stderr.splitlines()[-1].startswith("hint:  free some disk space")
        assert not [path for path in cache.rglob("*") if path.suffix == ".partial"]
        return done.stderr

    made(run(*words))  # so that tests have the trace, which they share
    shutil.rmtree(cache)
    assert "tracing" in refused("exports")
    assert Cache.of_user().entries() == []
    bundle = made(run(*words))
    shutil.rmtree(bundle)
    bundle.with_name(bundle.name + ".json").unlink()
    assert "tracing" not in refused("bundles")
    assert [entry.folder.parent.name for entry in Cache.of_user().entries()] == ["exports"]
    again = run(*words)
    assert (made(again), "tracing" in again.stderr) == (bundle, False)


def test_a_gguf_file_of_the_hub_is_read_and_its_weights_are_counted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub" / "tiny" / "gguf").mkdir(parents=True)
    weights = sum(each.numel() for each in write(tmp_path / "hub" / "tiny" / "gguf" / "m-F32.gguf").parameters())
    needed, read = weights * (8 + PRECISIONS["int4"].weight_bits) / 8, list[str]()

    def exported(wanted: ExportArguments, _: Progress) -> None:
        read.append(read_config(wanted.target).model_type)
        raise OutriderError("far enough", "a hint")

    monkeypatch.setattr("outrider.export.pair.export", exported)
    with Hub(tmp_path / "hub").running() as hub:
        connect(hub, tmp_path, monkeypatch)
        Source.parse("tiny/gguf").download(SILENT)  # so that the hub's client needs no room
        for free, error in ((needed - 1, "no room in the cache"), (needed, "far enough")):
            monkeypatch.setattr("outrider.prepare.prepare.shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
            assert error in run("generate", "tiny/gguf:F32", *PROMPT).stderr
    assert read == ["qwen2"]


def test_what_the_bundle_will_not_have_is_noticed_before_the_work(run: Run, checkpoints: Path, tmp_path: Path) -> None:
    done = run("generate", checkpoints / "target", "--k", "3", *PROMPT)
    assert (done.exit_code, "k = 3 is not built into" in done.stderr) == (2, True), done.output
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", checkpoints / "target", "--port", taken.getsockname()[1])
    assert (done.exit_code, "error: cannot listen on 127.0.0.1" in done.stderr) == (1, True), done.output
    assert not (tmp_path / "cache").exists()


def test_a_device_decides_on_the_backend_and_is_part_of_the_key(
    run: Run, tiny_export: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_: Path, output: Path, **options: Any) -> None:
        batches.append(options["batch"])
        shutil.copytree(tiny_bundle, output)

    gpu, batches = SimpleNamespace(name="some GPU", memory=lambda: (1000, 10**12)), list[int]()
    monkeypatch.setitem(sys.modules, "outrider.engines.cuda", SimpleNamespace(Cuda=lambda: gpu))
    monkeypatch.setattr("outrider.prepare.prepare.build_engine", build)
    done = run("generate", tiny_export, "--device", "cuda", *PROMPT)
    assert "backend onnxruntime: for the device cuda" in done.stderr
    (record,) = (tmp_path / "cache" / "bundles").glob("*.json")
    assert "some GPU" in record.read_text()
    assert batches == [1]  # as the GPU has no memory left for more


@pytest.mark.parametrize("model", ["absent", "./absent", "../absent", "/absent/model", "a/b/c", "x" * 5000, "nul\0byte"])
def test_what_is_no_model_is_refused(run: Run, model: str, tmp_path: Path) -> None:
    done = run("generate", model, *PROMPT)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 2), done.output
    assert not (tmp_path / "cache").exists()


def test_an_empty_folder_is_refused(run: Run, tmp_path: Path) -> None:
    done = run("serve", tmp_path)
    assert (done.exit_code, "neither an export nor a bundle" in done.stderr) == (1, True), done.output


def test_a_precision_that_costs_too_much_gives_way(run: Run, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.export import pair

    export = pair.export

    def strict(wanted: ExportArguments, progress: Progress) -> Manifest:
        if wanted.precision == "int4":
            raise ParityError("the perplexity is twice that of the checkpoint", "a hint")
        return export(wanted, progress)

    monkeypatch.setattr(pair, "export", strict)
    done = run("generate", checkpoints / "target", *PROMPT)
    assert "exporting to int8, because the perplexity is twice" in done.stderr
    assert read_manifest(made(done)).models["target"].precision == "int8"
    asked = run("generate", checkpoints / "target", "--precision", "int4", *PROMPT)
    assert (asked.exit_code, "the perplexity is twice" in asked.stderr) == (1, True)
