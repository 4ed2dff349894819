"""LoRA adapters are merged as PEFT merges them; `lora/make_fixtures.py` made the adapters and the values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.bundle.decoding import decode_manifest
from outrider.bundle.manifest import MergedAdapter
from outrider.commands.output import bundle_table, console
from outrider.errors import OutriderError, SourceError, UnsupportedModelError, UsageError
from outrider.export.checkpoints.adapters import Adapter
from outrider.export.checkpoints.checkpoint import load_model, open_model
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.weights.quantize import quantize_model
from outrider.export.weights.rounding import AS_IS, Rounding
from outrider.tests.export import quantized
from outrider.tests.export.lora.bases import BASES, CORNER, TOKENS
from outrider.tests.export.multimodal import made
from outrider.tests.support import llama, run_here, write_checkpoint

ARRAYS = dict(np.load(Path(__file__).parent / "lora" / "fixtures.npz"))
CASES = sorted({name.split("/")[0] for name in ARRAYS})
FILES = CONFIG, TENSORS = ("adapter_config.json", "adapter_model.safetensors")
DOWN = "base_model.model.model.layers.0.mlp.down_proj."
Change = Callable[[dict[str, Any]], object]


def saved(folder: Path, case: str = "patterns", name: str = "one") -> Path:
    """An adapter as PEFT saved it."""
    path = folder / f"{case}-{name}"
    path.mkdir(parents=True)
    for file in FILES:
        (path / file).write_bytes(ARRAYS[f"{case}/{name}/{file}"].tobytes())
    return path


def changed(folder: Path, change: Change, file: str = CONFIG, case: str = "patterns") -> Path:
    """An adapter of PEFT's with another configuration, or other tensors."""
    path = saved(folder, case)
    contents = json.loads((path / CONFIG).read_text()) if file == CONFIG else load_file(path / TENSORS)
    change(contents)
    if file == CONFIG:
        (path / CONFIG).write_text(json.dumps(contents))
    else:
        save_file(contents, path / TENSORS)
    return path


