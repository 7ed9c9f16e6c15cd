"""The bounds on results: they follow from dtype, accumulation and conditioning, and let nothing else pass."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from opsmith.judging.answer import Answer, Computation, fan_in
from opsmith.judging.judge import judge
from opsmith.judging.tensors import perturbed

X = torch.rand(6, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4 - 2
W = torch.rand(5, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 4 - 2
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def truth(function: Callable[..., Tensor], *inputs: Tensor, dtype: torch.dtype) -> Answer:
    right = Computation.of(lambda flat: [function(*flat)], inputs, torch.Generator().manual_seed(0))
    return right.at([tensor.to(dtype) for tensor in inputs], dtype)[0]


@pytest.mark.parametrize(
    ("function", "inputs", "count"),
    [
        (torch.exp, (X,), 1),
        (torch.mul, (X, X), 2),
        (lambda x, w: x @ w.mT, (X, W), 80),
        (lambda x: x.sum(), (X,), 240),
        (lambda x: torch.softmax(x, -1), (X,), 40),
        (lambda x: torch.complex(x, x).sum(-1), (X,), 40),
        (lambda x: torch.complex(x, 2 * x).sum(-1).conj(), (X,), 40),
        (lambda x: (x > 0).to(x.dtype), (X,), 240),  # autograd cannot tell: the size of the input
    ],
    ids=["exp", "mul", "matmul", "sum", "softmax", "complex", "conjugate", "comparison"],
)
def test_how_many_elements_a_result_depends_on(function: Any, inputs: Any, count: int) -> None:
    assert fan_in(lambda flat: [function(*flat)], list(inputs), 0) == count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("function", "other"),
    [
        (lambda x, w: x @ w.mT, lambda x, w: (w.flip(1) @ x.flip(1).mT).mT),
        (lambda x, w: (x * w[:1]).sum(-1), lambda x, w: sum((x * w[:1]).unbind(-1))),
        (lambda x, w: torch.softmax(x, -1), lambda x, w: x.exp() / x.exp().sum(-1, keepdim=True)),
        (lambda x, w: x.square().mean(-1) - x.mean(-1).square(), lambda x, w: x.var(-1, correction=0)),
        (lambda x, w: (x * w[0]).exp(), lambda x, w: x.exp() ** w[0]),
    ],
    ids=["matmul", "running-sum", "softmax", "variance", "ill-conditioned-power"],
)
def test_the_same_mathematics_in_another_order_is_right(
    dtype: torch.dtype, function: Any, other: Any
) -> None:
    expected = truth(function, X, W, dtype=dtype)
    got = other(X.to(dtype), W.to(dtype))
    assert not judge(got, expected).wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_error_of_half_the_digits_is_wrong(dtype: torch.dtype) -> None:
    expected = truth(torch.exp, X, dtype=dtype)
    got = X.to(dtype).exp()
    got[3, 2] *= 1 + 2 * torch.finfo(dtype).eps ** 0.5
    difference = judge(got, expected).difference
    assert difference is not None
    assert difference.index == (3, 2)
    assert (difference.wrong, difference.total) == (1, 240)
    assert difference.units is not None
    assert difference.allowed is not None
    assert difference.units > difference.allowed


def test_a_sum_in_a_narrower_dtype_is_wrong() -> None:
    x = X.repeat(1, 20)
    expected = truth(lambda x: x.sum(-1), x, dtype=torch.float32)
    assert not judge(x.float().sum(-1), expected).wrong
    assert judge(x.to(torch.bfloat16).sum(-1).float(), expected).wrong


def test_cancellation_widens_the_bound_by_what_the_inputs_lose_and_no_more() -> None:
    near = torch.tensor([1.0], dtype=torch.float64)
    far = near + 2.0**-12
    expected = truth(lambda a, b: b - a, near, far, dtype=torch.float32)
    bound = next(each for each in expected.bounds() if each.term == "moves")
    lost = float(bound.unit / torch.finfo(torch.float32).eps)
    assert 0.5 < lost < 2  # a rounding of inputs near 1, not of the result near 2**-12


def test_what_overflows_in_the_reference_is_not_judged() -> None:
    x = torch.tensor([1.0, 200.0], dtype=torch.float64)
    expected = truth(lambda x: x * x - x, x, dtype=torch.float16)
    right = torch.tensor([0.0, 39800.0], dtype=torch.float16)
    assert not judge(right, expected).wrong
    expected = truth(lambda x: (x * 1000) / 1000, x, dtype=torch.float16)
    assert not judge(torch.tensor([1.0, 200.0], dtype=torch.float16), expected).wrong
    assert judge(torch.tensor([2.0, 200.0], dtype=torch.float16), expected).wrong


def test_an_infinity_that_the_dtype_makes_is_right_and_another_is_not() -> None:
    x = torch.tensor([1.0, 300.0], dtype=torch.float64)
    expected = truth(torch.square, x, dtype=torch.float16)
    assert not judge(torch.tensor([1.0, torch.inf], dtype=torch.float16), expected).wrong
    difference = judge(torch.tensor([torch.inf, torch.inf], dtype=torch.float16), expected).difference
    assert difference is not None
    assert difference.index == (0,)


def test_nan_is_right_where_the_truth_is_nan() -> None:
    x = torch.tensor([-1.0, 4.0], dtype=torch.float64)
    expected = truth(torch.sqrt, x, dtype=torch.float32)
    assert not judge(torch.tensor([torch.nan, 2.0]), expected).wrong
    assert judge(torch.tensor([0.0, 2.0]), expected).wrong
    assert judge(torch.tensor([torch.nan, torch.nan]), expected).wrong


def test_whole_numbers_may_be_those_of_either_precision() -> None:
    x = torch.tensor([[0.1, 0.1 + 1e-12]], dtype=torch.float64)
    expected = truth(lambda x: x.argmax(-1), x, dtype=torch.float32)
    assert not judge(torch.tensor([0]), expected).wrong
    difference = judge(torch.tensor([1]), expected).difference
    assert difference is not None
    assert str(difference) == "at [0] it is 1 where 0 is right"


def test_empty_results_are_right() -> None:
    expected = truth(torch.exp, torch.empty(0, 3, dtype=torch.float64), dtype=torch.float32)
    assert not judge(torch.empty(0, 3), expected).wrong


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_a_nudge_moves_every_number_by_its_part_and_no_other_value(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    value = torch.tensor([1.0, -3.0, 0.0, 1e-9], dtype=dtype)
    moved = perturbed(value, 16 * eps, torch.Generator().manual_seed(0))
    assert moved.dtype == dtype
    part = ((moved - value).abs() / value.abs().clamp_min(1e-30 if dtype != torch.bfloat16 else 1e-20)).real
    assert ((part >= 15 * eps) & (part <= 17 * eps)).tolist() == [True, True, False, True]
    assert torch.equal(perturbed(value, eps / 64, torch.Generator()), value)
    whole = torch.arange(3)
    assert perturbed(whole, 0.5, torch.Generator()) is whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_bound_holds_what_the_one_before_holds(dtype: torch.dtype) -> None:
    found = truth(lambda x: torch.softmax(x, -1), X, dtype=dtype)
    distances = [bound.distance for bound in found.bounds()]
    assert [bound.term for bound in found.bounds()] == ["library", "moves", "own error"]
    for smaller, larger in pairwise(distances):
        assert bool((smaller <= larger).all())


def test_a_right_result_measures_nothing() -> None:
    calls: list[torch.dtype] = []

    def double(x: Tensor) -> Tensor:
        calls.append(x.dtype)
        return 2 * x

    found = truth(double, X, dtype=torch.float64)
    assert judge(2 * X, found).kind == "equal"
    assert found.is_decided()
    assert calls == [torch.float64]
    assert judge(2.1 * X, found).wrong
    assert len(calls) > 10
