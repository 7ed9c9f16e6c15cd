"""What a function computes in is measured: float32 only where it rounds to that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opsmith.judging.answer import Computation
from opsmith.judging.judge import judge
from opsmith.judging.working_precision import working_precision

SEEDS = range(20)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


X, W = drawn(3, 4), drawn(4)
ONES = torch.ones(3, 4, dtype=torch.float64)
PLACES = torch.arange(8, dtype=torch.float64)
HILBERT = 1 / (PLACES[:, None] + PLACES + 1)


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


IN_FLOAT32: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a cast": (lambda x: x.float().double(), (X,)),
    "of one element": (lambda x: x.float().exp().double(), (X[:1, :1],)),
    "a product": (lambda x, w: x.float().mul(w.float()).double(), (X, W)),
    "a sum": (lambda x: x.float().sum().double(), (X,)),
    "beside float64": (lambda x, w: w * normalised(x.float()).double(), (X, W)),
    "returned in float32": (lambda x, w: x.softmax(-1, dtype=torch.float32) @ w.float(), (X, W)),
    "complex": (lambda x: torch.polar(ONES.float(), x.float()).to(torch.complex128), (X,)),
    "one of two results": (lambda x: (x.exp(), x.float().exp().double()), (X,)),
}
IN_FLOAT64: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "exp": (torch.exp, (X,)),
    "steep": (lambda x: (1e4 * x).sin(), (X,)),
    "too steep to tell": (lambda x: (1e6 * x).sin(), (X,)),
    "equal elements": (torch.maximum, (ONES, ONES.clone())),
    "the largest of equal elements": (lambda x: x.amax(-1), (ONES,)),
    "ill-conditioned": (torch.linalg.inv, (HILBERT,)),
    "saturated": (lambda x: (1000 * x).softmax(-1), (X,)),
    "whole numbers": (lambda x: (1000 * x).floor(), (X,)),
    "a constant in float32": (lambda x: x * torch.tensor(0.1).double(), (X,)),
    "cancellation": (lambda x: x.var(-1, correction=0), (1e6 + X,)),
    "a singularity": (lambda x: (x**2 - x**2 + 1e-30).sqrt(), (X,)),
    "in bfloat16, which is not measured": (lambda x, w: x.bfloat16().double() * w, (X, W)),
    "no floating result": (lambda x: x > 0, (X,)),
    "a shape of the numbers": (lambda x: x[x > 0], (X,)),
}


def dtypes(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> set[torch.dtype]:
    def results(flat: list[Any]) -> Any:
        found = function(*flat)
        return found if isinstance(found, tuple) else (found,)

    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    return {working_precision(results, inputs, generator) for generator in generators}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_computes_in_float32_is_told(name: str) -> None:
    assert dtypes(*IN_FLOAT32[name]) == {torch.float32}


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_what_computes_in_float64_is_told(name: str) -> None:
    assert dtypes(*IN_FLOAT64[name]) == {torch.float64}


def test_the_moves_of_each_element_are_its_rounding_error() -> None:
    generator = torch.Generator().manual_seed(0)
    right = Computation.of(lambda flat: [flat[0].float().exp().double(), flat[0] > 0], [X], generator)
    moves, none = right.moves(torch.float32)
    assert none is None
    assert moves is not None
    assert bool((moves <= 4 * X.exp() * (1 + X.abs())).all())
    assert bool((moves >= X.exp() / 64).all())


@pytest.mark.parametrize("off", [2.0**-23, 2.0**-13])
def test_a_bound_in_float64_is_that_of_float32_where_this_is_computed_in(off: float) -> None:
    right = Computation.of(lambda flat: [normalised(flat[0].float()).double()], [X], torch.Generator())
    (answer,) = right.at([X], torch.float64)
    assert answer.value is not None
    assert judge(answer.value * (1 + off), answer).wrong == (off > 2.0**-20)


def test_a_bound_in_float64_stays_what_it_is_for_what_computes_in_it() -> None:
    right = Computation.of(lambda flat: [normalised(flat[0])], [X], torch.Generator())
    (answer,) = right.at([X], torch.float64)
    assert answer.value is not None
    assert judge(answer.value * (1 + 2.0**-30), answer).wrong
