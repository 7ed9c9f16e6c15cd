"""A generated module in the loop of row C3, and `torch.nn.Linear` in the same loop: the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from generated_layers import Affine
from torch import Tensor, nn
from torch.testing import assert_close

from opsmith.ops import Linear

STEPS = 300


def train(make: Callable[..., nn.Module], start: dict[str, Tensor]) -> tuple[list[float], nn.Module]:
    """The loop as a user writes it, around any class of linear layers."""
    model = make(2, 1, dtype=torch.float64)
    model.load_state_dict(start)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    losses = []
    for _ in range(STEPS):
        x = torch.rand(64, 2, dtype=torch.float64, generator=generator)
        target = x @ x.new_tensor([[2.0], [3.0]]) + 4
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("kind", [Affine, Linear], ids=["generated here", "bundled"])
def test_it_trains_as_the_linear_layer_of_torch(kind: Any) -> None:
    torch.manual_seed(0)
    start = kind(2, 1, dtype=torch.float64).state_dict()
    start = {name: value.clone() for name, value in start.items()}
    losses, mine = train(kind, start)
    expected, theirs = train(nn.Linear, start)
    # A step may round in another order; the descent contracts, so that no more than this adds up.
    tolerance = STEPS * torch.finfo(torch.float64).eps
    assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    assert_close(mine.state_dict(), theirs.state_dict(), rtol=tolerance, atol=tolerance)
    assert losses[-1] < 1e-2 < 1 < losses[0]
    learned = [*mine.get_parameter("weight").flatten().tolist(), mine.get_parameter("bias").item()]
    assert learned == pytest.approx([2.0, 3.0, 4.0], abs=0.1)
