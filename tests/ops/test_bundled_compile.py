"""The bundled operators under torch.compile: one graph that uses all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opsmith.ops import add, exp, involution, linear, mul


def network(image: Tensor, kernels: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    hidden = involution(image, kernels, (2, 1), 1)
    return add(mul(exp(linear(hidden, weight, bias)), bias), bias)


@pytest.mark.slow
@pytest.mark.compile
def test_one_graph_and_gradients() -> None:
    def arguments() -> list[Tensor]:
        torch.manual_seed(0)
        shapes = [(2, 4, 5, 6), (2, 2, 3, 3, 3, 6), (3, 6), (3,)]
        return [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    eager, compiled = arguments(), arguments()
    expected = network(*eager)
    result = torch.compile(network, fullgraph=True)(*compiled)
    torch.testing.assert_close(result, expected)
    expected.sin().sum().backward()
    result.sin().sum().backward()
    torch.testing.assert_close([tensor.grad for tensor in compiled], [tensor.grad for tensor in eager])
