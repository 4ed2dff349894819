"""EAGLE-3 heads of every format: the graphs compute what other implementations do, and what is not understood is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from transformers import DynamicCache

from outrider.backends.onnxruntime.engine import OnnxRuntimeEngine
from outrider.backends.tensorrt.process import build_plan
from outrider.bundle.folder import read_manifest
from outrider.cli import main
from outrider.engines.contract import cache_tensors, step_tensors, window_buckets
from outrider.engines.device import Cpu
from outrider.engines.graph_session import GraphSession
from outrider.engines.session import Pass, Sizes
from outrider.errors import OutriderError, SourceError, UnsupportedModelError, UsageError
from outrider.export.checkpoints.source import Source
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.graph.step_model import trace
from outrider.export.heads.draft_head import Target
from outrider.export.heads.eagle3 import Eagle3Checkpoint
from outrider.export.pair import export_pair
from outrider.tests.export import models_page
from outrider.tests.export.eagle3 import weights
from outrider.tests.support import WIDTH, llama, rtx_job, write_checkpoint

COLUMNS = ("difference", "builds with TensorRT-RTX")


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[models_page.Table]:
    """The draft heads of docs/models.md."""
    yield from models_page.Table.fixture(request, "heads", 2, COLUMNS, text)


def test_the_page_is_about_these_heads(page: models_page.Table) -> None:
    page.check(text(page))


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
CAPACITY, TOLERANCE = 64, 1e-4


@pytest.fixture(scope="module")
def fixtures() -> dict[str, np.ndarray]:
    """What speculators' modules compute; see `eagle3/make_fixtures.py`."""
    with np.load(Path(weights.__file__).with_name("fixtures.npz")) as arrays:
        return dict(arrays)


def write(folder: Path, name: str, change: Change | None = None) -> Path:
    """A case's checkpoint as its trainer writes it, perhaps changed."""
    config, arrays = weights.checkpoint(name)
    tensors = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / weights.ALL[name].file
    torch.save(tensors, path) if path.suffix == ".bin" else save_file(tensors, path)
    return folder


def target(name: str, **changes: Any) -> Target:
    case, arrays = weights.ALL[name], weights.target(name)
    embedding, head = (torch.from_numpy(arrays[key]) for key in ("model.embed_tokens.weight", "lm_head.weight"))
    given = {"layers": weights.TARGET_LAYERS, "hidden_size": case.target_hidden, "vocab_rows": weights.VOCAB}
    return Target(name="the target", **(given | changes), embedding=embedding, output_head=head)


@pytest.mark.parametrize("name", weights.CASES)
def test_a_head_computes_what_speculators_does(
    name: str, fixtures: dict[str, np.ndarray], page: models_page.Table, tmp_path: Path
) -> None:
    """In eager transformers: a prefill, and chains of draft steps after prefixes of every length."""
    checkpoint = Eagle3Checkpoint.read(Source.parse(str(write(tmp_path, name))))
    mixer, head = checkpoint.build(target(name))
    assert mixer.ids == list(weights.CASES[name].inputs_of or (2, 4, 5))
    known = torch.from_numpy(weights.target_ids(name))
    hidden, tokens = map(torch.from_numpy, weights.inputs(name))
    differences = []

    def compare(got: torch.Tensor, kind: str, *at: int) -> None:
        differences.append(float(np.abs(got.numpy() - fixtures[f"{name}/{kind}"][at]).max()))
        assert differences[-1] <= TOLERANCE

    with torch.no_grad():
        features = mixer([*hidden[None].chunk(len(mixer.ids), -1)])
        logits, output = head(tokens[None, 1:], features, torch.arange(weights.ROWS)[None], DynamicCache())
        compare(logits[0][:, known], "logits")
        compare(output[0], "hidden")
        for prefix, length in enumerate(weights.PREFIXES):
            ids, read = tokens[None, 1 : length + 1], features[:, :length]
            made = output[:, length - 1 : length]
            for step in range(weights.STEPS):
                ids = torch.cat([ids, torch.tensor([[int(fixtures[f"{name}/chain_tokens"][prefix, step])]])], 1)
                read = torch.cat([read, made], 1)
                logits, all_made = head(ids, read, torch.arange(ids.shape[1])[None], DynamicCache())
                made = all_made[:, -1:]
                compare(logits[0, -1, known], "chain_logits", prefix, step)
                compare(made[0, 0], "chain_hidden", prefix, step)
    page.says(row(name), "difference", models_page.power_of_ten(max(differences)), figure=True)


