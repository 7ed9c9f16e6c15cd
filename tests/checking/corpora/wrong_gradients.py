"""Operators with wrong gradients: formulas, references, samples, higher orders."""

from typing import Any

import numpy as np
import torch
from mutants import linear, square, wrong
from torch import Tensor

import opsmith


@wrong(
    "gradient",
    "sign",
    "weight",
    "9 of 9 elements are wrong; it is the right tensor times -1",
)
def sign() -> Any:
    return linear("sign").gradients(weight=lambda grad, x: -(grad.mT @ x))


@wrong("gradient", "scale", "x", "it is the right tensor times 1/2")
def factor_two() -> Any:
    return square("factor_two").gradients(x=lambda grad, x: grad * x)


@wrong("gradient", "transposed", "weight", "it is the transpose of the right tensor (relative error")
def transposed() -> Any:
    return linear("transposed").gradients(weight=lambda grad, x: x.mT @ grad)


@wrong("gradient", "missing-gradient", "bias", "it is zero everywhere")
def zeros() -> Any:
    return linear("zeros").gradients(bias=lambda grad: torch.zeros_like(grad.sum(0)) + 0 * grad.sum(0))


@wrong("gradient", "missing-gradient", "x", "it is zero everywhere")
def declared_zero() -> Any:
    return square("declared_zero").gradients(x=opsmith.zero)


@wrong("gradient", "scale", "bias", "it is the right tensor times 1/3")
def mean_over_the_batch() -> Any:
    return linear("mean_over_the_batch").gradients(bias=lambda grad: grad.mean(0))


@wrong("gradient", "unreduced-broadcast", "bias", "it is the first of the 3 slices that broadcasting")
def first_row_for_the_batch() -> Any:
    return linear("first_row_for_the_batch").gradients(bias=lambda grad: grad[0])


@wrong("linearity", "ignores-grad-output", "x", "the same, bit by bit, for two different grad_outputs:")
def ignores_grad() -> Any:
    return square("ignores_grad").gradients(x=lambda grad, x: 2 * x + 0 * grad)


@wrong(
    "layouts",
    "layout",
    "x",
    "backward of `.sum()` returns this layout): at [",
)
def as_strided() -> Any:
    def contiguous_only(grad: Tensor, x: Tensor) -> Tensor:
        return 2 * x * torch.as_strided(grad, x.shape, (x.shape[1], 1))

    return square("as_strided", shapes="x: A B -> A B").gradients(x=contiguous_only)


@wrong(
    "layouts",
    "layout",
    "x",
    "RuntimeError: view size",
)
def view_of_grad() -> Any:
    return square("view_of_grad").gradients(x=lambda grad, x: (2 * x.view(-1) * grad.view(-1)).view(x.shape))


@wrong(
    "gradient",
    "mutates-saved",
    "x",
    "SavedTensorModifiedError: wrong::in_place_on_saved: a gradient formula wrote into `x`",
)
def in_place_on_saved() -> Any:
    return square("in_place_on_saved").gradients(x=lambda grad, x: x.mul_(2) * grad)


@wrong(
    "gradient",
    "dtype",
    "x",
    "GradientDtypeError: wrong::float64_constant: the gradient of `x` has the wrong dtype",
)
def float64_constant() -> Any:
    return square("float64_constant").gradients(
        x=lambda grad, x: grad * x * torch.full((4,), 2.0, dtype=torch.float64)
    )


@wrong("gradient", "shape", "x", "expected: [3, 4], or a shape to which it was broadcast")
def wrong_shape() -> Any:
    return square("wrong_shape").gradients(x=lambda grad, x: (2 * grad * x)[:, 1:])


@wrong("gradient", "nan", "x", "at [1] it is nan where")
def nan_at_zero() -> Any:
    @opsmith.operator("wrong::nan_at_zero")
    def magnitude(x: Tensor) -> Tensor:
        return x.abs()

    magnitude.samples(lambda make: [(torch.tensor([-1.5, 0.0, 2.0]),)])
    return magnitude.gradients(x=lambda grad, x: grad * x / x.abs())


@wrong("gradient", "sign", "weight", "it is the complex conjugate of the right tensor")
def not_conjugated() -> Any:
    @opsmith.operator("wrong::not_conjugated")
    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @multiply.samples
    def _(make: Any) -> Any:
        yield torch.complex(make(3), make(3)), torch.complex(make(3), make(3))

    # With a real gradient coming in, only the conjugate is missing.
    return multiply.gradients(
        x=lambda grad, weight: grad * weight.conj(), weight=lambda grad, x: grad.conj() * x
    )


@wrong("gradient", "scale", "x", "The reference hides a dependence from autograd")
def reference_detaches() -> Any:
    @opsmith.operator("wrong::reference_detaches")
    def square(x: Tensor) -> Tensor:
        return x * x.detach()

    square.samples(lambda make: [(make(3),)])
    return square


@wrong("gradient", "scale", "x", "autograd through the reference gives a gradient of `x` that differs from")
def formula_is_right_and_the_reference_is_not() -> Any:
    @opsmith.operator("wrong::formula_is_right")
    def square(x: Tensor) -> Tensor:
        return x * x.detach()

    square.samples(lambda make: [(make(3),)])
    return square.gradients(x=lambda grad, x: 2 * grad * x)


