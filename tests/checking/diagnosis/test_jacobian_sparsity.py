"""A gradient that lacks entries of the Jacobian, or has a factor for each index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diagnosed import diagnosed, observation, operator, random
from torch import Tensor

from opsmith.checking.diagnosis.detectors.missing_term import jacobian_sparsity
from opsmith.checking.diagnosis.detectors.scale import per_index_scale
from opsmith.checking.diagnosis.observation import Evidence


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def of_rows(x: Tensor) -> Tensor:
    return torch.softmax(x, 0)


def attended(score: Tensor, value: Tensor) -> Tensor:
    mask = torch.ones(score.shape[-1], score.shape[-1], dtype=torch.bool).triu(1)
    return torch.softmax(score.masked_fill(mask, float("-inf")), -1) @ value


def running(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def smoothed(x: Tensor) -> Tensor:
    return 0.5 * x[:, :-2] + 0.3 * x[:, 1:-1] + 0.2 * x[:, 2:]


def grouped(x: Tensor, index: Tensor) -> Tensor:
    return x.new_zeros(4, x.shape[1]).index_add(0, index, x)


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


def cubed(x: Tensor) -> Tensor:
    return x**3


ROWS = [(random(3, 5),), (random(4, 6, seed=4),)]
SCORES = [(random(4, 4), random(4, 3, seed=4))]
GROUPS = [(random(5, 3), torch.tensor([0, 2, 2, 3, 2]))]
TABLE = [(random(6, 3), torch.tensor([[0, 2, 2], [5, 2, 0]]))]


def of_its_own(grad: Tensor, x: Tensor) -> Tensor:
    y = torch.softmax(x, -1)
    return grad * y * (1 - y)


def of_its_own_in_columns(grad: Tensor, x: Tensor) -> Tensor:
    y = torch.softmax(x, 0)
    return grad * y * (1 - y)


def of_the_others(grad: Tensor, x: Tensor) -> Tensor:
    y = torch.softmax(x, -1)
    return y * (grad - (grad * y).sum(-1, keepdim=True)) - grad * y * (1 - y)


def of_those_before(grad: Tensor, score: Tensor) -> Tensor:
    return attended_by(score).tril(-1).mT @ grad


def attended_by(score: Tensor) -> Tensor:
    mask = torch.ones(score.shape[-1], score.shape[-1], dtype=torch.bool).triu(1)
    return torch.softmax(score.masked_fill(mask, float("-inf")), -1)


def of_those_after(grad: Tensor) -> Tensor:
    return grad.flip(-1).cumsum(-1).flip(-1) - grad


def of_its_own_of_a_sum(grad: Tensor) -> Tensor:
    return grad


def without_the_middle(grad: Tensor, x: Tensor) -> Tensor:
    by_x = torch.zeros_like(x)
    by_x[:, :-2] += 0.5 * grad
    by_x[:, 2:] += 0.2 * grad
    return by_x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "samples", "about", "formula", "says"),
    [
        (
            softmax,
            ROWS,
            "x",
            of_its_own,
            "the grad_output of the other elements along dimension 1 is missing",
        ),
        (
            of_rows,
            ROWS,
            "x",
            of_its_own_in_columns,
            "the grad_output of the other elements along dimension 0 is missing",
        ),
        (softmax, ROWS, "x", of_the_others, "it lacks the grad_output of the same element of the result"),
        (attended, SCORES, "value", of_those_before, "it lacks the grad_output of the same element"),
        (running, ROWS, "x", of_those_after, "it lacks the grad_output of the same element of the result"),
        (running, ROWS, "x", of_its_own_of_a_sum, "it has only the grad_output of the same element"),
        (smoothed, ROWS, "x", without_the_middle, "the grad_output 1 before its own index, of dimension 1"),
    ],
)
def test_what_comes_in_for_some_elements_is_missing(
    reference: Any, samples: Any, about: str, formula: Any, says: str
) -> None:
    seen = Evidence(observation(operator(reference, samples, **{about: formula}), about))
    found = seen.first_fitting(jacobian_sparsity(seen))
    assert found is not None
    assert (found.cause, says in found.reason) == ("missing-term", True), found
    diagnosis = diagnosed(reference, samples, about, **{about: formula})
    earlier = {of_those_after: "shifted", of_its_own_of_a_sum: "region", without_the_middle: "region"}
    assert diagnosis.cause == earlier.get(formula, "missing-term"), diagnosis


@pytest.mark.parametrize(
    ("reference", "formula"),
    [
        (softmax, lambda grad, x: torch.func.vjp(softmax, x)[1](grad)[0]),
        (softmax, lambda grad, x: grad * torch.softmax(x, -1)),
        (softmax, lambda grad, x: (torch.func.vjp(softmax, x)[1](grad)[0] + of_its_own(grad, x)) / 2),
        (running, lambda grad: grad.cumsum(-1)),
        (cubed, lambda grad, x: grad * x * x),
    ],
    ids=["right", "another weight", "half of the others", "the other way", "elementwise"],
)
def test_other_weights_are_no_missing_ones(reference: Any, formula: Any) -> None:
    seen = Evidence(observation(operator(reference, ROWS, x=formula), "x"))
    assert seen.first_fitting(jacobian_sparsity(seen)) is None


def over_each(grad: Tensor, index: Tensor) -> Tensor:
    return (grad / index.bincount(minlength=4).clamp(min=1)[:, None])[index]


def over_each_row(grad: Tensor, table: Tensor, index: Tensor) -> Tensor:
    count = index.flatten().bincount(minlength=table.shape[0]).clamp(min=1)
    return torch.zeros_like(table).index_put((index,), grad, accumulate=True) / count[:, None]


WINDOW = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("reference", "samples", "about", "formula", "says"),
    [
        (
            grouped,
            GROUPS,
            "x",
            over_each,
            "of dimension 0: 1 over the number of times that the entry of `index` at this index occurs",
        ),
        (
            looked_up,
            TABLE,
            "table",
            over_each_row,
            "of dimension 0: 1 over the number of times that the index occurs in `index`",
        ),
        (
            cubed,
            ROWS[:1],
            "x",
            lambda grad, x: 3 * grad * x * x * WINDOW,
            "1/2, 3/4, 1, 5/4, 3/2; the factors are the same on",
        ),
    ],
)
def test_a_factor_for_each_index_is_named(
    reference: Any, samples: Any, about: str, formula: Any, says: str
) -> None:
    found = diagnosed(reference, samples, about, **{about: formula})
    assert (found.cause, says in found.reason) == ("scale", True), found


@pytest.mark.parametrize(
    "formula",
    [
        lambda grad, x: 3 * grad * x * x,
        lambda grad, x: 6 * grad * x * x,
        lambda grad, x: 3 * grad * x * x / x.norm(dim=-1, keepdim=True),
        lambda grad, x: 3 * grad * x,
        lambda grad, x: grad * WINDOW,
    ],
    ids=["right", "one factor", "of the numbers", "another power", "not of the right one"],
)
def test_factors_that_change_or_are_all_one_are_not_named(formula: Any) -> None:
    seen = Evidence(observation(operator(cubed, ROWS[:1], x=formula), "x"))
    assert seen.first_fitting(per_index_scale(seen)) is None


def test_a_wrong_row_is_a_region_and_no_factor_for_each() -> None:
    def doubled(grad: Tensor, x: Tensor) -> Tensor:
        right = 3 * grad * x * x
        return torch.cat([right[:-1], 2 * right[-1:]])

    assert diagnosed(cubed, ROWS, "x", x=doubled).cause == "region"
