"""Opaque operators: routines outside of torch, with fake kernels and gradients of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith

Operator = opsmith.Operator[..., Any]


def convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """x [N], kernel [K] -> [N + K - 1]."""
    return torch.from_numpy(np.convolve(x.detach().numpy(), kernel.detach().numpy()))


def inputs() -> tuple[Tensor, Tensor]:
    make = opsmith.Make()
    return make(5).requires_grad_(), make(3).requires_grad_()


def declared(name: str) -> Operator:
    operator = opsmith.operator(name, opaque=True)(convolved)

    @operator.fake
    def _(x: Tensor, kernel: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] + kernel.shape[0] - 1)

    def correlate(wide: Tensor, narrow: Tensor) -> Tensor:
        return operator(wide, narrow.flip(0))[narrow.shape[0] - 1 : wide.shape[0]]

    return operator.gradients(
        x=lambda grad, kernel: correlate(grad, kernel), kernel=lambda grad, x: correlate(grad, x)
    )


def test_first_and_second_order(name: str) -> None:
    assert gradcheck(declared(name), inputs(), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(declared(name), inputs(), check_fwd_over_rev=True)


def test_fake_and_meta_tensors(name: str) -> None:
    from torch._subclasses import FakeTensorMode

    operator = declared(name)
    assert operator(torch.empty(5, device="meta"), torch.empty(3, device="meta")).shape == (7,)
    with FakeTensorMode() as mode:
        result = operator(mode.from_tensor(torch.ones(5)), mode.from_tensor(torch.ones(3)))
        assert result.shape == (7,)


def test_fake_kernel_is_not_run_on_real_tensors(name: str) -> None:
    def routine(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    operator = opsmith.operator(name, opaque=True)(routine)

    @operator.fake
    def _(x: Tensor) -> Tensor:
        raise AssertionError("the fake kernel ran")

    assert_close(operator(torch.ones(2)), torch.full((2,), 2.0))


def test_gradients_of_a_kernel_are_not_recomputed(name: str) -> None:
    """Without a gradient nothing is derived, also where there is a kernel of torch operations."""
    operator = opsmith.operator(name, opaque=True)(convolved).kernel("cpu", convolved)
    with pytest.raises(opsmith.errors.MissingGradientError):
        operator(*inputs()).sum().backward()


def test_inputs_that_need_no_gradient(name: str) -> None:
    operator = opsmith.operator(name, opaque=True)(convolved).gradients(kernel=opsmith.non_differentiable)
    x, kernel = inputs()
    assert not operator(x.detach(), kernel).requires_grad
    assert_close(operator(x.detach(), kernel), convolved(x, kernel))


@pytest.mark.parametrize("kernel", [False, True], ids=["", "kernel"])
def test_stand_in(kernel: bool, name: str) -> None:
    """The gradient of an opaque operator can be derived from a function of torch operations."""

    def rounded(x: Tensor, scale: Tensor) -> Tensor:
        return torch.from_numpy(np.round(x.detach().numpy()) * scale.detach().numpy())

    def smooth(x: Tensor, scale: Tensor) -> Tensor:
        return x.sin() * scale

    operator = opsmith.operator(name, opaque=True)(rounded).surrogate_gradients(smooth)
    if kernel:
        operator.kernel("cpu", rounded)
    make = opsmith.Make()
    args = make(3).requires_grad_(), make(3).requires_grad_()
    first = grad(operator(*args).sum(), args, create_graph=True)
    wanted = grad(smooth(*args).sum(), args, create_graph=True)
    assert_close(first, wanted)
    assert_close(grad(first[0].pow(2).sum(), args), grad(wanted[0].pow(2).sum(), args))


def test_hidden_results(name: str) -> None:
    def routine(x: Tensor) -> tuple[Tensor, Tensor]:
        root = np.sqrt(x.detach().numpy())
        return torch.from_numpy(2 * root), torch.from_numpy(root)

    operator = opsmith.operator(name, opaque=True, hidden=("root",))(routine).gradients(
        x=lambda grad, root: grad / root
    )
    x = torch.tensor([1.0, 4.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(operator, (x,))
    assert operator.explain(x).saved == ("root",)


def test_meta_tensors_after_a_real_call(name: str) -> None:
    """The first real call installs the fast path, which must leave `meta` to the fake kernel."""
    operator = declared(name)
    for _ in range(2):
        operator(torch.ones(5), torch.ones(3))
    assert operator(torch.empty(5, device="meta"), torch.empty(3, device="meta")).shape == (7,)
