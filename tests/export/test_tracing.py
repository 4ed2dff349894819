"""Graphs of modules: what replaces a second trace means the same, and traces that tests share are equal."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from onnxscript import optimizer
from torch import nn

from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.export.graph import step_model, tracing
from outrider.export.graph.layer_copies import COPY
from outrider.export.graph.simplify import simplify
from outrider.export.graph.step_model import trace
from outrider.export.graph.tracing import to_onnx
from outrider.export.parity import Exported, compare, open_graph, reference, sample_tokens
from outrider.tests.export.architectures import CONFIGS, ONE_LAYER
from outrider.tests.export.tiny_configs import changed
from outrider.tests.support import llama, write_checkpoint
from outrider.tests.traces import share_traces


class Apply(nn.Module):
    """A function of one tensor [N, 4]."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Both(nn.Module):
    """A tensor [N, 4], and the same plus one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x + 1


def divided_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    before = y.sum(1, keepdim=True)
    y.div_(before).mul_(2)
    return y.to(torch.float64).to(torch.float32) + before


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, 1].add_(1)
    return y


def written_while_a_view_is_kept(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    column = y[:, 1]
    y.add_(1)
    return column * y[:, 0]


def parts_written(x: torch.Tensor) -> torch.Tensor:
    """As interleaved M-RoPE writes parts of frequencies over the first ones."""
    y = torch.stack([x, x * 2, x - 1])
    first, kept, others = y[0], y.transpose(0, 1), y[1:]
    for part in (1, 2):
        first[..., part:4:2] = y[part, ..., part:4:2]
    first.add_(1)
    others[..., :1] *= 3
    return kept[:, 0] + first * others[0]


def turned_and_written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.transpose(0, 1).unsqueeze(0)[:, 1:3].mul_(3)
    y.unsqueeze(-1).permute(2, 1, 0).squeeze(0).add_(x.t())
    return y


def overwritten(x: torch.Tensor) -> torch.Tensor:
    y, z = x * 2, x + 1
    view = y[:, 1:]
    y.copy_(z)
    z.mul_(2)
    return z + y + view.sum()


def repeated(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, 1:] = x[:, :1]
    return y


def perhaps_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    column = y.reshape(-1)
    y.add_(1)
    return column[:4] * y


def copied_and_written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.clone()
    z.add_(1)
    return y * z


def without_translations(x: torch.Tensor) -> torch.Tensor:
    return x.square().transpose(0, 1).contiguous().view(-1, 2).max(x.new_ones(2)).min(x.new_full((2,), 4.0))


def masked(x: torch.Tensor) -> torch.Tensor:
    return torch.where((x > -0.5) & (x < 0.5) | (x > 1), x.detach().contiguous().type_as(x), 0.0)


@pytest.mark.parametrize(
    ("function", "traces"),
    [
        (divided_in_place, 1),
        (copied_and_written, 1),
        (masked, 1),
        (without_translations, 1),
        (written_through_a_view, 1),
        (written_while_a_view_is_kept, 1),
        (parts_written, 1),
        (turned_and_written, 1),
        (overwritten, 1),
        (repeated, 1),
        (perhaps_a_view, 2),
    ],
)
def test_a_graph_computes_what_its_module_does(
    function: Callable[[torch.Tensor], torch.Tensor], traces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = list[object]()
    decompose: Callable[..., torch.export.ExportedProgram] = torch.export.ExportedProgram.run_decompositions

    def noted(self: torch.export.ExportedProgram, *arguments: object) -> torch.export.ExportedProgram:
        again.append(self)
        return decompose(self, *arguments)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", noted)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    program = to_onnx(Apply(function), (x,), ({0: "rows"},), ["x"], ["y"], "it")
    assert len(again) == traces - 1
    program.save(tmp_path / "graph.onnx")
    session = open_graph(tmp_path / "graph.onnx", "fp32")
    for rows in (3, 1):
        got = session.run(None, {"x": x.numpy()[:rows]})[0]
        np.testing.assert_allclose(got, function(x[:rows].clone()).numpy(), rtol=1e-5)
    assert session.get_inputs()[0].shape == ["rows", 4]


def test_an_output_may_be_an_input(tmp_path: Path) -> None:
    program = to_onnx(Both(), (torch.ones(3, 4),), ({0: "rows"},), ["x"], ["y", "z"], "it")
    program.save(tmp_path / "graph.onnx")
    session = open_graph(tmp_path / "graph.onnx", "fp32")
    assert [each.name for each in (*session.get_inputs(), *session.get_outputs())] == ["x", "y", "z"]
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    y, z = session.run(None, {"x": x})
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(z, x + 1)


@pytest.mark.parametrize("other", [None, RuntimeError])
def test_an_interrupt_that_torch_drops_is_raised(other: type[Exception] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues, as after some callbacks, or fails in another way."""

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if other is not None:
                raise other from None
        return x + 1

    traces = list[bool]()
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: traces.append(True))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            to_onnx(Apply(interrupted), (torch.ones(3, 4),), ({0: "rows"},), ["x"], ["y"], "it")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(traces) == (other is None)  # no second attempt


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace without sharing, also where this run of the tests shares."""
    for user in ("heads.markov", "graph.step_model"):
        monkeypatch.setattr(f"outrider.export.{user}.to_onnx", to_onnx)


@pytest.mark.usefixtures("unshared")
def test_a_shared_trace_is_the_module_s_own(tmp_path: Path) -> None:
    models = [llama(seed=seed, num_hidden_layers=1) for seed in (0, 1)]
    layout = reference(models[0], torch.ones((1, 20), dtype=torch.int64)).layout

    def files(name: str, seed: int) -> list[bytes]:
        trace(models[seed], layout).save(tmp_path / name, external_data=True)
        return [(tmp_path / each).read_bytes() for each in (name, f"{name}.data")]

    own = [files("model.onnx", seed) for seed in (0, 1)]
    share_traces(tmp_path / "shared")
    assert [files("model.onnx", seed) for seed in (0, 1)] == own  # made
    assert [files("model.onnx", seed) for seed in (0, 1)] == own  # found
    assert len([*(tmp_path / "shared").glob("*/model.onnx")]) == 2


@pytest.mark.usefixtures("unshared")
def test_models_that_are_read_from_two_folders_share_a_trace(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    layout = reference(model, torch.ones((1, 20), dtype=torch.int64)).layout
    share_traces(tmp_path / "shared")
    for name in ("one", "other"):
        trace(load_model(Source.parse(str(write_checkpoint(tmp_path / name, model))), "fp32"), layout)
    assert len([*(tmp_path / "shared").glob("*/model.onnx")]) == 1


# Arithmetic on the weights of layers, with attention that is quick to trace.
QUICK = {"Gemma": transformers.GemmaConfig(**ONE_LAYER, head_dim=16)}


@pytest.mark.usefixtures("unshared")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS)])
def test_the_graph_computes_what_onnxscript_s_optimizer_makes_of_all_layers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = transformers.AutoModelForCausalLM.from_config(with_layers(deepcopy((CONFIGS | QUICK)[name]))).requires_grad_(False)
    random = torch.Generator().manual_seed(0)
    for parameter in made.parameters():  # a new model's norms are the same in all layers
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))
    model = load_model(Source.parse(str(write_checkpoint(tmp_path / "model", made))), "fp32")
    _, layout, _ = reference(model, torch.ones((1, 20), dtype=torch.int64))
    copied = list[ir.Node]()

    def simplify_and_count(model: ir.Model, module: nn.Module) -> None:
        copied.extend(node for node in model.graph if node.op_type == COPY)
        simplify(model, module)

    monkeypatch.setattr(tracing, "simplify", simplify_and_count)
    ours = trace(model, layout)
    assert copied
    monkeypatch.setattr(step_model, "layers_once", lambda *_: nullcontext())
    monkeypatch.setattr(tracing, "simplify", lambda model, _: optimizer.optimize_ir(model))
    theirs = trace(model, layout)
    assert not operators(ours) - operators(theirs)
    results = []
    for number, program in enumerate((ours, theirs)):
        program.save(tmp_path / f"{number}.onnx")
        results.append(Exported(tmp_path / f"{number}.onnx", layout, "fp32").logits(sample_tokens(300)))
    np.testing.assert_array_equal(results[0], results[1])


def operators(program: torch.onnx.ONNXProgram) -> Counter[str]:
    return Counter(node.op_type for node in program.model.graph)


def with_layers(config: Any) -> Any:
    """Twice as many layers as it has, of the same kinds."""
    text = config.get_text_config()
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, key, value * 2)
    text.num_hidden_layers *= 2
    return config


def test_a_layer_with_other_settings_is_not_copied(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=2).eval()
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5
    tokens = sample_tokens(300)
    expected = reference(model, tokens)
    trace(model, expected.layout).save(tmp_path / "model.onnx")
    compare(expected.logits, Exported(tmp_path / "model.onnx", expected.layout, "fp32").logits(tokens), "fp32")


def test_a_layer_that_runs_twice_is_traced_twice(tmp_path: Path) -> None:
    """HRM's layers run in cycles, each time with keys of their own."""
    torch.manual_seed(0)
    cycles = {"H_cycles": 1, "L_cycles": 2, "num_layers_per_stack": 1}
    model = transformers.AutoModelForCausalLM.from_config(changed("hrm_text", cycles)).eval()
    tokens = sample_tokens(300)
    expected = reference(model, tokens)
    assert len(expected.layout.layers) == 3
    trace(model, expected.layout).save(tmp_path / "model.onnx")
    compare(expected.logits, Exported(tmp_path / "model.onnx", expected.layout, "fp32").logits(tokens), "fp32")
