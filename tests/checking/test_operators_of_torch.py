"""Operators of torch's own, and classes, that are right and look odd to a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.judging.compare import within_rounding


def checked(function: Callable[..., Any], *samples: tuple[Any, ...], only: list[str]) -> opsmith.Report:
    operator = opsmith.operator(f"torch_own::{function.__name__}")(function)
    return opsmith.check(operator, samples=samples, only=only, effort="quick")


def drawn(*shape: int, low: float = -2.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * (2 - low) + low


def test_an_input_by_which_torch_has_no_derivative_is_left_out() -> None:
    def gamma(a: Tensor, x: Tensor) -> Tensor:
        return torch.special.gammainc(a, x)

    report = checked(
        gamma, (drawn(3, low=0.5), drawn(3, low=0.5)), only=["gradient", "linearity", "effects", "memory"]
    )
    assert not report.failures, report
    (gradient,) = (each for each in report.outcomes if each.property == "gradient")
    assert gradient.status == "passed"
    (note,) = gradient.notes
    assert note == (
        "torch has no derivative with respect to `a`: the derivative for 'igamma: input' is not implemented."
    )


def test_an_operator_without_any_derivative_in_torch_is_no_failure_and_no_pass() -> None:
    def zeta(x: Tensor) -> Tensor:
        return torch.special.zeta(x, 2.0)

    report = checked(zeta, (drawn(3, low=1.5),), only=["gradient", "state", "backward_again"])
    assert not report.failures, report
    (gradient,) = (each for each in report.outcomes if each.property == "gradient")
    assert gradient.status == "skipped"
    assert gradient.reason.startswith("torch has no derivative with respect to `x`: the derivative for")


@pytest.mark.slow
def test_a_gradient_that_is_nan_where_results_are_is_not_judged_along_directions() -> None:
    def raised_to(exponent: Tensor, base: Tensor) -> Tensor:
        return base**exponent  # nan for a negative base, but for whole exponents

    exponent, base = 3 * drawn(5, 10, 4), 3 * drawn(10, 4).flip(0)
    exponent[0] = exponent[0].round()
    report = checked(
        raised_to, (exponent, base), (exponent[0], base[:, :1]), only=["gradient", "forward_mode"]
    )
    assert not report.failures, report


def test_differences_along_a_direction_are_repeated_before_they_refute() -> None:
    def log_sum(x: Tensor) -> Tensor:
        return torch.logcumsumexp(x, 0)

    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.rand(5, 5, 5, generator=generator, dtype=torch.float64) * 18 - 9
        report = checked(log_sum, (x,), only=["second_order"])
        assert not report.failures, report


def test_numbers_below_the_smallest_normal_one_differ_by_rounding() -> None:
    least = 2.0**-149
    assert within_rounding(torch.tensor([5 * least]), torch.tensor([6 * least]))
    assert not within_rounding(torch.tensor([1e-30]), torch.tensor([2e-30]))


def test_opcheck_leaves_out_a_reference_that_looks_at_data() -> None:
    def hot(labels: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(labels)

    report = checked(hot, (torch.tensor([0, 2, 1]),), only=["opcheck"])
    assert not report.failures, report
    (opcheck,) = (each for each in report.outcomes if each.property == "opcheck")
    assert "test_faketensor was left out, because the reference looks at data" in str(opcheck.notes)


def test_a_sparse_tensor_may_be_saved() -> None:
    def sparsely(x: Tensor) -> Tensor:
        return x.to_sparse().to_dense()

    report = checked(sparsely, (drawn(3, 4),), only=["effects", "memory"])
    assert not report.failures, report


class DoubledInPlace(Function):
    """It writes into its argument, says so, and has a rule for `vmap` that does the same."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 2 * grad

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any) -> Any:
        return DoubledInPlace.apply(x), in_dims[0]


def test_a_class_that_writes_in_place_is_mapped_on_copies() -> None:
    report = opsmith.check(DoubledInPlace, samples=[(drawn(3, 4),)], only=["vmap"])
    assert not report.failures, report


class Switched(Function):
    """Its backward uses two constants that are made once."""

    made: dict[str, Tensor] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        for name in ("one", "two"):
            Switched.made.setdefault(name, torch.ones(x.shape))
        ctx.save_for_backward(*Switched.made.values())
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        one, two = ctx.saved_tensors
        return grad * (one + two)


class Piling(Switched):
    kept: list[Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        Piling.kept.append(torch.ones(x.shape))
        ctx.save_for_backward(Piling.kept[-1], Piling.kept[-1])
        return 2 * x


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize(("function", "leaks"), [(Switched, False), (Piling, True)])
def test_constants_that_every_call_saves_are_no_leak(function: Any, leaks: bool) -> None:
    report = opsmith.check(function, samples=[(drawn(3, 4),)], only=["memory"])
    assert ("leak" in {failure.cause for failure in report.failures}) is leaks, report


def test_gradients_at_results_that_are_nan_are_not_mapped() -> None:
    def product(x: Tensor) -> Tensor:
        return torch.where(x.prod(-1).isfinite(), x.prod(-1), 0.0) + torch.where(
            x[..., 0] > 9, torch.inf, 0.0
        )

    x = drawn(3, 5)
    x[0, 0], x[1, 1] = 10.0, torch.nan
    report = checked(product, (x,), only=["vmap"])
    assert not report.failures, report
    (vmap,) = (each for each in report.outcomes if each.property == "vmap")
    assert "its results are not all finite" in str(vmap.notes)