def write_ones(folder: Path, sizes: dict[str, tuple[int, int]]) -> None:
    """An adapter that adds 4 to each weight of some modules, with [outputs, inputs]."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    names = {f"base_model.model.{module}.lora_": size for module, size in sizes.items()}
    factors = {f"{name}A.weight": torch.ones(2, inputs) for name, (_, inputs) in names.items()}
    save_file(factors | {f"{name}B.weight": torch.ones(outputs, 2) for name, (outputs, _) in names.items()}, folder / TENSORS)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    folder = tmp_path_factory.mktemp("bases")
    for name, make in BASES.items():
        make().save_pretrained(folder / name)
    return {name: Source.parse(str(folder / name)) for name in BASES}


@pytest.mark.parametrize("case", CASES)
def test_a_merge_is_peft_s(case: str, bases: dict[str, Source], tmp_path: Path) -> None:
    names = sorted({key.split("/")[1] for key in ARRAYS if key.startswith(f"{case}/") and key.endswith("/weight")})
    adapters = [Adapter.parse(f"{saved(tmp_path, case, name)}={ARRAYS[f'{case}/{name}/weight']}") for name in names]
    base = str(ARRAYS[f"{case}/base"])
    model, weights = open_model(bases[base], "fp32", adapters=adapters)
    assert any(each.is_meta for each in model.parameters())  # some are merged whenever they are read
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, torch.from_numpy(ARRAYS[f"{case}/logits"]), rtol=0, atol=1e-6)
    weights.keep_all()
    plain = dict(BASES[base]().named_parameters())
    for name, parameter in model.named_parameters():
        want = ARRAYS.get(f"{case}/merged/{name}")
        corner = plain[name][CORNER] if want is None else torch.from_numpy(want)
        torch.testing.assert_close(parameter[CORNER], corner, rtol=0, atol=1e-6 if want is not None else 0)


def test_a_sum_in_half_precision_is_rounded_once(bases: dict[str, Source], tmp_path: Path) -> None:
    adapters = [Adapter.parse(f"{saved(tmp_path, name=name, case='two')}") for name in ("one", "other")]
    name = "model.layers.0.self_attn.q_proj.weight"  # whose base weights bf16 represents exactly
    exact, half = (load_model(bases["llama"], each, adapters).get_parameter(name) for each in ("fp32", "bf16"))
    assert torch.equal(half, exact.bfloat16())


def test_one_of_two_tied_weights_changes(tmp_path: Path) -> None:
    """As in the model that was trained."""
    base = BASES["llama"]()
    base.config.tie_word_embeddings = True
    base.tie_weights()
    base.save_pretrained(tmp_path / "base")
    path = changed(tmp_path, lambda each: [each.pop(key) for key in [*each] if "lm_head" in key], TENSORS, "stabilized-table")
    model = load_model(Source.parse(str(tmp_path / "base")), "fp32", [Adapter.parse(str(path))])
    assert torch.equal(model.lm_head.weight, base.lm_head.weight)
    torch.testing.assert_close(
        model.model.embed_tokens.weight[CORNER],
        torch.from_numpy(ARRAYS["stabilized-table/merged/model.embed_tokens.weight"]),
        rtol=0,
        atol=1e-6,
    )


def test_an_export_of_integers_names_what_it_merged_and_could_not_keep(tmp_path: Path) -> None:
    """The one merged matrix of a quantized checkpoint is rounded, like the head; all other integers are kept."""
    plain = write_checkpoint(tmp_path / "plain", llama(hidden_size=64, intermediate_size=128, num_hidden_layers=1))
    target = quantized.write(plain, tmp_path / "model", "awq")
    adapter = tmp_path / "a=b"
    write_ones(adapter, {"model.layers.0.self_attn.o_proj": (64, 64)})
    source = Source.parse(str(target))
    model, weights = open_model(source, "int4", adapters=[Adapter.parse(f"{adapter}=0.001")])
    found = quantize_model(model, weights, Rounding("int4", method=AS_IS), load_tokenizer(source), None)
    assert found.rounded == ["model.layers.0.self_attn.o_proj", "lm_head"]
    out = tmp_path / "out"
    done = run_here("export", "--target", target, "--draft", "none", "--lora", f"{adapter}=-0.001", "-o", out)
    assert done.returncode == 0, done.stderr
    assert "target: merged a=b (weight -0.001)" in done.stdout
    manifest = decode_manifest((out / "manifest.json").read_bytes())
    assert manifest.models["target"].adapters == [MergedAdapter(source="a=b", weight=-0.001)]
    screen = console()
    with screen.capture() as shown:
        screen.print(bundle_table(manifest))
    assert "a=b (weight -0.001)" in shown.get()


def test_what_an_adapter_changes_in_reading_images_is_left_out(tmp_path: Path) -> None:
    whole = made("Qwen3-VL")
    modules = ("model.language_model.layers.0.self_attn.q_proj", "model.visual.blocks.0.attn.proj")
    weights = {name: whole.get_submodule(name).weight for name in modules}
    write_ones(tmp_path / "adapter", {name: tuple(weight.shape) for name, weight in weights.items()})
    base = Source.parse(str(write_checkpoint(tmp_path / "base", whole)))
    model = load_model(base, "fp32", [Adapter.parse(str(tmp_path / "adapter"))])
    torch.testing.assert_close(model.get_submodule(modules[0]).weight, weights[modules[0]] + 4)


def delete(key: str) -> Change:
    return lambda tensors: tensors.pop(key)


def put(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    return lambda tensors: tensors.update({key: torch.zeros(shape, dtype=dtype)})


REFUSED: dict[str, tuple[Change, str, type[OutriderError], str]] = {
    "another kind": (lambda config: config.update(peft_type="IA3"), CONFIG, UnsupportedModelError, "a 'IA3' adapter"),
    "DoRA": (lambda config: config.update(use_dora=True), CONFIG, UnsupportedModelError, "uses use_dora, which is not merged"),
    "experts": (
        lambda config: config.update(target_parameters=["gate_up_proj"]),
        CONFIG,
        UnsupportedModelError,
        "target_param",
    ),
    "a later setting": (lambda config: config.update(new_idea=1), CONFIG, UnsupportedModelError, "uses new_idea, which"),
    "PiSSA": (lambda config: config.update(init_lora_weights="pissa"), CONFIG, UnsupportedModelError, "changed weights"),
    "another rank": (lambda config: config.update(r=8), CONFIG, SourceError, r"\[4, 32\] and \[32, 4\] .* whose rank is 8"),
    "rank 0": (lambda config: config.update(r=0), CONFIG, SourceError, "the rank 0"),
    "no alpha": (lambda config: config.pop("lora_alpha"), CONFIG, SourceError, "no usable lora_alpha"),
    "a wrong pattern": (lambda config: config.update(rank_pattern={"(": 2}), CONFIG, SourceError, "no usable r"),
    "modules that are missing": (
        lambda config: config.update(modules_to_save=["score"]),
        CONFIG,
        SourceError,
        "lacks .* 'score'",
    ),
    "half a pair": (delete(f"{DOWN}lora_B.weight"), TENSORS, SourceError, "one of the two matrices"),
    "no tensors": (lambda tensors: tensors.clear(), TENSORS, SourceError, "has no tensors"),
    "two for one": (put(f"{DOWN}lora_embedding_A", 2, 288), TENSORS, SourceError, "two tensors for the same"),
    "an unknown tensor": (put(f"{DOWN}lora_magnitude_vector", 32), TENSORS, UnsupportedModelError, "unknown kind.*magnitude"),
    "a name without the prefix": (put("lm_head.weight", 96, 32), TENSORS, UnsupportedModelError, "unknown kind, lm_head"),
    "integers": (put(f"{DOWN}lora_A.weight", 2, 288, dtype=torch.int8), TENSORS, UnsupportedModelError, "in I8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_is_not_read_is_refused_at_once(case: str, tmp_path: Path) -> None:
    change, file, kind, message = REFUSED[case]
    with pytest.raises(kind, match=f"patterns-one .*{message}|of patterns-one {message}") as error:
        Adapter.parse(str(changed(tmp_path, change, file)))
    assert error.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            put("base_model.model.lm_head.weight", 97, 32),
            r"lm_head.weight of the shape \[97, 32\], not the target's \[96, 32\]",
        ),
        (put(f"{DOWN}bias", 32), "down_proj.bias, which the target lacks"),
        (put(f"{DOWN}lora_A.weight", 2, 300), r"down_proj.weight of the shape \[32, 300\]"),
        (
            lambda tensors: [put(f"base_model.model.model.norm.lora_{each}.weight", 4, 4)(tensors) for each in "AB"],
            "another model.norm than the target's LlamaRMSNorm",
        ),
        (
            lambda tensors: [put(f"base_model.model.model.layers.2.q.lora_{each}.weight", 4, 4)(tensors) for each in "AB"],
            "model.layers.2.q.weight, which the target lacks",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused(change: Change, message: str, bases: dict[str, Source], tmp_path: Path) -> None:
    path = changed(tmp_path, change, TENSORS)
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": "an/original"}))
    with pytest.raises(SourceError, match=f"patterns-one is for .*{message}") as error:
        open_model(bases["llama"], "fp32", adapters=[Adapter.parse(str(path))])
    assert error.value.hint == "export the model that it was trained on, an/original"


def test_an_adapter_may_be_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub client's cache, in its own layout, without network."""
    repository, commit = tmp_path / "models--someone--some-adapter", "0123456789abcdef0123456789abcdef01234567"
    saved(repository / "snapshots", "two").rename(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))  # as the variables of these names do
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    adapter = Adapter.parse("someone/some-adapter=0.5")
    assert (adapter.source.name, adapter.weight) == ("someone/some-adapter", 0.5)
    assert [*adapter.contents().factors] == [f"model.layers.{at}.self_attn.q_proj" for at in range(2)]


