"""A class that was adopted with a `kind=` is held to the contract of its own `apply` and `jvp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith


def sign(backward: Callable[..., Any], jvp: Callable[..., Any] | None = None, **parts: Any) -> type[Function]:
    """A class that returns the sign, with other parts in the place of its own."""

    def forward(ctx: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x) * scale

    members = {"forward": forward, "backward": backward, **({"jvp": jvp} if jvp else {}), **parts}
    return type("Sign", (Function,), {name: staticmethod(member) for name, member in members.items()})


def report(function_class: type[Function], kind: str = "surrogate", **options: Any) -> opsmith.Report:
    x = torch.linspace(-2, 2, 12).view(4, 3) + 0.013
    operator = opsmith.adopt(
        function_class, f"declared_kinds::{kind}", kind=kind, samples=lambda: [(x.clone(), 2.0)]
    )
    properties = ["surrogate", "forward_mode", "effects", "state", "backward_again"]
    return opsmith.check(operator, only=properties, effort="quick", **options)


def faults(found: opsmith.Report) -> set[tuple[str, str, str]]:
    """Property, cause and severity of each failure."""
    return {(each.property, each.cause, each.severity) for each in found.failures}


def outcome(found: opsmith.Report, name: str) -> Any:
    return next(each for each in found.outcomes if each.property == name)


def straight_through(ctx: Any, grad: Tensor) -> Any:
    return grad, None


def clears_large(ctx: Any, grad: Tensor) -> Any:
    grad[ctx.saved_tensors[0].abs() > 1] = 0
    return grad, None


def in_float32(ctx: Any, grad: Tensor) -> Any:
    return (grad.float() * (ctx.saved_tensors[0].abs() < 1)).to(grad.dtype), None


def clamps_first(ctx: Any, x: Tensor, scale: float) -> Tensor:
    return x.clamp_(-1, 1).sign() * scale


KINDS = ["surrogate", "nonlinear"]


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_gradients_are_found_though_the_operator_needs_no_more(kind: str) -> None:
    found = report(sign(lambda ctx, grad: grad), kind)
    assert ("effects", "gradient-count", "error") in faults(found), str(found)
    failure = next(each for each in found.failures if each.property == "effects")
    assert failure.message.startswith("called through `Sign.apply`: RuntimeError")


def test_too_few_gradients_of_a_class_that_draws_are_found() -> None:
    found = report(sign(lambda ctx, grad: grad), "stochastic")
    assert ("effects", "gradient-count", "error") in faults(found), str(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_into_grad_output_is_found_and_hides_nothing(kind: str) -> None:
    found = report(sign(clears_large), kind)
    assert faults(found) == {("effects", "mutates-grad-output", "error")}, str(found)
    assert outcome(found, "state").status == "passed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_into_an_argument_is_found(kind: str) -> None:
    found = report(sign(straight_through, forward=clamps_first), kind)
    assert faults(found) == {("effects", "mutates-input", "error")}, str(found)


def test_a_surrogate_in_float32_is_a_warning() -> None:
    found = report(sign(in_float32))
    assert faults(found) == {("surrogate", "precision", "warning")}, str(found)


def test_gradients_that_are_trailing_nones_are_right() -> None:
    assert not report(sign(lambda ctx, grad: (grad, None, None, None))).failures


def test_a_surrogate_that_rounds_grad_output_on_purpose_is_not_float32() -> None:
    found = report(sign(lambda ctx, grad: (grad.sign() / 4, None)), "nonlinear")
    assert not found.failures, str(found)


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_number_of_tangents_is_found(kind: str) -> None:
    found = report(sign(straight_through, lambda ctx, tangent, _: (tangent, tangent)), kind)
    assert faults(found) == {("forward_mode", "gradient-count", "error")}, str(found)


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tangent_of_another_shape_is_found(kind: str) -> None:
    found = report(sign(straight_through, lambda ctx, tangent, _: tangent[1:]), kind)
    assert [each.property for each in found.errors] == ["forward_mode"], str(found)


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tangent_of_another_dtype_is_found(kind: str) -> None:
    found = report(sign(straight_through, lambda ctx, tangent, _: tangent.float()), kind)
    assert [each.property for each in found.errors] == ["forward_mode"], str(found)


def test_a_tangent_that_is_not_that_of_the_backward_is_found() -> None:
    found = report(sign(straight_through, lambda ctx, tangent, _: 2 * tangent))
    assert faults(found) == {("forward_mode", "forward-mode", "error")}, str(found)
    assert "do not agree with the surrogate gradients" in found.failures[0].message
    assert "gradcheck" not in found.failures[0].replay  # which fails beside every surrogate


def test_a_tangent_that_is_the_derivative_of_the_forward_is_a_warning() -> None:
    found = report(sign(straight_through, lambda ctx, tangent, _: torch.zeros_like(tangent)))
    assert faults(found) == {("forward_mode", "forward-mode", "warning")}, str(found)
    assert found.failures[0].message.endswith("they are the derivatives of the forward")


def test_a_tangent_that_agrees_with_the_backward_passes() -> None:
    found = report(sign(straight_through, lambda ctx, tangent, _: tangent))
    assert not found.failures, str(found)
    assert outcome(found, "forward_mode").status == "passed"


def test_the_tangent_of_a_backward_that_is_not_linear_is_held_to_its_form() -> None:
    found = report(sign(lambda ctx, grad: (grad.clamp(-1, 1), None), lambda ctx, t, _: t), "nonlinear")
    assert not found.failures, str(found)
    (note,) = outcome(found, "forward_mode").notes
    assert note == (
        "the numbers of the tangents were left out: the backward is declared not to be linear in grad_output"
    )


def test_without_tangents_beside_surrogates_there_is_nothing_to_compare() -> None:
    found = report(sign(straight_through))
    assert outcome(found, "forward_mode").status == "skipped"
    assert (
        "the gradients are surrogates, which are wrong on purpose; the property `surrogate` checks them"
        in outcome(found, "forward_mode").reason
    )


def test_a_jvp_that_writes_into_its_tangent_as_torch_wants_it_of_an_operation_in_place() -> None:
    def forward(ctx: Any, x: Tensor, scale: float = 1.0) -> Tensor:
        ctx.scale = scale
        ctx.mark_dirty(x)
        return x.sign_().mul_(scale)

    def scaled(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.scale, None

    found = report(sign(scaled, lambda ctx, tangent, _: tangent.mul_(ctx.scale), forward=forward))
    assert not found.failures, str(found)
    assert outcome(found, "forward_mode").status == "passed"
