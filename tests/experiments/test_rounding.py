"""`experiments.rounding`: the ways that it compares."""

from __future__ import annotations

import torch

from outrider.experiments.rounding import WAYS, rounded
from outrider.export.weights.quantize import quantize


def test_symmetric_is_what_exports_do() -> None:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(0))
    integers, scales = quantize(weight, 4, 32)
    exported = (integers.reshape(4, 32, 24) * scales[:, None]).reshape(128, 24).T
    torch.testing.assert_close(rounded(weight, 32, WAYS["symmetric"], torch.ones(128)), exported)


def test_zero_points_fit_weights_of_one_sign_and_activations_count() -> None:
    weight = torch.rand(24, 128, generator=torch.Generator().manual_seed(0)) + 0.2
    squares = torch.ones(128)
    squares[::32] = 1e4  # one input of each block
    errors = {name: (rounded(weight, 32, way, squares) - weight).square() for name, way in WAYS.items()}
    assert errors["zero points"].mean() < 0.5 * errors["symmetric"].mean()
    for name in ("symmetric", "zero points"):
        assert (errors[f"{name}, by activations"] * squares).mean() < 0.5 * (errors[name] * squares).mean()