@pytest.mark.parametrize("name", weights.PARALLEL)
def test_a_head_with_masks_computes_what_speculators_does(name: str, fixtures: dict[str, np.ndarray], tmp_path: Path) -> None:
    """P-EAGLE: several tokens from one pass."""
    mixer, head = Eagle3Checkpoint.read(Source.parse(str(write(tmp_path, name)))).build(target(name))
    hidden, tokens = map(torch.from_numpy, weights.inputs(name))
    masks = [weights.PARALLEL[name].mask] * (weights.STEPS - 1)
    known = torch.from_numpy(weights.target_ids(name))
    for index, prefix in enumerate(weights.PREFIXES):
        ids = torch.tensor([[*tokens[1 : prefix + 1].tolist(), *masks]])
        with torch.no_grad():
            features = mixer([*hidden[None, :prefix].chunk(len(mixer.ids), -1)])
            features = torch.nn.functional.pad(features, (0, 0, 0, len(masks)))  # a mask's is its own
            logits, _ = head(ids, features, torch.arange(ids.shape[1])[None], DynamicCache())
        got = logits[0, -weights.STEPS :][:, known]
        np.testing.assert_allclose(got, fixtures[f"{name}/parallel"][index], atol=TOLERANCE)


IN_CI = ("speculators-residual-before-fc-output", "speculators-two-layers-mixed")  # every flag, and several layers