@wrong("gradient", "not-exercised", "bias", "expected a floating tensor in at least one sample, got None")
def never_exercised() -> Any:
    operator = linear("never_exercised")
    operator.samples(lambda make: [(make(3, 3), make(3, 3))])
    return operator


@wrong("gradient", "region", "x", "it is wrong at [7, 5], and nowhere else; it is 3/2 times")
def one_element_of_many() -> Any:
    def nearly(grad: Tensor, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        mask[7, 5] = 1.5
        return 2 * x * grad * mask

    return square("one_element_of_many", (12, 12)).gradients(x=nearly)


@wrong("gradient", "missing-term", "x", "it lacks the grad_output of `z`")
def forgets_a_result() -> Any:
    @opsmith.operator("wrong::forgets_a_result", results=("y", "z"))
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * x

    both.samples(lambda make: [(make(4),)])
    return both.gradients(x=lambda grad_y: 2 * grad_y)


@wrong("gradient", "sign", "x", "it is the right tensor times -1")
def opaque_formula() -> Any:
    @opsmith.operator("wrong::opaque_formula", opaque=True)
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().numpy()))

    sine.fake(lambda x: torch.empty_like(x))
    sine.samples(lambda make: [(make(4),)])
    return sine.gradients(x=lambda grad, x: -grad * x.cos())


@wrong("second_order", "second-order", "x", "torch cannot see that the gradient of `x` depends on `grad`")
def graph_cut() -> Any:
    return square("graph_cut").gradients(
        x=lambda grad, x: torch.from_numpy(2 * grad.detach().numpy() * x.detach().numpy())
    )


@wrong(
    "second_order",
    "second-order",
    "x",
    "the derivative of the gradient of `x` is wrong: it lacks the part that flows through `x`",
)
def detached_in_the_formula() -> Any:
    return square("detached_in_the_formula").gradients(x=lambda grad, x: 2 * grad * x.detach())


@wrong("forward_mode", "sign", "x", "the tangent of `result` by `x` differs from finite differences")
def forward_mode_follows_the_formula() -> Any:
    return square("forward_mode_sign").gradients(x=lambda grad, x: -2 * grad * x)


@wrong("forward_mode", "forward-mode", "x", "times 2; reverse mode is right")
def tangent_by_two() -> Any:
    return square("tangent_by_two").tangents(result=lambda x, tangent_x: 4 * x * tangent_x)


@wrong(
    "forward_mode",
    "forward-mode",
    "x",
    "the derivative of the tangent by `x` differs from finite differences",
)
def tangent_with_a_cut() -> Any:
    def formula(x: Any, tangent_x: Any) -> Any:
        return 2 * x.detach() * tangent_x

    return square("tangent_with_a_cut").tangents(result=formula)


@wrong("second_order", "second-order", "x", "it lacks the part that flows through `weight`")
def one_factor_by_numpy() -> Any:
    operator = linear("one_factor_by_numpy")
    return operator.gradients(x=lambda grad, weight: grad @ torch.from_numpy(weight.detach().numpy()))


@wrong("second_order", "second-order", "x", "differentiated by `x` differs from finite differences of it")
def part_of_the_second_order() -> Any:
    @opsmith.operator("wrong::part_of_the_second_order")
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.samples(lambda make: [(make(3, 4),)])
    return cube.gradients(x=lambda grad, x: 3 * grad * x * x.detach())


@wrong("forward_mode", "forward-mode", "y", "the tangent of `result` by `y` differs from finite differences")
def tangent_of_one_input() -> Any:
    @opsmith.operator("wrong::tangent_of_one_input")
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    product.samples(lambda make: [(make(3, 4), make(4))])
    return product.tangents(result=lambda x, y, tangent_x, tangent_y: tangent_x * y - x * tangent_y)


@wrong("values", "nan", "x", "the gradient of `x` is wrong where `x` is")
def overflows() -> Any:
    @opsmith.operator("wrong::overflows")
    def softplus(x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x)

    softplus.samples(lambda make: [(make(3, 4),)])
    return softplus.gradients(x=lambda grad, x: grad * x.exp() / (1 + x.exp()))


@wrong("values", "region", "x", "where `x` is -2.9")
def clamps_a_little_early() -> Any:
    @opsmith.operator("wrong::clamps_a_little_early")
    def clamped(x: Tensor) -> Tensor:
        return x.clamp(-3, 3)

    clamped.samples(lambda make: [(make(3, 4, low=-1.0, high=1.0),)])
    return clamped.gradients(x=lambda grad, x: grad * ((x > -2.9) & (x < 3)))


@wrong("values", "region", "x", "the gradient of `x` is wrong where `x` is 1: at [")
def wrong_at_one() -> Any:
    @opsmith.operator("wrong::wrong_at_one")
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.samples(lambda make: [(make(3, 4),)])
    return cube.gradients(x=lambda grad, x: 3 * grad * x * x * torch.where(x == 1, 2.0, 1.0).to(x))
