"""Cancellation in a formula is rounding; an error of the same size is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.judging.answer import Computation
from opsmith.judging.judge import judge


class Softmax(Function):
    """If one element of a row is nearly one, gradients are differences of much larger numbers."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = (x - x.amax(-1, keepdim=True)).exp()
        y = y / y.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


class SlightlyOff(Softmax):
    """A ten-billionth of a thousandth of the largest element is added everywhere."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        right = Softmax.backward(ctx, grad)
        return right + 1e-13 * right.abs().max()


class InSingle(Softmax):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        single = grad.float()
        return (y.float() * (single - (single * y.float()).sum(-1, keepdim=True))).to(grad.dtype)


class InHalf(Softmax):
    """Right in float64, and too coarse for float32."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        right = Softmax.backward(ctx, grad)
        return right.bfloat16().float() if grad.dtype == torch.float32 else right


def saturated(seed: int) -> Any:
    return 4 * torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_cancellation_in_another_formula_is_rounding(seed: int) -> None:
    report = opsmith.check(Softmax, samples=[(saturated(seed),)], only=["gradient"], seed=seed)
    assert report.passed_as_asked, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("wrong", [SlightlyOff, InSingle, InHalf])
def test_what_is_wrong_by_as_little_is_still_wrong(wrong: Any, seed: int) -> None:
    samples = [(saturated(seed),)]
    report = opsmith.check(wrong, samples=samples, only=["gradient"], effort="quick", seed=seed)
    assert {failure.input for failure in report.failures} == {"x"}


def zeros(name: str) -> Any:
    """An operator whose gradient is zero but for rounding, and its sample."""
    operator = opsmith.operator(f"cancellation::{name}")
    drawn = torch.Generator().manual_seed(3)
    one = torch.randn(1, generator=drawn, dtype=torch.float64) * 8
    if name == "layer_norm":

        def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return torch.nn.functional.layer_norm(x, (1,), weight, bias)

        return operator(layer_norm), (one, one / 3, one / 7)

    def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_group_norm(x, weight, bias, 1, 6, 3, 2, 0.5)  # type: ignore[no-any-return]

    x, weight, bias = (torch.randn(1, 6, 3, generator=drawn, dtype=torch.float64) for _ in range(3))
    # torch reads strided weights as if they were contiguous.
    return operator(group_norm), (x, weight[0, :, 0].contiguous(), bias[0, :, 0].contiguous())


@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
def test_a_gradient_that_is_zero_but_for_rounding_has_no_digits_to_compare(name: str) -> None:
    checked, sample = zeros(name)
    found = opsmith.check(
        checked, samples=[sample], only=["linearity", "forward_mode", "second_order", "vmap"], effort="quick"
    )
    assert not found.failures, str(found)


