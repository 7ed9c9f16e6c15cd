"""The properties `second_order` and `forward_mode` on classes and operators as they are."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import opsmith


def outcome(checked: Any, name: str, *samples: tuple[Any, ...], **options: Any) -> Any:
    report = opsmith.check(checked, samples=samples or None, only=[name], **options)
    return next(each for each in report.outcomes if each.property == name)


def matrix(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * s * (1 + x * (1 - s))


class KeptOnContext(Swish):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.s = x.detach(), torch.sigmoid(x.detach())
        return x * ctx.s

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.s * (1 + ctx.x * (1 - ctx.s))


class WithoutGraph(Swish):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.no_grad():
            return Swish.backward(ctx, grad)


class Once(Swish):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return torch.from_numpy((grad * s * (1 + x * (1 - s))).numpy().copy())


class DetachedHalf(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y.detach(), grad * x


class Doubled(Function):
    """It declares that it writes into its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize("effort", ["quick", "default"])
def test_a_backward_of_torch_operations_passes(effort: Any) -> None:
    assert outcome(Swish, "second_order", (matrix(),), effort=effort).status == "passed"


@pytest.mark.slow
def test_what_was_kept_on_ctx_is_missing_from_the_second_order() -> None:
    (failure,) = outcome(KeptOnContext, "second_order", (matrix(),)).failures
    assert (failure.input, failure.cause) == ("x", "second-order")
    assert (
        "the derivative of the gradient of `x` is wrong: it lacks the part that flows through `x` "
        "(with respect to `x`, at [" in failure.message
    )
    assert failure.evidence["by x"] == "missing"
    assert failure.evidence["by grad"] == "right"


@pytest.mark.slow
def test_a_gradient_that_is_silently_cut_off_is_found() -> None:
    (failure,) = outcome(WithoutGraph, "second_order", (matrix(),)).failures
    assert (failure.input, failure.cause) == ("x", "second-order")
    assert "the gradient cannot be differentiated again, as if it were a constant" in failure.message


def test_once_differentiable_is_a_refusal() -> None:
    found = outcome(Once, "second_order", (matrix(),))
    assert found.status == "skipped"
    assert "once_differentiable" in found.reason


@pytest.mark.slow
def test_the_gradient_that_lacks_something_is_named_and_the_other_is_not() -> None:
    (failure,) = outcome(DetachedHalf, "second_order", (matrix(), matrix(1))).failures
    assert failure.input == "x"
    assert "it lacks the part that flows through `y`" in failure.message
    assert {failure.evidence[f"by {each}"] for each in ("x", "grad")} == {"right"}


@pytest.mark.slow
def test_a_large_sample_is_seen_whole_by_random_directions() -> None:
    large = torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for effort in ("quick", "default"):
        assert outcome(Swish, "second_order", (large,), effort=effort).status == "passed"
        (failure,) = outcome(KeptOnContext, "second_order", (large,), effort=effort).failures
        assert failure.cause == "second-order"


@pytest.mark.slow
def test_a_class_that_writes_into_its_argument_and_says_so_is_differentiated() -> None:
    for name in ("gradient", "second_order"):
        assert outcome(Doubled, name, (matrix(),)).status == "passed"


class TangentGiven(Swish):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_forward(x)
        return Swish.forward(ctx, x)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return Swish.backward(ctx, tangent)


class TangentHalved(TangentGiven):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return Swish.backward(ctx, tangent) / 2


def test_a_class_without_a_tangent_refuses_forward_mode() -> None:
    found = outcome(Swish, "forward_mode", (matrix(),))
    assert found.status == "skipped"
    assert found.reason.startswith("You must implement the jvp function")


def test_the_tangent_of_a_class_is_held_to_differences_and_to_reverse_mode() -> None:
    assert outcome(TangentGiven, "forward_mode", (matrix(),)).status == "passed"
    (failure,) = outcome(TangentHalved, "forward_mode", (matrix(),)).failures
    assert (failure.input, failure.cause) == ("x", "forward-mode")
    assert "reverse mode is right" in failure.message
    assert failure.evidence["reverse mode"] == "right"
    assert failure.evidence["looks like"] == "scale"


