"""Tests of weights that are read layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from outrider.export.checkpoints.checkpoint import load_model, open_model
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.graph.step_model import trace
from outrider.export.pair import export_pair
from outrider.export.parity import reference
from outrider.progress import Progress
from outrider.tests.support import llama, write_checkpoint

TOKENS = torch.arange(2, 22)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    made = llama(num_hidden_layers=3, intermediate_size=512, tie_word_embeddings=False)
    return Source.parse(str(write_checkpoint(tmp_path_factory.mktemp("streamed") / "model", made)))


def in_memory(model: PreTrainedModel) -> set[str]:
    """The large matrices with numbers."""
    return {name for name, each in model.named_parameters() if each.numel() > 2**13 and not each.is_meta}


def test_a_pass_has_one_layer_in_memory(source: Source) -> None:
    model, _ = open_model(source, "fp32")
    seen: list[set[str]] = []
    for each in model.model.layers:
        each.mlp.register_forward_hook(lambda *_: seen.append(in_memory(model)))
    with torch.no_grad():
        got = model(TOKENS).logits
    of_layer = ("gate_proj", "up_proj", "down_proj")
    assert seen == [{f"model.layers.{index}.mlp.{name}.weight" for name in of_layer} for index in range(3)]
    assert not in_memory(model)
    assert torch.equal(got, load_model(source, "fp32")(TOKENS).logits)


def test_a_pass_reports_each_layer(source: Source) -> None:
    class Counted(Progress):
        done = 0

        def advance(self, size: int) -> None:
            self.done += size

    progress = Counted()
    model, weights = open_model(source, "fp32", progress=progress)
    with torch.no_grad():
        model(TOKENS)
    assert progress.done == len(weights.parts) == 5  # three layers, and a table before and after them


def test_writing_reports_its_bytes(source: Source, tmp_path: Path) -> None:
    class Stages(Progress):
        done: dict[str, int] = {}  # noqa: RUF012
        total: dict[str, int | None] = {}  # noqa: RUF012

        def stage(self, name: str, total: int | None = None) -> None:
            self.name = name
            self.done[name], self.total[name] = 0, total

        def advance(self, size: int) -> None:
            self.done[self.name] += size

    stages = Stages()
    export_pair(source.location, [], tmp_path / "out", precision="fp32", progress=stages)
    written = (tmp_path / "out" / "target" / "model.onnx.data").stat().st_size
    total = stages.total["writing the target"]
    assert total is not None
    assert written <= stages.done["writing the target"] <= total + 5  # the parts that are read count, too


def test_a_pass_that_fails_leaves_no_layer_in_memory(source: Source) -> None:
    model, _ = open_model(source, "fp32")
    fails = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(TOKENS)
    fails.remove()
    assert not in_memory(model)
    with torch.no_grad():
        assert model(TOKENS).logits.isfinite().all()


def test_weights_that_are_kept_are_not_read_again(source: Source) -> None:
    model, weights = open_model(source, "fp32")
    weights.keep(model.lm_head)
    assert in_memory(model) == {"lm_head.weight"}
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert not model(TOKENS).logits.any()
    assert in_memory(model) == {"lm_head.weight"}


def tied(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Source:
    """A checkpoint with tied weights that also has those of the head, after `change`."""
    source = Source.parse(str(write_checkpoint(folder / "model", llama(tie_word_embeddings=True))))
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": change(tensors["model.embed_tokens.weight"])}, file, metadata={"format": "pt"})
    return source


@pytest.mark.parametrize(("change", "together"), [(torch.clone, True), (torch.negative, False)], ids=["equal", "different"])
def test_tied_weights_that_the_checkpoint_has_twice(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], together: bool
) -> None:
    model, weights = open_model(tied(tmp_path, change), "fp32")
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is table.weight) is together
    with weights.of(head), weights.of(table):
        assert torch.equal(head.weight, change(table.weight))


def test_a_change_is_for_one_of_two_tied_parameters(tmp_path: Path) -> None:
    model, weights = open_model(Source.parse(str(write_checkpoint(tmp_path / "m", llama(tie_word_embeddings=True)))), "fp32")
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    weights.change(table, "weight", torch.negative)
    for _ in range(2):
        with weights.of(head):
            assert torch.equal(head.weight, -table.weight)


def test_a_trace_reads_no_weight_and_the_graph_does(source: Source, tmp_path: Path) -> None:
    model, weights = open_model(source, "fp32")
    layout = reference(model, TOKENS).layout
    with weights.tracing():
        program = trace(model, layout)
        weights.attach(program.model.graph)
    assert not in_memory(model)
    matrices = {name: value.const_value for name, value in program.model.graph.initializers.items() if ".transposed_" in name}
    loaded = load_model(source, "fp32")
    assert len(matrices) == 10
    for name, tensor in matrices.items():
        wanted = loaded.get_parameter(name.removeprefix("model.").partition(".transposed_")[0])
        assert tensor is not None
        assert torch.equal(torch.from_numpy(tensor.numpy()), wanted.T)
    weights.close()
    assert not in_memory(model)


def test_a_weight_that_was_read_outlasts_a_pass_of_its_layer(source: Source) -> None:
    model, weights = open_model(source, "fp32")
    before = weights.read("lm_head.weight").clone()
    with torch.no_grad():
        model(TOKENS)
    assert torch.equal(weights.read("lm_head.weight"), before)
    weights.close()
    assert not in_memory(model)


def test_what_is_stored_takes_a_file_without_a_name(tmp_path: Path) -> None:
    tensor = torch.arange(10_000, dtype=torch.int8).reshape(100, 100)
    stored = Streamed(tmp_path).store(tensor)
    assert torch.equal(stored, tensor)
    assert stored.data_ptr() != tensor.data_ptr()
    assert not list(tmp_path.iterdir())
    assert Streamed().store(tensor) is tensor


def test_a_checkpoint_of_another_kind_is_read_as_a_whole(source: Source, tmp_path: Path) -> None:
    """Such as one in torch's older format."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(source.location).glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(Path(source.location) / "model.safetensors"), folder / "pytorch_model.bin")
    model, weights = open_model(Source.parse(str(folder)), "fp32")
    assert not weights.parts
    assert isinstance(model.lm_head, nn.Linear)
    assert torch.equal(model(TOKENS).logits, load_model(source, "fp32")(TOKENS).logits)