class Clipped(Function):
    """Its gradient is not linear, and tiny."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return 1e-30 * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 1e-30 * grad.clamp(-1, 1)


def test_a_tiny_gradient_that_is_not_linear_is_found() -> None:
    (failure,) = opsmith.check(Clipped, samples=[(saturated(0),)], only=["linearity"]).failures
    assert failure.cause == "nonlinear-grad"


def share(x: Tensor) -> Tensor:
    """Over one element it is one, and all terms of its gradient cancel."""
    return x / x.sum(-1, keepdim=True)


def share_gradient(grad: Tensor, x: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True)
    return grad / total - (grad * x).sum(-1, keepdim=True) / total**2


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def unit_gradient(grad: Tensor, x: Tensor) -> Tensor:
    norm = x.norm(dim=-1, keepdim=True)
    return grad / norm - x * (grad * x).sum(-1, keepdim=True) / norm**3


def log_softmax(x: Tensor) -> Tensor:
    return x - x.exp().sum(-1, keepdim=True).log()


def log_softmax_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad - x.exp() * grad.sum(-1, keepdim=True) / x.exp().sum(-1, keepdim=True)


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return 3 * centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + 1e-5)


def layer_norm_gradient(grad: Tensor, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
    normal = centred * scale
    means = (grad * scale * 3).mean(-1, keepdim=True), (3 * grad * normal).mean(-1, keepdim=True)
    return grad * (scale * 3) - means[0] - scale * normal * means[1]


def variance(x: Tensor) -> Tensor:
    """Over one element it is zero, too: the size of the terms shows in the other sample alone."""
    return (x * x).mean(-1) - x.mean(-1) ** 2


def variance_gradient(grad: Tensor, x: Tensor) -> Tensor:
    count = x.shape[-1]
    return 3 * x * grad[..., None] / (1.5 * count) - 2 * (x.mean(-1) * grad)[..., None] / count


def entropy(x: Tensor) -> Tensor:
    shares = x / x.sum(-1, keepdim=True)
    return -(shares * shares.log()).sum(-1)


def entropy_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return share_gradient(-(share(x).log() + 1) * grad[..., None], x)


def routed(x: Tensor) -> Tensor:
    """The weight of the best expert among those that are used, which is one."""
    best = x.softmax(-1).topk(1, -1).values
    return best / best.sum(-1, keepdim=True)


def routed_gradient(grad: Tensor, x: Tensor) -> Tensor:
    weights = x.softmax(-1)
    best, indices = weights.topk(1, -1)
    into = torch.zeros_like(weights).scatter(-1, indices, share_gradient(grad, best))
    return weights * into - weights * (weights * into).sum(-1, keepdim=True)


CANCELLING = {
    "share": (share, share_gradient),
    "unit": (unit, unit_gradient),
    "log_softmax": (log_softmax, log_softmax_gradient),
    "layer_norm": (layer_norm, layer_norm_gradient),
    "variance": (variance, variance_gradient),
    "entropy": (entropy, entropy_gradient),
    "routed": (routed, routed_gradient),
}
"""Functions that one element does not move, and right formulas for their gradients."""


def over_one_element(seed: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64),) for shape in ((3, 4), (2, 1))
    ]


def found_over_one_element(
    name: str, function: Any, gradient: Any, seed: int, *, declared: bool = True
) -> opsmith.Report:
    """The report on a function and a formula, as an operator or as a class."""
    if declared:
        checked = opsmith.operator(f"cancellation::one_{name}")(function)
        checked.gradients(x=lambda grad, x: gradient(grad, x))
    else:

        class ByFormula(Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                ctx.save_for_backward(x)
                return function(x)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return gradient(grad, *ctx.saved_tensors)

        checked = ByFormula
    only = ["gradient", "linearity", "second_order", "forward_mode"]
    samples = over_one_element(seed)
    return opsmith.check(checked, samples=samples, only=only, effort="quick", seed=seed)


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CANCELLING)
def test_a_right_gradient_whose_terms_all_cancel_is_no_fault(name: str, seed: int) -> None:
    for declared in (True, False):
        found = found_over_one_element(name, *CANCELLING[name], seed, declared=declared)
        assert not found.failures, str(found)


def over_one(small: Any) -> Any:
    """The right gradient of a share, and of one element another one."""
    return lambda grad, x: share_gradient(grad, x) + (small(grad, x) if x.shape[-1] == 1 else 0)


WRONG_OVER_ONE = {
    "a term is left out": (share, over_one(lambda grad, x: grad / x)),
    "a straight-through gradient": (share, over_one(lambda grad, x: grad)),
    "a millionth of a term": (share, over_one(lambda grad, x: 1e-6 * grad / x)),
    "a ten-billionth of a term": (share, over_one(lambda grad, x: 1e-10 * grad / x)),
    "a ten-trillionth of a term": (share, over_one(lambda grad, x: 1e-13 * grad / x)),
    "not linear": (share, over_one(lambda grad, x: (1e-6 * grad / x).abs())),
    "ignores grad_output": (share, over_one(lambda grad, x: 1e-6 / x)),
    "in float32": (share, over_one(lambda grad, x: share_gradient(grad.float(), x.float() / 3).double())),
    "of a unit vector": (unit, lambda grad, x: grad / x.norm(dim=-1, keepdim=True)),
    "of log_softmax": (log_softmax, lambda grad, x: grad - 0.999 * (grad - log_softmax_gradient(grad, x))),
    "of a variance": (variance, lambda grad, x: 2 * x * grad[..., None] / x.shape[-1]),
    "of an entropy": (
        entropy,
        lambda grad, x: -(share(x).log() + 1) * grad[..., None] / x.sum(-1, keepdim=True),
    ),
}
"""Faults of gradients that are zero."""


@pytest.mark.every(8)
@pytest.mark.parametrize("fault", WRONG_OVER_ONE)
def test_a_wrong_gradient_where_zero_is_right_is_found(fault: str) -> None:
    name = f"wrong_{[*WRONG_OVER_ONE].index(fault)}"
    for declared in (True, False):
        found = found_over_one_element(name, *WRONG_OVER_ONE[fault], 0, declared=declared)
        assert "x" in {each.input for each in found.failures if each.property in ("gradient", "linearity")}, (
            str(found)
        )


class NormInSingle(Function):
    """Over one element the terms of its gradient cancel but for a millionth."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        single = x.float()
        scale = torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, scale)
        return (single * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, scale = ctx.saved_tensors
        normal = x.float() * scale
        return (scale * (grad - normal * (grad.float() * normal).mean(-1, keepdim=True))).to(x.dtype)


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(4))
def test_what_computes_in_float32_has_its_rounding_where_terms_cancel(seed: int) -> None:
    adopted = opsmith.adopt(NormInSingle, f"cancellation::norm_in_single_{seed}", kind="float32")
    found = opsmith.check(adopted, samples=over_one_element(seed), only=["linearity", "gradient"], seed=seed)
    assert not found.failures, str(found)


