"""Right numbers in the wrong places: transposed, of another input, shifted, not summed; and near misses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diagnosed import diagnosed, random
from torch import Tensor

from opsmith.checking.diagnosis import Observation, diagnose


def square(x: Tensor) -> Tensor:
    return x * x


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.mT + bias


def matrix_product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def distance(x: Tensor, y: Tensor) -> Tensor:
    return (x - y * y).square().sum(-1)


def difference(x: Tensor) -> Tensor:
    return x[..., 1:] * x[..., 1:] - x[..., :-1]


def channels(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale[:, None, None]


def rows(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale[:, None]


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, :, None] * y[:, None, :]


def running_sum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def log_determinant(matrix: Tensor) -> Tensor:
    return torch.linalg.slogdet(matrix)[1]


def images(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.exp()


LINEAR = [
    (random(5, 4), random(4, 4, seed=4), random(4, seed=5)),
    (random(3, 2), random(3, 2, seed=4), random(3, seed=5)),
]
CUBES = [(random(3, 3, 3),), (random(2, 4, 5),)]
SQUARES = [(random(3, 4),), (random(5, 7),)]
TWO = [(random(3, 4), random(3, 4, seed=4)), (random(2, 5), random(2, 5, seed=4))]
IMAGES = [(random(2, 3, 4, 4), random(1, 3, 1, 1, seed=4)), (random(3, 2, 2, 5), random(1, 2, 1, 1, seed=4))]


UNREDUCED = "unreduced-broadcast"


def rolled(by: int, dim: int) -> Any:
    return lambda grad, x: (2 * x * grad).roll(by, dim)


def moved_with_zeros(grad: Tensor, x: Tensor) -> Tensor:
    right = 2 * x * grad
    return torch.cat([torch.zeros_like(right[:, :1]), right[:, :-1]], 1)


def moved_with_what_was_there(grad: Tensor, x: Tensor) -> Tensor:
    right = 2 * x * grad
    return torch.cat([right[:, :1], right[:, :-1]], 1)


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("reference", "samples", "about", "formula", "cause", "says"),
    [
        (
            linear,
            LINEAR[:1],
            "weight",
            lambda grad, x: x.mT @ grad,
            "transposed",
            "it is the transpose of the right tensor (relative error 0 after the exchange",
        ),
        (
            square,
            CUBES,
            "x",
            lambda grad, x: (2 * x * grad).transpose(0, 2).reshape(x.shape),
            "transposed",
            "dimensions 0 and 2 swapped",
        ),
        (
            square,
            CUBES[:1],
            "x",
            lambda grad, x: (2 * x * grad).permute(1, 2, 0),
            "transposed",
            "it has its dimensions in the order [1, 2, 0]",
        ),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: (2 * x * grad).mT.reshape(x.shape),
            "transposed",
            "it is laid out as if dimensions 0 and 1 were swapped",
        ),
        (
            matrix_product,
            [(random(3, 3), random(3, 3, seed=4))],
            "left",
            lambda grad, right: grad.mT @ right.mT,
            "transposed",
            "dimensions 0 and 1 of `result`'s gradient swapped",
        ),
        (
            log_determinant,
            [(random(3, 3) + 3 * torch.eye(3, dtype=torch.float64),)],
            "matrix",
            lambda grad, matrix: grad * matrix.inverse(),
            "transposed",
            "it is the transpose of the right tensor",
        ),
        (product, TWO, "x", lambda grad, x: grad * x, "swapped-inputs", "it is the right gradient of `y`"),
        (
            distance,
            TWO,
            "x",
            lambda grad, x, y: 2 * grad[:, None] * (y - x * x),
            "swapped-inputs",
            "it is right if `x` and `y` are exchanged",
        ),
        (
            both,
            SQUARES,
            "x",
            lambda grad_y, grad_z, x: grad_z * x.cos() + grad_y * x.exp(),
            "swapped-inputs",
            "the grad_outputs of `y` and `z` are exchanged",
        ),
        (square, SQUARES, "x", rolled(1, 1), "shifted", "by 1 along dimension 1, with wrap-around"),
        (square, SQUARES, "x", rolled(-1, 0), "shifted", "by -1 along dimension 0, with wrap-around"),
        (square, SQUARES, "x", rolled(2, 1), "shifted", "along dimension 1, with wrap-around"),
        (square, SQUARES, "x", moved_with_zeros, "shifted", "by 1 along dimension 1, with zeros at the edge"),
        (
            square,
            SQUARES,
            "x",
            moved_with_what_was_there,
            "shifted",
            "by 1 along dimension 1, with the right numbers at the edge",
        ),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: (2 * x * grad).flatten().roll(1).reshape(x.shape),
            "shifted",
            "by 1 in memory order",
        ),
        (
            square,
            CUBES,
            "x",
            lambda grad, x: (2 * x * grad).roll((1, -1), (1, 2)),
            "shifted",
            "by 1 along dimension 1 and by -1 along dimension 2",
        ),
        (
            running_sum,
            SQUARES,
            "x",
            lambda grad: grad.flip(-1).cumsum(-1).flip(-1) - grad,
            "shifted",
            "by -1 along dimension 1, with zeros at the edge",
        ),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: 2 * x * grad.roll(1, 1),
            "shifted",
            "it is right for the grad_output of `result` shifted by 1 along dimension 1",
        ),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: 2 * x.roll(1, 1) * grad,
            "shifted",
            "it is right for `x` shifted by 1 along dimension 1",
        ),
        (linear, LINEAR, "bias", lambda grad: grad[0], UNREDUCED, "it is the first of the 5 slices"),
        (linear, LINEAR, "bias", lambda grad: grad[-1], UNREDUCED, "it is the last of the 5 slices"),
        (
            rows,
            [(random(2, 4, 4), random(4, seed=4)), (random(3, 2, 2), random(2, seed=4))],
            "scale",
            lambda grad, x: (grad * x).sum((0, 1)),
            UNREDUCED,
            "it is summed over the wrong dimensions: `scale` was broadcast along "
            "dimensions 0 and 2, but autograd summed other dimensions, because the backward "
            "returned a gradient without the sum",
        ),
        (
            outer,
            [(random(2, 3), random(2, 4, seed=4)), (random(3, 2), random(3, 5, seed=4))],
            "y",
            lambda grad, x: (grad * x[:, :, None])[:, 0],
            UNREDUCED,
            "it is the first of the 3 slices that broadcasting `y` along dimension 1 made",
        ),
        (
            product,
            [(random(10, 5), random(seed=4)), (random(3, 4), random(seed=5))],
            "y",
            lambda grad, x: (grad * x)[0, 0],
            UNREDUCED,
            "it is the first of what broadcasting `y` along dimensions 0 and 1 made",
        ),
        (linear, LINEAR, "bias", lambda grad: grad.mean(0), "scale", "1 over the size of dimension 0"),
        (linear, LINEAR, "bias", lambda grad: grad[1:].sum(0), UNREDUCED, "it lacks the first of the 5"),
        (linear, LINEAR, "bias", lambda grad: grad[:-1].sum(0), UNREDUCED, "it lacks the last of the 5"),
        (
            images,
            IMAGES,
            "scale",
            lambda grad, x: (grad * x).sum((0, 3), keepdim=True)[:, :, :1],
            "unreduced-broadcast",
            "it is the first of the 4 slices that broadcasting `scale` along dimension 2 made",
        ),
        (
            images,
            IMAGES,
            "scale",
            lambda grad, x: (grad * x).sum((2, 3), keepdim=True).mean(0, keepdim=True),
            "scale",
            "it is the right tensor times 1/2",
        ),
    ],
)
def test_right_numbers_in_the_wrong_places(
    reference: Any, samples: Any, about: str, formula: Any, cause: str, says: str
) -> None:
    results = ("y", "z") if reference is both else None
    found = diagnosed(reference, samples, about, results, **{about: formula})
    assert (found.cause, says in found.reason) == (cause, True), found


def test_inputs_that_got_each_other_s_gradients_name_both() -> None:
    found = diagnosed(product, TWO, "x", x=lambda grad, x: grad * x, y=lambda grad, y: grad * y)
    assert (
        found.reason
        == "it is the right gradient of `y`, and the gradient of `y` is the right gradient of `x`"
    )


def test_two_numbers_are_told_apart_by_no_shift_unless_larger_tensors_show_it() -> None:
    x = random(3, 2)
    assert diagnose(Observation(x.roll(1, 1), x)).cause == "unknown"
    assert diagnosed(square, [(x,)], "x", x=rolled(1, 1)).cause == "shifted"


@pytest.mark.parametrize(
    ("reference", "samples", "about", "formula", "wrong"),
    [
        (square, SQUARES, "x", lambda grad, x: (2 * x * grad).flip(1), "shifted"),
        # A symmetric one is its own transpose.
        (
            log_determinant,
            [((lambda a: a @ a.mT + torch.eye(3, dtype=torch.float64))(random(3, 3)),)],
            "matrix",
            lambda grad, matrix: grad * (matrix.inverse() + 1),
            "transposed",
        ),
        # Half of two is as well a factor of one half.
        (
            linear,
            [(random(2, 4), random(4, 4, seed=4), random(4, seed=5))] * 2,
            "bias",
            lambda grad: 0.5 * grad.sum(0),
            "swapped-inputs",
        ),
        (product, TWO, "x", lambda grad, x, y: grad * (x + y), "swapped-inputs"),
        (linear, LINEAR, "bias", lambda grad: grad.amax(0), "unreduced-broadcast"),
        (square, SQUARES, "x", lambda grad, x: 2 * x * grad.roll(1, 1).roll(1, 0) + x, "shifted"),
    ],
)
def test_what_nearly_is_that_is_not_named_so(
    reference: Any, samples: Any, about: str, formula: Any, wrong: str
) -> None:
    found = diagnosed(reference, samples, about, **{about: formula})
    assert found.cause != wrong, found
    assert wrong not in found.also_fits, found
