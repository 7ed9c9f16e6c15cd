"""Detectors that explain every element at once: nan, rounding, a sign, a factor; and near misses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diagnosed import diagnosed, random
from torch import Tensor


def square(x: Tensor) -> Tensor:
    return x * x


def scaled(x: Tensor, alpha: float) -> Tensor:
    return alpha * x * x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


def mean(x: Tensor) -> Tensor:
    return x.mean()


def row_means(x: Tensor) -> Tensor:
    return x.mean(-1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def normalised(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def magnitude(x: Tensor) -> Tensor:
    return x.abs()


def logarithm(x: Tensor) -> Tensor:
    return x.log()


SQUARES = [(random(3, 4),), (random(5, 2),)]
LINEAR = [(random(5, 3), random(4, 3, seed=4)), (random(2, 6), random(3, 6, seed=4))]
COMPLEX = [(random(3, dtype=torch.complex128), random(3, seed=4, dtype=torch.complex128))]


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("reference", "samples", "about", "formula", "cause", "says"),
    [
        (square, SQUARES, "x", lambda grad: torch.zeros_like(grad), "missing-gradient", "zero everywhere"),
        (linear, LINEAR, "weight", lambda grad, weight: 0 * weight, "missing-gradient", "zero everywhere"),
        (square, SQUARES, "x", lambda grad, x: 2 * x * grad / 0, "nan", "it is infinite everywhere"),
        (
            logarithm,
            [(random(4, 5).abs(),)],
            "x",
            lambda grad, x: grad / x + (x - 1).clamp_max(0).sqrt() * 0,
            "nan",
            "in 17 of 20 elements, where `x` is less than 1",
        ),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: (2 * x.float() * grad.float()).double(),
            "precision",
            "it consists of float32 numbers, so it was computed in float32",
        ),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: 2 * x.bfloat16().double() * grad,
            "precision",
            "its error looks like bfloat16 rounding",
        ),
        (
            normalised,
            SQUARES,
            "x",
            lambda grad, x: torch.func.vjp(normalised, x.float().double())[1](grad)[0],
            "precision",
            "its error looks like float32 rounding",
        ),
        (
            linear,
            LINEAR,
            "weight",
            lambda grad, x: -(grad.mT @ x),
            "sign",
            "the right tensor times -1",
        ),
        (mean, SQUARES, "x", lambda grad, x: (-grad / x.numel()).expand(x.shape), "sign", "times -1"),
        (
            product,
            COMPLEX,
            "weight",
            lambda grad, x: grad.conj() * x,
            "sign",
            "it is the complex conjugate of the right tensor",
        ),
        (
            product,
            COMPLEX,
            "weight",
            lambda grad, x: -grad.conj() * x,
            "sign",
            "it is minus the complex conjugate",
        ),
        (product, COMPLEX, "weight", lambda grad, x: grad * x, "sign", "it lacks a conjugate"),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: grad * x,
            "scale",
            "the right tensor times 1/2",
        ),
        (square, SQUARES, "x", lambda grad, x: 6 * grad * x, "scale", "the right tensor times 3"),
        (square, SQUARES, "x", lambda grad, x: -4 * grad * x, "scale", "the right tensor times -2"),
        (square, SQUARES, "x", lambda grad, x: 2 * math.pi * grad * x, "scale", "the right tensor times pi"),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: 2 * 1.2345 * grad * x,
            "scale",
            "the right tensor times 1.2345",
        ),
        (
            mean,
            SQUARES,
            "x",
            lambda grad, x: grad.expand(x.shape),
            "scale",
            "times 12, which is the number of elements of `x`",
        ),
        (
            row_means,
            SQUARES,
            "x",
            lambda grad, x: grad[:, None].expand(x.shape) / x.shape[-1] ** 2,
            "scale",
            "times 1/4, which is 1 over the size of dimension 1 of `x`",
        ),
        (
            linear,
            LINEAR,
            "weight",
            lambda grad, x: grad.mT @ x / math.sqrt(x.shape[-1]),
            "scale",
            "which is 1 over the square root of the size of dimension 1 of `weight`",
        ),
        (
            scaled,
            [(random(3, 4), 1.7)],
            "x",
            lambda grad, x, alpha: 2 * x * grad,
            "scale",
            "which is 1 over `alpha`",
        ),
        (
            scaled,
            [(random(3, 4), 1.7)],
            "x",
            lambda grad, x, alpha: 2 * alpha**2 * x * grad,
            "scale",
            "times 1.7, which is `alpha`",
        ),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: 2 * x * grad * x.sum(),
            "scale",
            "a factor that depends on the inputs",
        ),
    ],
)
def test_what_explains_all_is_named(
    reference: Any, samples: Any, about: str, formula: Any, cause: str, says: str
) -> None:
    found = diagnosed(reference, samples, about, **{about: formula})
    assert (found.cause, says in found.reason) == (cause, True), found


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (lambda grad, x: 2 * x * grad + 0.1, "plus the same number everywhere"),
        (lambda grad, x: 2 * x * grad * (1 + 0.1 * x), "it is roughly proportional to the right tensor"),
        (lambda grad, x: -2 * x * grad * (1 + 1e-3 * x), "by up to 2"),
        (lambda grad, x: grad, "divided by `x`, and multiplied by 1/2"),
        (lambda grad, x: 2 * x * grad * x, "multiplied by `x`"),
        (lambda grad, x: (2 * x * grad).flip(1), "in the reverse order along dimension 1"),
    ],
)
def test_what_only_nearly_explains_it_is_unknown(formula: Any, words: str) -> None:
    found = diagnosed(square, SQUARES, "x", x=formula)
    assert found.cause in ("unknown", "nonlinear-grad"), found
    assert words in found.reason or found.cause == "nonlinear-grad", found


def test_a_gradient_where_the_right_one_is_zero_hints_at_surrogates() -> None:
    def rounded(x: Tensor) -> Tensor:
        return x.round()

    found = diagnosed(rounded, SQUARES, "x", x=lambda grad, x: grad * 1)
    assert found.cause == "unknown"
    assert found.reason.startswith(
        "the right gradient is zero, because the results do not change with the input"
    )


def test_a_factor_of_two_in_one_sample_alone_is_not_told_from_a_size() -> None:
    found = diagnosed(row_means, [(random(3, 2),)], "x", x=lambda grad, x: grad[:, None].expand(x.shape))
    assert found.cause == "scale"
    assert "size of dimension 1 of `x`" in found.reason


def reversal(x: Tensor, strength: float) -> Tensor:
    return x.clone()


def test_a_factor_that_is_minus_one_by_chance_is_named_by_what_it_is() -> None:
    found = diagnosed(reversal, [(random(3, 4), 1.0)], "x", x=lambda grad, strength: -strength * grad)
    assert found.cause == "scale"
    assert found.reason == "it is the right tensor times -1, which is minus `strength`"
    assert diagnosed(reversal, [(random(3, 4), 1.0)], "x", x=lambda grad: -grad).cause == "sign"


def test_a_half_is_no_function_of_sizes() -> None:
    found = diagnosed(square, [(random(3, 4),)], "x", x=lambda grad, x: grad * x)
    assert found.reason == "it is the right tensor times 1/2"


def test_one_number_is_no_multiple_of_another_unless_fresh_inputs_say_so() -> None:
    one = [(random(1),)]
    assert diagnosed(square, one, "x", x=lambda grad, x: 2 * x * x.exp() * grad).cause == "unknown"
    assert diagnosed(square, one, "x", x=lambda grad, x: 3 * x * grad).cause == "scale"


def test_a_small_slope_is_no_rounding() -> None:
    found = diagnosed(normalised, SQUARES, "x", x=lambda grad, x: torch.func.vjp(_with_eps, x)[1](grad)[0])
    assert found.cause == "unknown", found


def _with_eps(x: Tensor) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + 1e-7).sqrt()


def test_a_linear_gradient_of_few_digits_is_right_for_rounding() -> None:
    found = diagnosed(square, [(torch.tensor([1.0, 2.0, 3.0]),)], "x", x=lambda grad, x: 4 * x * grad)
    assert found.cause == "scale"


def splatted(centre: Tensor) -> Tensor:
    return torch.exp(-0.5 * (torch.arange(6, dtype=centre.dtype) - centre[:, None]).square()).sum(0)


def test_a_large_error_that_moves_with_its_inputs_is_no_rounding() -> None:
    def inside(grad: Tensor, centre: Tensor) -> Tensor:
        pixels = torch.arange(6, dtype=centre.dtype)
        offset = pixels - centre[:, None]
        kept = (pixels > 0) & (pixels < 5)
        return (grad * kept * torch.exp(-0.5 * offset.square()) * offset).sum(-1)

    centre = torch.tensor([4.85, 3.54, 2.3], dtype=torch.float64)
    found = diagnosed(splatted, [(centre,)], "centre", centre=inside)
    assert (found.cause, "precision" in found.also_fits) == ("missing-term", False), found