def test_two_numbers_are_shown_with_the_digits_in_which_they_differ() -> None:
    @opsmith.operator("second_order::slightly_off")
    def square(x: Tensor) -> Tensor:
        return x * x

    square.samples(lambda make: [(make(3),)])
    square.tangents(result=lambda tangent_x, x: 2 * x * tangent_x * (1 + 1e-7))
    (failure,) = outcome(square, "forward_mode").failures
    found = re.search(r"the weighted sum of all tangents is (\S+) where (\S+) is right", failure.message)
    assert found is not None
    assert found[1] != found[2]


@pytest.mark.parametrize("off", [0.0, 1e-7])
def test_tangents_beside_surrogate_gradients_are_held_to_half_of_the_digits(off: float) -> None:
    @opsmith.operator(f"second_order::rounded_{bool(off)}")
    def rounded(x: Tensor) -> Tensor:
        return x.round()

    rounded.samples(lambda make: [(make(3),)])
    rounded.surrogate_gradients(x=lambda grad, x: grad * torch.sigmoid(x))
    rounded.tangents(result=lambda tangent_x, x: tangent_x * torch.sigmoid(x) * (1 + off))
    causes = [each.cause for each in outcome(rounded, "forward_mode").failures]
    assert causes == ["forward-mode"] * bool(off)


class TangentWhenAlone(Function):
    """Its tangent by one input alone is off by a ten-millionth."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, other: Tensor | None) -> Tensor:
        x, y = ctx.saved_tensors
        if tangent is None or other is None:
            alone: Tensor = (tangent * y if other is None else other * x) * (1 + 1e-7)
            return alone
        return tangent * y + other * x


def test_a_tangent_by_one_input_alone_is_held_to_half_of_the_digits() -> None:
    (failure,) = outcome(TangentWhenAlone, "forward_mode", (matrix(), matrix(1))).failures
    assert failure.cause == "forward-mode"
    assert "changes if the other inputs have tangents of zeros" in failure.message


def test_a_gradient_that_is_wrong_at_first_order_may_be_consistent_at_second() -> None:
    @opsmith.operator("second_order::wrong_by_two")
    def square(x: Tensor) -> Tensor:
        return x * x

    square.samples(lambda make: [(make(3),)])
    square.gradients(x=lambda grad, x: grad * x)
    assert outcome(square, "second_order").status == "passed"
    (failure,) = outcome(square, "forward_mode").failures
    assert failure.cause == "scale"  # it is what the gradient is, and not forward mode, that is wrong


def test_a_gradient_that_is_nan_is_left_to_first_order() -> None:
    @opsmith.operator("second_order::nan_at_zero")
    def magnitude(x: Tensor) -> Tensor:
        return x.abs()

    magnitude.samples(lambda make: [(torch.tensor([1.0, 0.0]),)])
    magnitude.gradients(x=lambda grad, x: grad * x / x.abs())
    reason = "sample 0 was left out: the gradient itself is infinite or nan there"
    found = outcome(magnitude, "second_order")
    assert (found.status, found.reason, found.notes) == ("skipped", reason, ())
    magnitude.samples(lambda make: [(torch.tensor([1.0, 0.0]),), (torch.tensor([1.0, -2.0]),)])
    found = outcome(magnitude, "second_order")
    assert (found.status, found.reason, found.notes) == ("passed", "", (reason,))


def test_an_input_without_a_derivative_in_torch_leaves_the_other_one() -> None:
    @opsmith.operator("second_order::incomplete_gamma")
    def gamma(a: Tensor, x: Tensor) -> Tensor:
        return torch.special.gammainc(a, x)  # by `a`, torch has no derivative

    gamma.samples(lambda make: [(make(3, low=0.5), make(3, low=0.5))])
    found = outcome(gamma, "second_order")
    assert found.status == "passed"
    assert "the derivative for 'igamma: input' is not implemented" in found.notes[0]


def test_a_formula_in_numpy_says_that_it_cuts_the_graph() -> None:
    @opsmith.operator("second_order::numpy")
    def square(x: Tensor) -> Tensor:
        return x * x

    square.samples(lambda make: [(make(3),)])
    square.gradients(
        x=lambda grad, x: torch.from_numpy(np.multiply(2 * x.detach().numpy(), grad.detach().numpy()))
    )
    (failure,) = outcome(square, "second_order").failures
    assert (failure.input, failure.cause) == ("x", "second-order")
    assert "torch cannot see that the gradient of `x` depends on `grad`" in failure.message


class KeepsSigmoid(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, s = ctx.saved_tensors
        return grad * (s + x * s * (1 - s))


@pytest.mark.slow
def test_what_a_forward_computed_and_saved_is_named_with_its_hint() -> None:
    (failure,) = opsmith.check(KeepsSigmoid, samples=[(torch.randn(3),)], only=["second_order"]).failures
    assert failure.cause == "second-order"
    assert "keeps the value on `ctx` or by `save_for_backward` and does not return it" in failure.message
    assert "return it. Compute the value again in the backward" in failure.message


class Rounded(Function):
    """A straight-through estimator whose gradient is that of the sigmoid: wrong on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


