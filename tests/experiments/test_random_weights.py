"""`experiments.random_weights`: checkpoints in the shape of published models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from outrider.experiments import random_weights
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.tests.support import PAIR


def test_a_checkpoint_is_written_shard_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Qwen3Config(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=9, tie_word_embeddings=False)
    monkeypatch.setitem(random_weights.MODELS, "Qwen3-8B", tiny)
    monkeypatch.setattr(random_weights, "SHARD", 2**16)
    out = tmp_path / "model"
    random_weights.main(["model", "Qwen3-8B", str(PAIR / "target"), str(out), "--layers", "2"], standalone_mode=False)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards == sorted(set(index["weight_map"].values()))
    model = load_model(Source.parse(str(out)), "bf16")  # refuses a checkpoint with a missing weight
    assert model.config.num_hidden_layers == len(model.model.layers) == 2
    assert sum(parameter.nbytes for parameter in model.parameters()) == index["metadata"]["total_size"]
    assert 0.9 < model.lm_head.weight.float().std() * 8 < 1.1


@pytest.mark.parametrize(("name", "count"), [("Qwen3-8B", 8_190_735_360), ("Llama-3.1-8B", 8_030_261_248)])
def test_shapes_are_those_of_the_published_models(name: str, count: int) -> None:
    assert random_weights.parameters(random_weights.MODELS[name]) == count
