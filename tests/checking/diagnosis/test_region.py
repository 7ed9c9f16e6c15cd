"""Right but for some elements: by their indices, by conditions; and where no words of ours tell them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diagnosed import diagnosed, random
from torch import Tensor

from opsmith.checking.diagnosis import Observation, diagnose
from opsmith.checking.diagnosis.detectors.region import element_rules


def square(x: Tensor) -> Tensor:
    return x * x


def relu(x: Tensor) -> Tensor:
    return x.clamp_min(0)


def clamped(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x * x, x)


def rows(table: Tensor, index: Tensor) -> Tensor:
    return table[index] * 2


def larger(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x, y)


def huber(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.huber_loss(x, y, reduction="none")


def cube(x: Tensor) -> Tensor:
    return x**3


def root(x: Tensor) -> Tensor:
    return x.abs().sqrt()


SQUARES = [(random(5, 6),), (random(7, 9),)]
PLANES = [(random(3, 4, 5),), (random(2, 6, 7),)]
TWO = [(random(4, 6), random(4, 6, seed=4)), (random(3, 5), random(3, 5, seed=4))]


def changed(place: Any, factor: float = 0.0) -> Any:
    """The right gradient of a square, times a factor in some elements."""

    def formula(grad: Tensor, x: Tensor) -> Tensor:
        right = 2 * x * grad
        mask = place(torch.zeros_like(right))
        return torch.where(mask, factor * right, right)

    return formula


def at(*index: Any) -> Any:
    def place(mask: Tensor) -> Tensor:
        mask[index] = 1
        return mask != 0

    return place


def beyond(multiple: int) -> Any:
    return at(slice(None), slice(4, None)) if multiple == 4 else at(slice(None), slice(8, None))


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("samples", "formula", "says"),
    [
        (SQUARES, changed(at(-1)), "in its last row, and nowhere else; it is zero there"),
        (SQUARES, changed(at(0)), "in its first row"),
        (SQUARES, changed(at(slice(None), 0), -1.0), "in its first column, and nowhere else; it is -1 times"),
        (SQUARES, changed(at(slice(None), -1)), "in its last column"),
        (SQUARES, changed(at(2)), "in row 2"),
        (SQUARES, changed(at(slice(1, None)), 2.0), "in all but the first row"),
        (SQUARES, changed(at(slice(None), slice(None, None, 2))), "in every 2nd column, from 0 on"),
        (SQUARES, changed(at(2, 3)), "at [2, 3]"),
        (SQUARES, changed(at(-1, -1)), "in its last row and its last column"),
        (SQUARES, changed(lambda mask: torch.ones_like(mask).triu(1) > 0), "above the diagonal"),
        (SQUARES, changed(lambda mask: torch.ones_like(mask).tril() > 0), "on and below the diagonal"),
        (
            SQUARES,
            changed(lambda mask: torch.eye(*mask.shape, dtype=mask.dtype) > 0),
            "on the diagonal",
        ),
        (
            [(random(3, 10),), (random(2, 14),), (random(2, 8),)],
            lambda grad, x: 2 * x * grad * (torch.arange(x.shape[1]) < x.shape[1] // 8 * 8),
            "in every column beyond the last multiple of 8",
        ),
        (
            [(random(3, 10),), (random(2, 14),)],
            lambda grad, x: 2 * x * grad * (torch.arange(x.shape[1]) < 8),
            "in every column from 8 on",
        ),
        (PLANES, changed(at(slice(None), 1)), "in index 1 of dimension 1"),
        (PLANES, changed(at(slice(None), -1, -1)), "the last index of dimension 1 and the last index of"),
        ([(random(9),), (random(11),)], changed(at(-1)), "in the last element"),
    ],
)
def test_a_region_of_indices_is_told(samples: Any, formula: Any, says: str) -> None:
    found = diagnosed(square, samples, "x", x=formula)
    assert (found.cause, says in found.reason) == ("region", True), found


MASKED = [(random(4, 5), random(4, 5, seed=8) > 0)]
INDICES = [(random(6, 2), torch.tensor([0, 2, 2, 5, 1, 2])), (random(4, 3), torch.tensor([0, 3, 3]))]


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("reference", "samples", "about", "formula", "says"),
    [
        (square, SQUARES, "x", lambda grad, x: 2 * x.abs() * grad, "where `x` is less than 0"),
        (square, SQUARES, "x", lambda grad, x: 2 * x.clamp(max=1) * grad, "where `x` is greater than 1"),
        (
            square,
            SQUARES,
            "x",
            lambda grad, x: 2 * x * grad * (x.abs() < 0.8),
            "where the size of `x` is greater than 0.8",
        ),
        (relu, SQUARES, "x", lambda grad, x: grad * (x > -0.5), "where `x` is between -0.5 and 0"),
        (relu, SQUARES, "x", lambda grad, x: grad, "where `x` is less than 0"),
        (
            clamped,
            [(random(6, 5), -0.7, 0.9)],
            "x",
            lambda grad, x, low: grad * (x > low),
            "where `x` is greater than `high`",
        ),
        (masked, MASKED, "x", lambda grad, x: 2 * x * grad, "where `mask` is False"),
        (masked, MASKED, "x", lambda grad: grad, "where `mask` is True"),
        (
            rows,
            INDICES,
            "table",
            lambda grad, table, index: torch.zeros_like(table).index_put((index,), 2 * grad),
            "where an index in `index` occurs more than once",
        ),
        (larger, TWO, "x", lambda grad: grad, "where `x` is less than `y`"),
        (
            huber,
            [(3 * random(5, 6), random(5, 6, seed=4))],
            "x",
            lambda grad, x, y: grad * (x - y),
            "where the size of the difference of `x` and `y` is greater than 1",
        ),
        (cube, SQUARES, "x", lambda grad, x: 3 * x * x.abs() * grad, "where `x` is less than 0"),
        (root, SQUARES, "x", lambda grad, x: 0.5 * x.abs().rsqrt() * grad, "where `x` is less than 0"),
    ],
)
def test_a_region_of_numbers_is_told(
    reference: Any, samples: Any, about: str, formula: Any, says: str
) -> None:
    found = diagnosed(reference, samples, about, **{about: formula})
    assert (found.cause, says in found.reason) == ("region", True), found


def test_elements_that_are_wrong_by_chance_are_no_region() -> None:
    generator = torch.Generator().manual_seed(5)

    def formula(grad: Tensor, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=generator) < 0.5
        return torch.where(mask, 2 * x * grad, x * grad)

    assert diagnosed(square, SQUARES, "x", x=formula).cause in ("unknown", "nonlinear-grad")


def test_a_condition_that_few_elements_bear_out_is_no_evidence() -> None:
    right = torch.tensor([1.0, 2.0, -3.0, 4.0], dtype=torch.float64)
    x = torch.tensor([0.3, 0.1, -0.2, 0.5], dtype=torch.float64)
    got = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert diagnose(Observation(got, right, argument="x", inputs={"x": x})).cause == "unknown"


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([(0, 0), (0, 1), (0, 2)], "in its first row"),
        ([(0, 1), (1, 1), (2, 1)], "in column 1"),
        ([(0, 0), (1, 1), (2, 2)], "on the diagonal"),
        ([(1, 1)], "at [1, 1]"),
        ([(0, 0), (2, 1)], "at [0, 0], [2, 1]"),
        ([(0, 1), (0, 2), (1, 1), (1, 2)], "in all but the last row and all but the first column"),
    ],
)
def test_a_set_of_elements_has_words(indices: list[tuple[int, int]], words: str) -> None:
    mask = torch.zeros(3, 3, dtype=torch.bool)
    for index in indices:
        mask[index] = True
    described = list(element_rules(mask))
    assert described[0].words == words
    assert all(torch.equal(each.at(mask.shape), mask) for each in described)
