"""Random operators: derived gradients see the numbers that the forward drew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.testing import assert_close

import opsmith


def noisy(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


def noisy_square(x: Tensor) -> Tensor:
    return x**2 * torch.rand_like(x)


@pytest.mark.parametrize("way", ["ordinary", "derived"])
def test_gradient_sees_the_numbers_of_the_forward(way: str, name: str) -> None:
    operator = opsmith.operator(name, random=True)(noisy)
    if way == "derived":
        operator.kernel("cpu", noisy)
    x = torch.ones(100, requires_grad=True)
    result = operator(x)
    between = torch.rand(3)  # drawing in between changes nothing
    (gradient,) = grad(result.sum(), x, retain_graph=True)
    assert_close(gradient, result.detach())
    assert gradient.std() > 0
    assert_close(grad(result.sum(), x)[0], gradient)
    assert not torch.equal(torch.rand(3), between)


@pytest.mark.parametrize("way", ["ordinary", "derived"])
def test_second_order_sees_the_numbers_of_the_forward(way: str, name: str) -> None:
    operator = opsmith.operator(name, random=True)(noisy_square)
    if way == "derived":
        operator.kernel("cpu", noisy_square)
    x = torch.full((100,), 3.0, requires_grad=True)
    result = operator(x)
    (first,) = grad(result.sum(), x, create_graph=True)
    (second,) = grad(first.sum(), x)
    assert_close(first, result * 2 / 3)
    assert_close(second, result * 2 / 9)


def test_backward_leaves_the_random_state_as_it_was(name: str) -> None:
    operator = opsmith.operator(name, random=True)(noisy).kernel("cpu", noisy)
    x = torch.ones(3, requires_grad=True)
    torch.manual_seed(5)
    result = operator(x)
    expected = torch.rand(3)
    torch.manual_seed(5)
    result = operator(x)
    result.sum().backward()
    assert_close(torch.rand(3), expected)


def test_two_calls_draw_different_numbers(name: str) -> None:
    operator = opsmith.operator(name, random=True)(noisy).kernel("cpu", noisy)
    x = torch.ones(100, requires_grad=True)
    one, other = operator(x), operator(x)
    assert not torch.equal(one, other)
    assert_close(grad(one.sum(), x)[0], one.detach())
    assert_close(grad(other.sum(), x)[0], other.detach())


def test_seed_makes_a_call_repeatable(name: str) -> None:
    operator = opsmith.operator(name, random=True)(noisy)
    torch.manual_seed(7)
    expected = operator(torch.ones(3))
    torch.manual_seed(7)
    assert_close(operator(torch.ones(3)), expected)


def with_generator(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return x * torch.rand(x.shape, generator=generator)


@pytest.mark.parametrize("random", [False, True], ids=["", "random"])
@pytest.mark.parametrize("way", ["ordinary", "derived"])
def test_generator_as_an_argument(way: str, random: bool, name: str) -> None:
    operator = opsmith.operator(name, random=random)(with_generator)
    if way == "derived":
        operator.kernel("cpu", with_generator)
    x = torch.ones(100, requires_grad=True)
    generator = torch.Generator().manual_seed(3)
    result = operator(x, generator)
    assert_close(result.detach(), torch.rand(100, generator=torch.Generator().manual_seed(3)))
    after = torch.rand(3, generator=generator)
    assert_close(grad(result.sum(), x)[0], result.detach())
    expected = torch.Generator().manual_seed(3)
    torch.rand(100, generator=expected)
    assert_close(after, torch.rand(3, generator=expected))


def test_hidden_mask_needs_no_state(name: str) -> None:
    """The mask is what the formula needs, so nothing is drawn again."""

    def dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        mask = (torch.rand_like(x) >= p).to(x.dtype) / (1 - p)
        return x * mask, mask

    operator = opsmith.operator(
        name, random=True, results={"y": ..., "mask": opsmith.non_differentiable}, hidden=("mask",)
    )(dropped).gradients(x=lambda grad, mask: grad * mask)
    x = torch.ones(100, requires_grad=True)
    result = operator(x, 0.5)
    assert set(result.tolist()) == {0.0, 2.0}
    assert_close(grad(result.sum(), x)[0], result.detach())
    explained = operator.explain(x, 0.5)
    assert (explained.saved, explained.recomputes) == (("mask",), False)


def test_checkpoint_draws_the_same_numbers(name: str) -> None:
    from torch.utils.checkpoint import checkpoint

    operator = opsmith.operator(name, random=True)(noisy).kernel("cpu", noisy)
    x = torch.ones(100, requires_grad=True)
    result: Any = checkpoint(operator, x, use_reentrant=False)
    assert_close(grad(result.sum(), x)[0], result.detach())


def test_torch_knows_that_it_is_random(name: str) -> None:
    operator = opsmith.operator(name, random=True)(noisy)
    assert torch.Tag.nondeterministic_seeded in operator.torch_operator.tags
    steady = opsmith.operator(f"{name}_steady")(noisy)
    assert torch.Tag.nondeterministic_seeded not in steady.torch_operator.tags
