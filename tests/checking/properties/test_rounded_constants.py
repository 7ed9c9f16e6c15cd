"""Derivatives with a constant of float32 are a warning."""

from __future__ import annotations

import torch
from torch import Tensor

import opsmith

SIXTH = torch.tensor(1 / 6, dtype=torch.float32).item()


@opsmith.operator("rounded_tangents::sixth")
def sixth(x: Tensor) -> Tensor:
    return x / 6


sixth.gradients(x=lambda grad: grad * SIXTH)
sixth.tangents(result=lambda tangent_x: tangent_x * SIXTH)


def test_a_constant_of_float32_is_a_warning() -> None:
    x = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = opsmith.check(sixth, samples=[(x,)], only=["gradient", "forward_mode"])
    assert not report.errors, str(report)
    found = {(each.property, each.cause, each.severity) for each in report.failures}
    assert found == {("gradient", "precision", "warning"), ("forward_mode", "precision", "warning")}
    messages = {each.property: each.message for each in report.failures}
    assert "the size of the error suggests a constant in float32" in messages["gradient"]
    assert "; its error looks like rounding to float32" in messages["forward_mode"]
