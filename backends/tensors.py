"""The tensors that engines must have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.bundle.manifest import READS_FEATURES, ROLES, Manifest
from outrider.engines.contract import LOGITS, Stage, Tensor, cache_tensors, step_tensors
from outrider.engines.samplers import sampler_tensors
from outrider.errors import EngineError


def engine_tensors(manifest: Manifest, name: str, stage: Stage | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs, in order, of one of `ENGINES`, or of its stage."""
    if name in ROLES:
        model = manifest.models[name]
        sizes = model.layers, model.vocab_rows, model.precision, model.features
        inputs, outputs = step_tensors(*sizes, name in READS_FEATURES, model.block_state, model.recurrent)
        if stage is None:
            return inputs, outputs
        written = {
            each.present for each in cache_tensors(model.layers, model.features, model.recurrent) if each.past in stage.inputs
        }
        return (
            [*(each for each in inputs if each.name in stage.inputs), *stage.takes],
            stage.gives + [each for each in outputs if each.name in written or (each.name == LOGITS and not stage.gives)],
        )
    return sampler_tensors(name, manifest.vocab_rows, manifest.block_state)


def check_tensors(path: Path, actual: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Check that an engine has the expected tensors, by name.

    Raises:
        EngineError: one is missing, unexpected, or of another type or shape.
    """
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise EngineError(
                f"{path} is not the engine that the manifest describes: {name} is {actual.get(name)}, not {expected.get(name)}",
                "make the bundle again: outrider export, then outrider build-engine",
            )
