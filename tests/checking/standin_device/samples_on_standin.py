"""Check of samples that lie on another device than the CPU: what holds there is what holds on the CPU.

It needs a process of its own, which test_samples_on_a_device.py begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import DEVICE
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map

import opsmith
from opsmith.core.effort_level import Level

TORCH_LACKS = ["opcheck"]
"""torch's own test of the registration of gradients knows the CPU, CUDA and XPU alone."""


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def on_device(values: tuple[Any, ...]) -> tuple[Any, ...]:
    moved: tuple[Any, ...] = tree_map(lambda v: v.to(DEVICE) if isinstance(v, Tensor) else v, values)
    return moved


@opsmith.operator("on_a_device::plain")
def plain(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sin() + x


@opsmith.operator("on_a_device::scaled")
def scaled(x: Tensor, by: float) -> Tensor:
    return x.exp() * by


scaled.gradients(x=lambda grad, result: grad * result)


@opsmith.operator("on_a_device::several", results=("y", "total"))
def several(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.tanh(), x.square().sum(-1)


@opsmith.operator("on_a_device::softmax", results=("y", "logsumexp"), hidden=("logsumexp",))
def softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    logsumexp = x.logsumexp(-1, keepdim=True)
    return (x - logsumexp).exp(), logsumexp


softmax.gradients(x=lambda grad, y: y * (grad - (grad * y).sum(-1, keepdim=True)))


@opsmith.operator("on_a_device::dropout", results=("y", "mask"), hidden=("mask",), random=True)
def dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    mask = 2 * (torch.rand_like(x) < 0.5).to(x.dtype)
    return x * mask, mask


dropout.gradients(x=lambda grad_y, mask: grad_y * mask)


@opsmith.operator("on_a_device::step_", mutates=["weight"])
def step_(weight: Tensor, slope: Tensor, rate: float) -> None:
    weight.sub_(rate * slope)


@opsmith.operator("on_a_device::squares")
def squares(xs: list[Tensor]) -> Tensor:
    return sum((x.square() for x in xs[1:]), start=xs[0])


@opsmith.operator("on_a_device::holomorphic")
def holomorphic(z: Tensor) -> Tensor:
    return z * z + z.exp()


holomorphic.gradients(z=lambda grad, z: grad * (2 * z + z.exp()).conj())


@opsmith.operator("on_a_device::best")
def best(x: Tensor, index: Tensor) -> Tensor:
    return x[index].argmax(-1)


@opsmith.operator("on_a_device::rows")
def rows(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


rows.gradients(x=lambda grad, x, index: torch.zeros_like(x).index_add(0, index, grad))


class Square(Function):
    """The square of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


INDEX = torch.tensor([2, 0, 1, 1])
RIGHT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "plain": (plain, (drawn(3, 4), drawn(3, 4, seed=1))),
    "with formulas": (scaled, (drawn(3, 4), 0.5)),
    "several results": (several, (drawn(3, 4),)),
    "hidden result": (softmax, (drawn(3, 4),)),
    "random": (dropout, (drawn(3, 4),)),
    "in place": (step_, (drawn(3, 4), drawn(3, 4, seed=1), 0.1)),
    "list": (squares, ([drawn(3, 4, seed=seed) for seed in range(3)],)),
    "complex": (holomorphic, (drawn(3, 4, dtype=torch.complex64),)),
    "without gradients": (best, (drawn(3, 4), INDEX)),
    "indices": (rows, (drawn(3, 4), INDEX)),
    "class": (Square, (drawn(3, 4),)),
}


@pytest.mark.parametrize("effort", ["quick", "default"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_operator_passes(name: str, effort: Level) -> None:
    operator, sample = RIGHT[name]
    reports = [
        opsmith.check(operator, samples=[each], effort=effort, skip=TORCH_LACKS)
        for each in (sample, on_device(sample))
    ]
    assert not reports[1].failures, str(reports[1])
    there, here = ({each.property: each.status for each in report.outcomes} for report in reports)
    assert here == there


def wrong_gradient(name: str) -> Any:
    @opsmith.operator(f"on_a_device::{name}")
    def operator(x: Tensor) -> Tensor:
        return x.exp()

    return operator.gradients(x=lambda grad, result: -grad * result)


def wrong_value(name: str) -> Any:
    @opsmith.operator(f"on_a_device::{name}")
    def operator(x: Tensor) -> Tensor:
        return x.exp()

    for kind in ("cpu", "standin"):
        operator.kernel(kind, lambda x: 1.01 * x.exp())
    return operator


def wrong_forward_mode(name: str) -> Any:
    @opsmith.operator(f"on_a_device::{name}")
    def operator(x: Tensor) -> Tensor:
        return x.sin()

    operator.gradients(x=lambda grad, x: grad * x.cos())
    return operator.tangents(result=lambda x, tangent_x: 2 * tangent_x * x.cos())


def undeclared_random(name: str) -> Any:
    @opsmith.operator(f"on_a_device::{name}")
    def operator(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    return operator


class HalfAGradient(Function):
    """A square whose gradient is wrong where its argument is negative."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x * (x > 0)


@pytest.mark.parametrize(
    "build",
    [wrong_gradient, wrong_value, wrong_forward_mode, undeclared_random, lambda name: HalfAGradient],
    ids=["gradient", "value", "forward mode", "randomness", "class"],
)
def test_a_wrong_operator_is_found_for_the_same_cause(build: Callable[[str], Any]) -> None:
    operator, sample = build(build.__name__.strip("<>")), (drawn(3, 4),)
    there, here = (
        opsmith.check(operator, samples=[each], effort="quick", skip=TORCH_LACKS)
        for each in (sample, on_device(sample))
    )
    causes = {(each.property, each.cause, each.input) for each in there.failures}
    assert {(each.property, each.cause, each.input) for each in here.failures} == causes
    assert here.errors
    assert "device='standin'" in str(here)


def test_a_kernel_for_a_device_is_checked_on_samples_of_the_cpu() -> None:
    @opsmith.operator("on_a_device::shifted")
    def shifted(x: Tensor) -> Tensor:
        return x.exp() + 1

    shifted.kernel(DEVICE.type, lambda x: x.exp())
    report = opsmith.check(
        shifted, samples=[(drawn(3, 4),)], effort="quick", only=["forward", "forward_mode"]
    )
    assert {each.property for each in report.failures} >= {"forward"}
    assert all("standin" in str(each.evidence["sample"]) for each in report.failures)


def test_what_runs_on_the_device_alone_is_checked() -> None:
    weight = drawn(4).to(DEVICE)

    def weighted(x: Tensor) -> Tensor:
        if x.device != DEVICE:
            raise RuntimeError("it takes tensors of the device")
        return x * weight.to(x.dtype)

    operator = opsmith.operator("on_a_device::weighted")(weighted)
    operator.gradients(x=lambda grad: grad * weight.to(grad.dtype))
    report = opsmith.check(operator, samples=[on_device((drawn(3, 4),))], effort="quick", skip=TORCH_LACKS)
    assert not report.errors, str(report)


def test_the_device_raises_as_a_gpu_does() -> None:
    x = drawn(3).to(DEVICE)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + drawn(3)
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.rand(3, device=DEVICE, generator=torch.Generator())
    assert torch.equal((x + torch.tensor(1.0)).cpu(), x.cpu() + 1)
    assert torch.equal(x[torch.tensor([2, 0])].cpu(), x.cpu()[[2, 0]])
