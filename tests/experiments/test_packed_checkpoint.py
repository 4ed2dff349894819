"""`experiments.packed_checkpoint`: checkpoints in forms that others publish."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from outrider.experiments import packed_checkpoint
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.tests.support import PAIR


@pytest.mark.parametrize("form", packed_checkpoint.FORMS)
def test_its_weights_are_those_of_the_model_in_four_bits(form: str, tmp_path: Path) -> None:
    packed_checkpoint.main([form, str(PAIR / "target"), str(tmp_path / "model"), "--group", "32"], standalone_mode=False)
    source = Source.parse(str(tmp_path / "model"))
    assert source.stored_bits() == 4
    found, plain = (load_model(each, "fp32") for each in (source, Source.parse(str(PAIR / "target"))))
    layers = {name: each.weight for name, each in plain.model.named_modules() if isinstance(each, nn.Linear)}
    assert layers
    for name, weight in layers.items():
        kept = found.model.get_submodule(name).weight
        assert 0 < (kept - weight).std() < 0.2 * weight.std()  # another order of the weights would make it 1.4
        assert max(len(each.unique()) for each in kept.reshape(-1, 32)) <= 16 or form == "gptq-act-order"
