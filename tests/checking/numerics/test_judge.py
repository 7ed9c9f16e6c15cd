"""One comparison: what each term of a bound explains, what none does, and what is left undecided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.numerics.low_precision import rounded_arguments
from opsmith.judging.answer import Answer, Combination, Computation, unknown
from opsmith.judging.judge import judge

X = torch.linspace(0.5, 3.0, 6, dtype=torch.float64) * 1.1


def answer(
    function: Callable[..., Tensor], *inputs: Tensor, dtype: torch.dtype = torch.float64, **options: Any
) -> Answer:
    generator = torch.Generator().manual_seed(0)
    computation = Computation.of(lambda flat: [function(*flat)], inputs, generator, **options)
    return computation.at([each.to(dtype) for each in inputs], dtype)[0]


def noisy(x: Tensor) -> Tensor:
    """The same number but for rounding: two products that cancel are rounded otherwise."""
    return x + (x * 1e6 * 1.1 - x * 1.1e6)


def test_the_same_numbers_are_equal_and_measure_nothing() -> None:
    assert judge(X.exp(), answer(torch.exp, X)).kind == "equal"


@pytest.mark.parametrize(
    ("function", "other", "inputs", "term"),
    [
        (torch.exp, lambda x: x.exp() * (1 + 2.0**-51), (X,), "library"),
        (lambda x: x * 1000 % 1.0, lambda x: (x * 1000 + 1e-13) % 1.0, (X + 0.1,), "moves"),
        (noisy, lambda x: x, (X,), "moves"),
    ],
    ids=["a library function", "what the arguments move", "its own rounding"],
)
def test_each_term_explains_its_own(function: Any, other: Any, inputs: tuple[Tensor, ...], term: str) -> None:
    verdict = judge(other(*inputs), answer(function, *inputs))
    assert (verdict.kind, verdict.term) == ("rounding", term)


def test_the_error_of_the_function_itself_in_float32_explains_as_large_a_one() -> None:
    small = torch.full((3,), 0.1, dtype=torch.float64)
    right = answer(lambda x: 1 - x.cos(), small, dtype=torch.float32)
    assert judge(2 * (small.float() / 2).sin() ** 2, right).kind == "rounding"
    assert judge(1 - small.float().cos(), right).kind == "rounding"
    assert judge(torch.full((3,), 5.05e-3), right).wrong


def saturated(x: Tensor) -> Tensor:
    return 1 - x.tanh() ** 2


def pole(x: Tensor) -> Tensor:
    return -1 / x**2


def test_terms_that_cancel_are_read_where_nothing_saturates_and_not_near_a_pole() -> None:
    far = torch.full((2,), 30.0, dtype=torch.float64)
    right = answer(saturated, far, usual=unknown)
    assert judge(torch.full_like(far, 1e-16), right).term == "terms"
    assert judge(torch.full_like(far, 1e-13), right).wrong
    at_a_pole = answer(pole, far, usual=unknown)
    assert judge(pole(far) * (1 + 1e-12), at_a_pole).wrong
    terms = at_a_pole.computation.terms[0] if at_a_pole.computation is not None else None
    assert terms is not None
    assert not terms.any()


def test_a_jump_excuses_no_more_than_half_of_the_digits() -> None:
    whole = torch.arange(1.0, 4.0, dtype=torch.float64)
    assert judge(whole.floor() + 1, answer(torch.floor, whole)).wrong
    assert judge(whole.float().floor() + 1, answer(torch.floor, whole, dtype=torch.float32)).wrong


def test_in_half_precision_a_jump_is_left_undecided_and_nothing_else() -> None:
    whole = torch.tensor([1.0, 2.5], dtype=torch.float64)
    right = answer(torch.floor, whole, dtype=torch.bfloat16)
    assert not judge(torch.tensor([0.0, 2.0], dtype=torch.bfloat16), right).wrong
    judged = right.judged()
    assert judged is not None
    assert judged.tolist() == [False, True]
    assert judge(torch.tensor([1.0, 1.0], dtype=torch.bfloat16), right).wrong
    assert right.is_decided()


def test_its_own_error_in_half_precision_excuses_nothing() -> None:
    def zeros_in_half(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 or x.dtype == torch.float32 else torch.zeros_like(x)

    assert judge(torch.zeros(6, dtype=torch.bfloat16), answer(zeros_in_half, X, dtype=torch.bfloat16)).wrong


def test_a_wrong_number_is_minor_where_half_of_the_digits_are_right() -> None:
    assert judge(X.exp() * (1 + 1e-9), answer(torch.exp, X)).minor
    assert not judge(X.exp() * (1 + 1e-6), answer(torch.exp, X)).minor


def test_a_combination_is_bounded_by_what_its_answers_round() -> None:
    one = answer(noisy, X)
    right = Combination(((2.0, one), (-1.0, one)), one)
    assert one.value is not None
    assert judge(one.value + 1e-10, right).kind == "rounding"
    assert judge(one.value + 1e-6, right).wrong
    assert judge(one.value + 1e-6, Combination(right.terms, one, 1e-5)).term == "tolerated"


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


def losing(size: float) -> type[Function]:
    """The right gradient, which loses digits by a difference of large numbers."""

    class Losing(Softmax):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            large = size * (1 + grad.abs())
            return (Softmax.backward(ctx, grad) + large) - large

    return Losing


@pytest.mark.parametrize("size", [1e6, 1e9])
def test_a_backward_that_loses_digits_is_not_excused_by_its_own_noise(size: float) -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (failure,) = opsmith.check(losing(size), samples=[(x,)], only=["gradient"], effort="quick").failures
    assert (failure.property, failure.input) == ("gradient", "x")
    assert "float64" in failure.dtypes
    assert not opsmith.check(Softmax, samples=[(x,)], only=["gradient"], effort="quick").failures


def cut(x: Tensor, bits: int) -> Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)


A, B = (torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        (lambda a, b: cut(a, 13) @ cut(b, 13), "TF32 (10 bits)"),
        (lambda a, b: a.bfloat16().float() @ b.bfloat16().float(), "bfloat16 (7 bits)"),
        (lambda a, b: (a @ b) * (1 + 2.0**-11), None),
        (lambda a, b: a.bfloat16().float() @ b, None),
        (lambda a, b: (cut(a, 13) @ cut(b, 13)) * 1.001, None),
    ],
    ids=["cut to TF32", "to bfloat16", "another factor", "one of two", "rounded and another factor"],
)
def test_arguments_that_are_rounded_to_few_bits_are_told(kernel: Any, found: str | None) -> None:
    right = answer(torch.matmul, A.double(), B.double(), dtype=torch.float32)
    assert judge(kernel(A, B), right).wrong
    assert rounded_arguments(kernel(A, B), right, [A, B]) == found


def rounding_kernel(name: str, kernel: Any) -> opsmith.Report:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    operator = opsmith.operator(f"judge::{name}")(matmul)
    operator.kernel("cpu", kernel, dtypes=[torch.float32])
    return opsmith.check(operator, samples=[(A, B)], only=["forward"], effort="quick")


def test_a_kernel_for_tf32_is_a_warning_and_one_that_is_wrong_an_error() -> None:
    (failure, *_) = rounding_kernel("tf32", lambda a, b: cut(a, 13) @ cut(b, 13)).failures
    assert (failure.severity, failure.cause) == ("warning", "precision")
    assert "it is right for arguments that are rounded to TF32 (10 bits)" in failure.message
    (failure, *_) = rounding_kernel("off", lambda a, b: (a @ b) * 1.01).failures
    assert (failure.severity, failure.cause) == ("error", "kernel-mismatch")


def quotient(name: str, factor: float, at_zero: float = 0.0) -> opsmith.Report:
    """The report on `x / y` with a zero in `y`, by formulas that are off by a factor, or nan elsewhere."""

    def divide(x: Tensor, y: Tensor) -> Tensor:
        return x / y

    operator = opsmith.operator(f"judge::{name}")(divide)
    if factor:
        operator.gradients(
            x=lambda grad, y: grad / y + at_zero * (y == 1).to(y.dtype),
            y=lambda grad, x, y: -factor * grad * x / y**2,
        )
    y = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    return opsmith.check(operator, samples=[(y + 1, y)], only=["gradient"], effort="quick")


@pytest.mark.parametrize("factor", [0.0, 1.0], ids=["derived", "by formulas"])
def test_a_gradient_may_be_nan_beside_an_infinite_result_where_the_reference_s_is(factor: float) -> None:
    assert not quotient(f"quotient_{factor:g}", factor).failures


def test_beside_an_infinite_result_the_other_elements_are_judged() -> None:
    (failure,) = quotient("quotient_off", 1.01).failures
    assert (failure.input, failure.cause) == ("y", "scale")
    (failure,) = quotient("quotient_nan", 1.0, at_zero=torch.nan).failures
    assert (failure.input, failure.cause) == ("x", "nan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_float32_has_lost_half_of_the_digits_half_precision_decides_nothing(dtype: torch.dtype) -> None:
    small, zeros = 1e-3 * X, torch.zeros_like(X).to(dtype)
    assert judge(zeros, answer(lambda x: 1 - x.cos(), small, dtype=dtype)).kind == "undecided"
    assert judge(zeros, answer(lambda x: x * x / 2, small, dtype=dtype)).kind == "wrong"


def nearest(x: Tensor) -> Tensor:
    """Each row of `x` by the nearest of some codes, whose distances cancel."""
    codes = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x.dtype)
    distances = (x * x).sum(-1, keepdim=True) + (codes * codes).sum(-1) - 2 * x @ codes.T
    return codes[distances.argmin(-1)]


def in_steps(x: Tensor) -> Tensor:
    """`x` in seven steps of its largest number, as of a quantiser that scales."""
    step = x.abs().amax(-1, keepdim=True) / 7
    return (x / step).round() * step


def gated(x: Tensor) -> Tensor:
    """The rows of `x` whose score is above the mean, and zeros for the others."""
    score = x.square().mean(-1, keepdim=True)
    return torch.where(score > score.mean(), x, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [nearest, in_steps, gated])
def test_in_half_precision_a_jump_within_a_few_roundings_is_left_undecided(
    function: Any, dtype: torch.dtype
) -> None:
    for seed in range(8):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        right = answer(function, x, dtype=dtype)
        own = function(x.to(dtype))
        assert not judge(own, right).wrong
        judged = right.judged()
        assert judged is not None
        off = torch.where(judged, own + 0.5, own)
        assert judge(off, right).wrong  # and what does not jump is decided


@pytest.mark.parametrize("function", [torch.sin, lambda x: x**6, lambda x: x.sort(-1).values, torch.relu])
def test_in_half_precision_a_smooth_function_is_decided_in_every_element(function: Any) -> None:
    judged = answer(function, torch.linspace(-2, 2, 64, dtype=torch.float64), dtype=torch.bfloat16).judged()
    assert judged is not None
    assert judged.all()