class RoundedDetached(Rounded):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x.detach())


class RoundedKept(Rounded):
    """It keeps an intermediate, which has no graph: opsmith computes it again in second order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.sigmoid(x))
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (s,) = ctx.saved_tensors
        return grad * s * (1 - s)


class RoundedByItsResult(Rounded):
    """Its gradient depends on its result, whose own gradient is a surrogate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.round()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


class RoundedTwice(Rounded):
    """Its backward applies another straight-through estimator."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * Rounded.apply(x)


def surrogate(function_class: type[Function]) -> Any:
    return opsmith.adopt(function_class, f"second::{function_class.__name__.lower()}", kind="surrogate")


@pytest.mark.parametrize("function_class", [Rounded, RoundedKept])
def test_surrogate_gradients_have_a_second_order(function_class: type[Function]) -> None:
    assert outcome(surrogate(function_class), "second_order", (3 * matrix(),)).status == "passed"


def test_a_surrogate_gradient_that_hides_something_is_a_warning() -> None:
    found = outcome(surrogate(RoundedDetached), "second_order", (3 * matrix(),))
    (failure,) = found.failures
    assert (failure.cause, failure.severity, failure.input) == ("second-order", "warning", "x")
    assert "it lacks the part that flows through `x`" in failure.message


def test_a_formula_of_a_surrogate_that_hides_something_is_a_warning() -> None:
    @opsmith.operator("second::rounded_by_formula")
    def rounded(x: Tensor) -> Tensor:
        return x.round()

    rounded.surrogate_gradients(x=lambda grad, x: grad * torch.sigmoid(x.detach()))
    (failure,) = outcome(rounded, "second_order", (3 * matrix(),)).failures
    assert (failure.cause, failure.severity) == ("second-order", "warning")


@pytest.mark.parametrize("function_class", [RoundedByItsResult, RoundedTwice])
def test_a_surrogate_gradient_through_another_is_not_compared(function_class: type[Function]) -> None:
    found = outcome(surrogate(function_class), "second_order", (3 * matrix(),))
    assert found.status == "skipped"
    assert re.search(r"the gradient goes through `\w+Backward` in sample 0", found.reason)


def with_a_stand_in() -> Any:
    """A learned step of a quantizer, whose stand-in detaches on purpose."""

    @opsmith.operator("second::by_stand_in")
    def scaled(x: Tensor, s: Tensor) -> Tensor:
        return torch.round(x / s) * s

    scaled.surrogate_gradients(lambda x, s: ((x / s).round().detach() + (x / s) - (x / s).detach()) * s)
    return scaled


def of_its_result() -> Any:
    @opsmith.operator("second::of_its_result")
    def sigmoid(x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    sigmoid.surrogate_gradients(x=lambda grad, result: -grad * result * (1 - result))
    return sigmoid


@pytest.mark.parametrize(
    ("operator", "arguments", "through"),
    [
        (with_a_stand_in, (3 * matrix(), torch.tensor([0.4])), "its stand-in"),
        (of_its_result, (matrix(),), r"`.*`"),
    ],
)
def test_an_operator_whose_gradient_goes_through_a_surrogate_is_not_compared(
    operator: Any, arguments: tuple[Any, ...], through: str
) -> None:
    found = outcome(operator(), "second_order", arguments)
    assert found.status == "skipped"
    assert re.search(f"the gradient goes through {through} in sample 0", found.reason), found.reason


class RoundedTwiceFarBehind(Rounded):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        far = Rounded.apply(x)
        for _ in range(1100):
            far = far * 1.0
        return grad * far


def test_a_surrogate_far_behind_is_seen() -> None:
    assert outcome(surrogate(RoundedTwiceFarBehind), "second_order", (3 * matrix(),)).status == "skipped"