def test_noise_is_what_the_last_digits_of_the_inputs_move() -> None:
    (x,) = over_one_element(0)[1]
    grad = torch.tensor([[0.3], [-0.7]], dtype=torch.float64)

    def level(function: Any) -> float:
        generator = torch.Generator().manual_seed(0)
        return Computation.of(lambda flat: [function(*flat)], [grad, x], generator).noise()

    assert 0 < level(share_gradient) < 1e-13
    assert level(lambda grad, x: share_gradient(grad.float(), x.float()).double()) == 0
    assert level(lambda grad, x: torch.zeros_like(x)) == 0


class IgnoresGradOutput(Function):
    """Its gradient is a millionth of a term, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return share(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 1e-6 / x


def test_a_tiny_gradient_that_ignores_grad_output_is_found() -> None:
    (failure,) = opsmith.check(
        IgnoresGradOutput, samples=[over_one_element(0)[1]], only=["linearity"]
    ).failures
    assert failure.cause == "ignores-grad-output"


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(4))
def test_noise_that_is_the_same_for_two_grad_outputs_is_no_fault(seed: int) -> None:
    """Of one element, the noise of two gradients is often the same, to the bit."""

    class Share(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return share(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return share_gradient(grad, *ctx.saved_tensors)

    found = opsmith.check(Share, samples=[(over_one_element(seed)[1][0][:1],)], only=["linearity"], seed=seed)
    assert not found.failures, str(found)


class FloorByLayout(Function):
    """Whole numbers lie at the jumps of what it computes, and it is wrong where a layout has strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        strided = x.dim() == 2 and not x.is_contiguous() and 0 not in x.stride()
        return torch.floor(x) + 3.0 * strided

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def test_a_jump_is_no_noise() -> None:
    report = opsmith.check(FloorByLayout, samples=[(torch.arange(12.0).reshape(3, 4),)], only=["layouts"])
    assert [each.cause for each in report.failures] == ["layout"]


def test_the_noise_of_a_large_element_is_not_that_of_a_small_one() -> None:
    x = torch.tensor([1e7, 1.0, 2.0], dtype=torch.float64)

    def judged(got: Tensor) -> bool:
        generator = torch.Generator().manual_seed(0)
        single = Computation.of(
            lambda flat: [flat[0] * 1.0], [x], generator, computed_in=lambda: torch.float32
        )
        return not judge(got, single.at([x], torch.float64)[0]).wrong

    assert judged(x * (1 + 2.0**-24))
    assert not judged(x + torch.tensor([0.0, 0.5, 0.0], dtype=torch.float64))
