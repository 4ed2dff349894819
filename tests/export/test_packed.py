"""Quantized checkpoints are read as the libraries that define their formats do; `packed/make_fixtures.py` made the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import OutriderError, SourceError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.packed import unpacked
from outrider.export.checkpoints.source import Source
from outrider.tests.support import llama, write_checkpoint

ARRAYS = dict(np.load(Path(__file__).parent / "packed" / "fixtures.npz"))
CASES = sorted({name.split("/")[0] for name in ARRAYS})


def case(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """The settings, tensors and weight of a case."""
    tensors = {}
    for key, array in ARRAYS.items():
        if key.startswith(f"{name}/tensor/"):
            part, eight, _ = key.removeprefix(f"{name}/tensor/").partition(".fp8")
            tensor = torch.from_numpy(array)
            tensors[part] = tensor.view(torch.float8_e4m3fn) if eight else tensor
    return json.loads(str(ARRAYS[f"{name}/settings"])), tensors, torch.from_numpy(ARRAYS[f"{name}/weight"])


class Tensor:
    """A tensor as in a file."""

    def __init__(self, tensor: torch.Tensor):
        self.empty = tensor.to("meta")
        self._tensor = tensor

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._tensor


def read(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    found = unpacked({f"a.b.{part}": Tensor(tensor) for part, tensor in tensors.items()}, settings)
    assert [*found] == ["a.b.weight"]
    assert found["a.b.weight"].empty.shape == found["a.b.weight"][...].shape
    weight: torch.Tensor = found["a.b.weight"][...]
    return weight


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_library(name: str) -> None:
    settings, tensors, want = case(name)
    torch.testing.assert_close(read(settings, tensors), want, rtol=0, atol=0)


def test_gptq_without_an_order_has_its_groups_in_a_row() -> None:
    settings, tensors, want = case("gptq")
    del tensors["g_idx"]
    assert torch.equal(read(settings, tensors), want)


def test_symmetric_gptq_may_leave_its_zero_points_out() -> None:
    settings, tensors, want = case("gptq-symmetric")
    assert torch.equal(read(settings, tensors | {"qzeros": tensors["qzeros"][:, :0]}), want)


@pytest.mark.parametrize(
    ("name", "change", "parts", "message"),
    [
        ("awq", {"version": "gemv"}, {}, "AWQ's layout gemv"),
        ("gptq", {"checkpoint_format": "gptq_p"}, {}, "GPTQ's layout gptq_p"),
        ("gptq", {}, {"qzeros": torch.full((8, 8), -1, dtype=torch.int32)}, "zero points of 16"),
        ("ct-group", {}, {"weight_global_scale": torch.ones(1)}, "FP4"),
    ],
)
def test_what_is_not_read_is_refused_by_the_module_s_name(
    name: str, change: dict[str, Any], parts: dict[str, torch.Tensor], message: str
) -> None:
    settings, tensors, _ = case(name)
    with pytest.raises(UnsupportedModelError, match=rf"a\.b.*{message}") as error:
        read(settings | change, tensors | parts)
    assert error.value.hint


def test_fp8_of_modelopt_is_one_number_a_tensor() -> None:
    _, tensors, want = case("ct-fp8-tensor")
    scalar = {"weight": tensors["weight"], "weight_scale": tensors["weight_scale"][0], "input_scale": torch.ones(())}
    assert torch.equal(read({"quant_method": "modelopt", "quant_algo": "FP8"}, scalar), want)
    with pytest.raises(UnsupportedModelError, match="ModelOpt's NVFP4"):
        read({"quant_method": "modelopt", "quant_algo": "NVFP4"}, scalar)


@pytest.mark.parametrize("settings", [{}, {"quantization_config": {"quant_method": "another"}}])
def test_numbers_without_a_known_method_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", llama(num_hidden_layers=1))
    file, name = folder / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(UnsupportedModelError, match=rf"{name} is quantized \(F8_E4M3\) by a method that is not read"):
        load_model(Source.parse(str(folder)), "int4")


@pytest.mark.parametrize("name", ["awq", "gptq", "ct-asymmetric", "ct-fp8-block"])
def test_tensors_that_do_not_fit_each_other_are_refused(name: str) -> None:
    settings, tensors, _ = case(name)
    scale = next(part for part in tensors if "scale" in part)
    with pytest.raises(SourceError, match=r"a\.b"):
        read(settings, tensors | {scale: tensors[scale][:, :-1]})


@pytest.fixture(params=["awq", "ct-fp8-block"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A checkpoint with one quantized layer, which is a case's, and the weight that it has."""
    settings, tensors, weight = case(request.param)
    folder = write_checkpoint(tmp_path / "model", llama(num_hidden_layers=1, hidden_size=64, intermediate_size=256))
    file, module = folder / "model.safetensors", "model.layers.0.mlp.down_proj"
    own = load_file(file)
    assert own.pop(f"{module}.weight").shape == weight.shape
    save_file(own | {f"{module}.{part}": each.contiguous() for part, each in tensors.items()}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder, weight


def test_a_checkpoint_is_read_without_the_library_that_wrote_it(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, weight = checkpoint
    model = load_model(Source.parse(str(folder)), "int4")
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, weight)


def test_a_missing_part_is_named(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, _ = checkpoint
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith(("scales", "weight_scale")))]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(OutriderError, match=r"down_proj.* has no (scale|tensor 'scales')"):
        load_model(Source.parse(str(folder)), "int4")