@pytest.mark.parametrize(
    "name", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.slow) for each in weights.CASES]
)
def test_its_graph_drafts_as_speculators_does_after_acceptances_of_every_length(
    name: str, fixtures: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Rounds as the runtime runs them: the context of each round replaces what the draft steps before it wrote."""
    mixer, head = Eagle3Checkpoint.read(Source.parse(str(write(tmp_path / "head", name)))).build(target(name))
    width, case = weights.HIDDEN, weights.CASES[name]
    layers = [(weights.KV_HEADS, case.head_dim, case.head_dim)] * case.layers
    path = tmp_path / "head.onnx"
    trace(head, CacheLayout(layers), features=width, is_head=True).save(path, external_data=True)
    inputs, outputs = step_tensors(layers, weights.VOCAB, "fp32", width, reads_features=True)
    sizes = Sizes(layers, weights.VOCAB, CAPACITY, window_buckets(CAPACITY), 16, 1, width, reads_features=True)
    device = Cpu()
    session = GraphSession(device, OnnxRuntimeEngine(path, [*inputs, *outputs], device), "fp32", sizes)
    hidden, tokens = weights.inputs(name)
    with torch.no_grad():
        features = mixer([*torch.from_numpy(hidden)[None].chunk(len(mixer.ids), -1)])[0].numpy()
    known = weights.target_ids(name)
    position, to = (device.zeros((1,), "int64", "a step") for _ in range(2))

    def written() -> np.ndarray:
        return session.cache()["past_features"][:, 0, :CAPACITY].copy()

    def draft_step(rows: list[int], at: int) -> tuple[np.ndarray, np.ndarray]:
        """The logits of the last of these rows, and the feature of the next one, which it writes."""
        given = device.zeros((1, len(rows)), "int64", "a step")
        logits = device.zeros((1, len(rows), weights.VOCAB), "float32", "a step")
        given.view()[:], position.view()[:], to.view()[:] = rows, at, at + len(rows)
        session.bind(Pass(given, position, logits, session.window(len(rows), at, at), feature_positions=to))()
        return logits.view()[0, -1, known].copy(), written()[0, at + len(rows)]

    def same(got: tuple[np.ndarray, np.ndarray], logits: np.ndarray, feature: np.ndarray) -> None:
        np.testing.assert_allclose(got[0], logits, atol=TOLERANCE)
        np.testing.assert_allclose(got[1], feature, atol=TOLERANCE)

    first, last = weights.PREFIXES[0], weights.PREFIXES[-1]
    for accepted in range(last - first):  # in each round; it emits one token more
        session.set_features(np.zeros((1, CAPACITY, width), np.float32))
        before = 0
        for length in range(first, last + 1, accepted + 1):
            kept = written()
            kept[0, :length] = features[:length]  # the target's pass
            session.set_features(kept)
            results = {kind: fixtures[f"{name}/{kind}"] for kind in ("logits", "hidden", "chain_logits", "chain_hidden")}
            got = draft_step(tokens[before + 1 : length + 1].tolist(), before)
            same(got, results["logits"][length - 1], results["hidden"][length - 1])
            prefix = length - first
            for step, token in enumerate(fixtures[f"{name}/chain_tokens"][prefix]):
                got = draft_step([int(token)], length + step)
                same(got, results["chain_logits"][prefix, step], results["chain_hidden"][prefix, step])
            before = length


def test_tensorrt_rtx_builds_it(tmp_path: Path) -> None:
    """The head with the most norms; the next test has all of them, in either precision."""
    build_plans("specforge-3.1", tmp_path, "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("name", weights.CASES)
def test_tensorrt_rtx_builds_it_in_every_precision(name: str, page: models_page.Table, tmp_path: Path) -> None:
    page.says(row(name), "builds with TensorRT-RTX", ", ".join(build_plans(name, tmp_path, "fp16", "fp32")))


def build_plans(name: str, folder: Path, *precisions: str) -> tuple[str, ...]:
    """Build a case's plan in each precision, with every profile, and return them."""
    pytest.importorskip("tensorrt_rtx", reason="would show that every head builds: pip install 'outrider[rtx]'")
    mixer, head = Eagle3Checkpoint.read(Source.parse(str(write(folder / "head", name)))).build(target(name))
    case = weights.CASES[name]
    layers = [(weights.KV_HEADS, case.head_dim, case.head_dim)] * case.layers
    for precision in precisions:
        path = folder / f"{precision}.onnx"
        head.to({"fp16": torch.float16, "fp32": torch.float32}[precision])
        trace(head, CacheLayout(layers), features=mixer.hidden_size, is_head=True).save(path, external_data=True)
        build_plan(rtx_job(path, cache_tensors(layers, mixer.hidden_size), "head"), name)
    return precisions


def row(name: str) -> str:
    """The beginning of a case's row."""
    flags = name.removeprefix("speculators-0.1").removeprefix(name.split("-")[0]).strip("-").replace("-", " ")
    return f"{weights.CASES[name].format} | {flags or 'none'}"


def text(page: models_page.Table) -> str:
    """The draft heads of docs/models.md, below their heading."""
    lines = [
        "Tiny random EAGLE-3 heads in fp32, in every format, are compared with the modules of speculators 0.9.0",
        "(`tests/export/eagle3/`) and built for TensorRT-RTX with every profile. *Difference* is the largest difference of",
        "logits and hidden states over a prefill and chained draft steps, rounded up to a power of ten. Unknown configuration",
        "keys or tensors are refused.",
        "",
        f"| format | flags | {' | '.join(COLUMNS)} |",
        "|---|---|---|---|",
        *page.lines(map(row, weights.CASES)),
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("reading", weights.OTHER_READINGS)
def test_other_readings_of_a_checkpoint_would_be_noticed(reading: str, fixtures: dict[str, np.ndarray]) -> None:
    """The tolerance tells what some trainers computed from what servers compute."""
    case = weights.OTHER_READINGS[reading]
    differences = [
        np.abs(fixtures[f"{reading}/{what}"] - fixtures[f"{case}/{what}"]).max() for what in ("hidden", "chain_logits")
    ]
    assert max(differences) > 100 * TOLERANCE


def without(*names: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            (config if name in config else tensors).pop(name)

    return change


def with_key(key: str, value: Any) -> Change:
    return lambda config, tensors: config.update({key: value})


def with_eagle(key: str, value: Any) -> Change:
    return lambda config, tensors: config["eagle_config"].update({key: value})


def with_tensor(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def outside(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = weights.VOCAB


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("safeailab", with_key("norm_after_fc", True), "norm_after_fc = true, which outrider does not know"),
        ("speculators", with_key("parallel_drafting", 4), "parallel_drafting = 4, which outrider does not know"),
        ("speculators", with_tensor("mask_hidden", 1, 1, 96), "the tensor mask_hidden, which outrider does not know"),
        ("safeailab", with_tensor("midlayer.gate.weight", 32), "the tensor layers.0.gate.weight, which"),
        ("modelopt", with_eagle("use_aux_hidden_state", False), "eagle_config.use_aux_hidden_state = False, which"),
        ("modelopt", with_eagle("parallel_draft_step", 4), "eagle_config.parallel_draft_step = 4, which"),
        ("modelopt", with_eagle("a_new_norm", True), "eagle_config.a_new_norm = True, which"),
        ("safeailab", with_key("model_type", "deepseek_v3"), "layers of the type 'deepseek_v3', which"),
        (
            "safeailab",
            with_key("rope_scaling", {"rope_type": "longrope"}),
            "by the length of the text (longrope), which",
        ),
        ("speculators-fc-norm", with_key("fc_norm", False), "the tensor fc_norm.0.weight, which"),
        ("speculators-fc-norm", without("fc_norm.1.weight"), "has no tensor fc_norm.1.weight"),
        ("safeailab", without("midlayer.hidden_norm.weight"), "has no tensor layers.0.hidden_norm.weight"),
        ("safeailab", with_tensor("norm.weight", 31), "norm.weight of head has the shape 31 and not 32"),
        ("safeailab", without("hidden_size"), "missing required field `hidden_size`"),
        ("safeailab", with_tensor("d2t", 39), "d2t of head is not a list of 40 tokens"),
        ("safeailab", outside, "d2t of head is not a list of 40 tokens in ascending order below 96"),
        ("safeailab", without("d2t"), "head proposes 40 of 96 tokens, but has no tensor d2t to name them"),
        ("safeailab", without("fc.weight"), "head has no matrix fc.weight"),
        ("safeailab", with_tensor("fc.weight", 32), "head has no matrix fc.weight"),
        ("safeailab", with_tensor("d2t", 40, 1), "d2t of head is not a list of 40 tokens"),
        ("safeailab", with_tensor("d2t", 40), "d2t of head is not a list of 40 tokens"),  # of floats
        ("safeailab", with_key("hidden_size", "32"), "Expected `int`, got `str` - at `$.hidden_size`"),
        ("safeailab", with_key("num_attention_heads", 3), "q_proj.weight of head has the shape"),
        ("safeailab", with_key("hidden_act", "bogus"), "the configuration of head is impossible: "),
        ("safeailab", with_key("fc_norm", "false"), "Expected `bool | null`, got `str` - at `$.fc_norm`"),
        ("safeailab", with_key("eagle_config", []), "Expected `object | null`, got `array` - at `$.eagle_config`"),
        ("modelopt", with_eagle("eagle_aux_hidden_state_layer_ids", 5), "Expected `array | null`, got `int`"),
        ("speculators", with_key("transformer_layer_config", None), "missing required field `hidden_size`"),
        ("speculators", with_key("speculators_model_type", "medusa"), "speculators_model_type = 'medusa', which"),
        (
            "speculators",
            with_key("speculators_model_type", "peagle"),
            "the speculators_model_type 'peagle' and the mask_token_id None",
        ),
        ("safeailab", with_key("rope_scaling", {"rope_type": "linear", "scale": 2}), "the key scale of a rotary"),
        ("safeailab", with_key("num_hidden_layers", 0), "Expected `int` >= 1 - at `$.num_hidden_layers`"),
        ("specforge-fc-norm", with_key("norm_before_fc", True), "has both fc_norm and norm_before_fc"),
        (
            "safeailab-target-hidden",
            without("embed_tokens.weight"),
            "has no embed_tokens.weight, and the target's",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(name: str, change: Change, says: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", name, change)
    with pytest.raises((UnsupportedModelError, SourceError)) as refused:
        Eagle3Checkpoint.read(Source.parse(str(folder))).build(target(name))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 64}, "its hidden size is 32, and the target's 64"),
        ({"vocab_rows": 128}, "its vocabulary is 96, and the target's 128"),
        ({"layers": 4}, "it reads the inputs of layers [2, 4, 5], and the target has 4 layers"),
    ],
)
def test_a_head_of_another_target_is_refused_with_what_differs(changes: dict[str, int], says: str, tmp_path: Path) -> None:
    checkpoint = Eagle3Checkpoint.read(Source.parse(str(write(tmp_path / "head", "specforge-3.1"))))
    with pytest.raises(UnsupportedModelError) as refused:
        checkpoint.build(target("specforge-3.1", **changes))
    assert says in str(refused.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the shape that the fixtures' heads are for."""
    model = llama(vocab_size=320, hidden_size=32, num_hidden_layers=weights.TARGET_LAYERS)
    return write_checkpoint(tmp_path_factory.mktemp("small") / "target", model)


def of_320(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["vocab_size"] = 320


def test_it_is_exported_beside_a_draft_model(drafter_exports: Callable[[str, str], Path]) -> None:
    manifest = read_manifest(drafter_exports("int4", "random head"))
    assert manifest.roles == ("target", "draft", "head")
    assert [manifest.models[role].features for role in manifest.roles] == [WIDTH, None, WIDTH]
    assert manifest.models["head"].head_tokens == 16


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_one_with_norms_is_exported_in_every_precision(precision: str, small: Path, checkpoints: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", "specforge-fc-norm", of_320)
    drafts = [str(checkpoints / "draft"), str(head)]
    manifest = export_pair(str(small), drafts, tmp_path / "onnx", precision=precision)
    assert manifest == read_manifest(tmp_path / "onnx")
    assert manifest.roles == ("target", "draft", "head")
    assert [manifest.models[role].features for role in manifest.roles] == [32, None, 32]
    assert manifest.models["head"].head_tokens == weights.DRAFT_VOCAB


def test_two_heads_are_refused(small: Path, tmp_path: Path) -> None:
    head = str(write(tmp_path / "head", "specforge", of_320))
    with pytest.raises(UsageError, match="has two drafts of the same kind"):
        export_pair(str(small), [head, head], tmp_path / "onnx", precision="fp32")


def test_a_head_with_another_tokenizer_is_refused(small: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", "specforge", of_320)
    made = json.loads((small / "tokenizer.json").read_text())
    made["added_tokens"][0]["content"] = "<|something else|>"
    (head / "tokenizer.json").write_text(json.dumps(made))
    for name in ("tokenizer_config.json",):
        (head / name).write_text((small / name).read_text())
    with pytest.raises(OutriderError, match="different tokenizers"):
        export_pair(str(small), str(head), tmp_path / "onnx", precision="fp32")


def truncate(head: Path) -> None:
    path = head / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def unknown(head: Path) -> None:
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"a_new_norm": True}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (unknown, "head has a_new_norm = true, which outrider does not know in a draft head"),
        (truncate, "cannot read the weights of head"),
        (lambda head: (head / "model.safetensors").unlink(), "head has no weights"),
    ],
    ids=["unknown", "truncated", "no weights"],
)
def test_the_command_line_names_what_is_wrong(damage: Callable[[Path], None], says: str, small: Path, tmp_path: Path) -> None:
    head = write(tmp_path / "head", "specforge", of_320)
    damage(head)
    done = CliRunner().invoke(main, ["export", "--target", str(small), "--draft", str(head), "-o", str(tmp_path / "onnx")])
    assert (done.exit_code, "Traceback" in done.stderr) == (1, False)
    assert says in done.stderr
    assert done.stderr.count("\nhint:") == 1
    assert not (tmp_path / "onnx").exists()