def test_whole_weights_cannot_be_scaled_or_replaced_twice(bases: dict[str, Source], tmp_path: Path) -> None:
    path = saved(tmp_path, "saved-modules")
    with pytest.raises(UsageError, match=r"replaces model\.layers\.0\.input_layernorm\.weight, so"):
        Adapter.parse(f"{path}=0.5")
    with pytest.raises(UsageError, match="both replace"):
        open_model(bases["llama"], "fp32", adapters=[Adapter.parse(str(path))] * 2)


def test_wrong_arguments_are_refused_before_the_export(tmp_path: Path, bases: dict[str, Source]) -> None:
    cut, pickled, none = saved(tmp_path, "two"), saved(tmp_path / "pickled"), tmp_path / "none"
    (cut / TENSORS).write_bytes((cut / TENSORS).read_bytes()[:-4])
    (pickled / TENSORS).rename(pickled / "adapter_model.bin")
    none.mkdir()
    for given, code, message in (
        (f"{cut}=much", 2, "is not FOLDER or FOLDER=WEIGHT"),
        (f"{cut}=inf", 2, "is not FOLDER or FOLDER=WEIGHT"),
        ("=1", 2, "is not FOLDER or FOLDER=WEIGHT"),
        (cut, 1, "cannot read the adapter_model.safetensors of two-one"),
        (pickled, 1, "has no adapter_model.safetensors"),
        (none, 1, "none has no adapter_config.json"),
        (tmp_path / "absent", 1, "does not exist"),
        (bases["llama"].location, 1, "llama has no adapter_config.json"),
    ):
        done = run_here("export", "--target", bases["llama"].location, "--lora", given, "-o", tmp_path / "out")
        assert done.returncode == code, (given, done.stderr)
        error, hint = done.stderr.splitlines()
        assert message in error
        assert hint.startswith("hint: ")
    assert not any("out" in path.name for path in tmp_path.iterdir())
