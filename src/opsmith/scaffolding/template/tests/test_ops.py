"""Tests of facts that no check can know. By pyproject.toml, pytest also checks the operators' properties."""

import sys

import pytest
import torch
import torch.nn.functional as F

from my_kernels import Swish, swish


def test_swish_with_a_beta_of_one_is_silu() -> None:
    x = torch.linspace(-5, 5, 12).reshape(4, 3)
    torch.testing.assert_close(swish(x, torch.ones(3)), F.silu(x))


def test_torch_gradcheck_agrees() -> None:
    x = torch.linspace(-2, 2, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    beta = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swish, (x, beta))


@pytest.mark.skipif(sys.platform != "linux", reason="kernels in C++ are only built on Linux")
def test_the_kernel_in_cpp_computes_and_not_the_reference() -> None:
    assert swish.explain(torch.ones(2, 3), torch.ones(3)).kernel is not None


def test_the_layer_learns_its_beta() -> None:
    layer = Swish(3)
    x = torch.linspace(-2, 2, 12).reshape(4, 3)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        F.mse_loss(layer(x), swish(x, torch.tensor([0.5, 1.0, 2.0]))).backward()
        optimizer.step()
    (beta,) = layer.parameters()
    torch.testing.assert_close(beta.detach(), torch.tensor([0.5, 1.0, 2.0]), atol=0.05, rtol=0)
