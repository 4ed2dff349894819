"""A whole export in every precision: the files, the parity figures, the memory, and failures."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.errors import ParityError, UnsupportedModelError, VocabularyMismatchError
from outrider.export.pair import export_pair
from outrider.export.parity import compare
from outrider.tests.support import llama, tokenizer, write_checkpoint


@pytest.mark.parametrize(("precision", "bytes_each", "elem_type"), [("fp32", 4, 1), ("fp16", 2, 10), ("bf16", 2, 16)])
def test_each_precision_is_in_the_file(
    trained_exports: Callable[[str], Path], precision: str, bytes_each: int, elem_type: int
) -> None:
    output = trained_exports(precision)
    manifest = read_manifest(output)
    check_files(output, manifest)
    for role, model in manifest.models.items():
        data = (output / role / "model.onnx.data").stat().st_size
        assert data >= 0.95 * model.parameters * bytes_each  # the weights are in a file of their own ...
        assert data <= 1.25 * model.parameters * bytes_each  # ... once, in this precision
        graph = onnx.load(output / role / "model.onnx", load_external_data=False)
        onnx.checker.check_model(str(output / role / "model.onnx"))
        cache = next(value for value in graph.graph.input if value.name == "past_key_0")
        assert cache.type.tensor_type.elem_type == elem_type
        logits = next(value for value in graph.graph.output if value.name == "logits")
        assert logits.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        assert not any(node.metadata_props or node.doc_string for node in graph.graph.node)  # no paths of this machine
        assert model.parity.max_abs_diff <= model.parity.tolerance
        assert model.parity.argmax_agreement > 0.8


def test_the_contract_is_in_the_graph(tiny_export: Path) -> None:
    graph = onnx.load(tiny_export / "target" / "model.onnx", load_external_data=False).graph

    def shape(name: str) -> list[str | int]:
        value = next(v for v in [*graph.input, *graph.output] if v.name == name)
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert shape("input_ids") == ["batch", "rows"]
    assert shape("positions") == ["batch"]
    assert shape("key_positions") == ["window"]
    assert shape("past_key_0") == shape("present_key_0") == ["batch", 2, "capacity", 8]
    assert shape("logits") == ["batch", "rows", 320]


def test_the_same_checkpoints_give_the_same_export(checkpoints: Path, tiny_export: Path, tmp_path: Path) -> None:
    again = export_pair(str(checkpoints / "target"), str(checkpoints / "draft"), tmp_path / "onnx", precision="fp32")
    assert again == read_manifest(tmp_path / "onnx")
    assert again.files == read_manifest(tiny_export).files


def test_padded_heads_of_different_size_are_fine(checkpoints: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "draft", llama(seed=1, num_hidden_layers=1, vocab_size=384))
    manifest = export_pair(str(checkpoints / "target"), str(tmp_path / "draft"), tmp_path / "onnx", precision="fp32")
    assert (manifest.models["target"].vocab_rows, manifest.models["draft"].vocab_rows) == (320, 320)
    assert manifest.vocab_tokens == 320


def test_a_head_smaller_than_the_tokenizer_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "draft", llama(seed=1, vocab_size=300))
    with pytest.raises(UnsupportedModelError, match="320 tokens but only 300 rows"):
        export_pair(str(checkpoints / "target"), str(tmp_path / "draft"), tmp_path / "onnx", precision="fp32")
    assert not any(tmp_path.glob("*onnx*"))


def test_different_tokenizers_are_refused_and_nothing_is_written(checkpoints: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "draft", llama(seed=1), tokenizer(vocab_size=300))
    with pytest.raises(VocabularyMismatchError, match=r"token 300 is '.*' in the target and absent in the draft"):
        export_pair(str(checkpoints / "target"), str(tmp_path / "draft"), tmp_path / "onnx", precision="fp32")
    assert not any(tmp_path.glob(".*onnx*"))
    assert not (tmp_path / "onnx").exists()


def test_logits_with_nan_fail_the_export(checkpoints: Path, tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    model.model.layers[0].mlp.down_proj.weight.data[3, 3] = float("nan")
    write_checkpoint(tmp_path / "target", model)
    with pytest.raises(ParityError, match="differ by up to nan"):
        export_pair(str(tmp_path / "target"), str(checkpoints / "draft"), tmp_path / "onnx", precision="fp32")
    assert not (tmp_path / "onnx").exists()


def test_a_difference_beyond_the_tolerance_is_an_error() -> None:
    want = np.random.default_rng(0).standard_normal((24, 320)).astype(np.float32)
    got = want.copy()
    got[20, 7] += 0.01
    with pytest.raises(ParityError, match=r"differ by up to 0\.01"):
        compare(want, got, "fp32")
    assert compare(want, want, "fp32").max_abs_diff == 0


MEMORY = """
import resource, sys
from outrider.export.pair import export_pair
from pathlib import Path
small, big, out, precision = sys.argv[1:]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
export_pair(small, None, Path(out) / "small-onnx", precision=precision)
before = peak()
manifest = export_pair(big, None, Path(out) / "big-onnx", precision=precision)
print("GREW", peak() - before, manifest.files["target/model.onnx.data"].size)
"""


def big(folder: Path, precision: str) -> Path:
    """A checkpoint of 402 MB in fp32, in twelve layers."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1344, "num_attention_heads": 16, "num_key_value_heads": 16}
    sizes["num_hidden_layers"] = 12
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    return write_checkpoint(folder / "big", llama(**sizes).to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peak_memory_is_less_than_the_model(checkpoints: Path, tmp_path: Path, precision: str) -> None:
    """Beyond the memory of the libraries and of a tiny export, which does not depend on the size of the model."""
    arguments = [str(checkpoints / "target"), str(big(tmp_path, precision)), str(tmp_path), precision]
    done = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True)
    match = re.search(r"GREW (\d+) (\d+)", done.stdout)
    assert match, done.stderr
    grew, size = map(int, match.groups())
    assert grew < 0.6 * size
