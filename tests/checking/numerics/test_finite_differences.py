"""Gradients from differences alone: as near the right one as their own error bound says, at any precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith.checking.numerics.directional import DirectionalFunction, slope
from opsmith.checking.numerics.finite_differences import NumericalGradient, numerical_gradient
from opsmith.checking.numerics.noise import Noise, noise_of

DOUBLE = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def incoming(result: Tensor) -> Tensor:
    dtype = torch.complex128 if result.is_complex() else DOUBLE
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


def numerical(
    function: Callable[[Tensor], Tensor], x: Tensor, *, elements: int = 2048, seed: int = 0
) -> tuple[NumericalGradient, Tensor]:
    grad = incoming(function(x))
    generator = torch.Generator().manual_seed(seed)
    found = numerical_gradient(
        lambda flat: [function(flat[0])], [x], 0, [grad], generator=generator, elements=elements
    )
    return found, grad


def through_autograd(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf, grad)
    return gradient


MATRIX = random(4, 5)
POSITIVE = MATRIX.abs() + 0.1
COMPLEX = torch.complex(MATRIX, MATRIX.flip(0))
NEARLY_SINGULAR = torch.cat([random(5, 6), (random(5, 6)[:1] + 1e-7 * random(1, 6, seed=1))])


def falling(x: Tensor) -> Tensor:
    """The nearest falling sequence: its blocks change along almost every direction."""
    count = len(x)

    def at(place: int) -> Tensor:
        means = [
            torch.stack([x[first : last + 1].mean() for last in range(place, count)])
            for first in range(place + 1)
        ]
        return torch.stack([each.max() for each in means]).min()

    return torch.stack([at(place) for place in range(count)])


@pytest.mark.slow
@pytest.mark.every(12)
@pytest.mark.parametrize("seed", range(12))
def test_what_bends_nearby_is_no_staircase(seed: int) -> None:
    """Quotients over coarse steps agree by chance, and differ from those over finer ones."""
    x = random(6, seed=seed % 3)
    found, grad = numerical(lambda x: x - falling(x), x, seed=seed)
    right = through_autograd(lambda x: x - falling(x), x, grad)
    assert found.judge(right) is None
    assert found.judge(grad) is not None  # as if the nearest sequence did not move


SMOOTH: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "exp": (torch.exp, MATRIX),
    "sin": (torch.sin, MATRIX),
    "sin_of_300": (lambda x: (300 * x).sin(), MATRIX),
    "cube": (lambda x: x**3, MATRIX),
    "softmax": (lambda x: x.softmax(-1), MATRIX),
    "layer_norm": (lambda x: torch.nn.functional.layer_norm(x, (5,)), MATRIX),
    "product": (lambda x: x.prod(), MATRIX),
    "lgamma": (torch.lgamma, POSITIVE),
    "tan_near_its_pole": (torch.tan, torch.tensor([1.5707, 1.57079, 0.1], dtype=DOUBLE)),
    "sqrt_near_0": (torch.sqrt, torch.tensor([1e-9, 1e-5, 1.0, 2.0], dtype=DOUBLE)),
    "log_near_0": (torch.log, torch.tensor([1e-9, 1e-5, 1.0, 2.0], dtype=DOUBLE)),
    "tiny_gradient": (lambda x: 1e-12 * x.sin(), MATRIX),
    "huge_gradient": (lambda x: 1e12 * x.sin(), MATRIX),
    "a_large_constant_beside_it": (lambda x: x.sin() + 1e8, MATRIX),
    "digits_lost_inside": (lambda x: (x + 1e8) - 1e8, MATRIX),
    "determinant": (torch.linalg.det, NEARLY_SINGULAR),
    "ill_conditioned_inverse": (torch.linalg.inv, NEARLY_SINGULAR),
    "elements_of_every_size": (torch.tanh, random(12) * torch.logspace(-9, 3, 12, dtype=DOUBLE)),
    "complex_multiply": (lambda z: z * COMPLEX.mT.reshape(4, 5), COMPLEX),
    "square_of_the_modulus": (lambda z: (z * z.conj()).real, COMPLEX),
    "modulus": (torch.abs, COMPLEX),
    "scalar": (torch.exp, torch.tensor(0.3, dtype=DOUBLE)),
    "masked_by_minus_infinity": (lambda x: x.masked_fill(x > 0, -torch.inf), MATRIX),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SMOOTH)
def test_the_error_bound_holds_and_is_small(name: str, seed: int) -> None:
    function, x = SMOOTH[name]
    found, grad = numerical(function, x, seed=seed)
    right = through_autograd(function, x, grad)
    off = torch.view_as_real(found.values - right) if right.is_complex() else found.values - right
    assert found.is_known.all()
    assert bool((off.abs() <= found.errors + found.rounding).all())
    assert float((found.errors + found.rounding).max()) < 1e-3 * float(right.abs().max())
    assert found.judge(right) is None
    assert not found.kinks.any()
    assert found.describe_unknown("x") is None
    assert found.along == ()


@pytest.mark.every(8)
@pytest.mark.parametrize("name", SMOOTH)
def test_one_element_that_is_a_little_wrong_is_found(name: str) -> None:
    function, x = SMOOTH[name]
    found, grad = numerical(function, x)
    wrong = through_autograd(function, x, grad).clone()
    largest = wrong.abs().argmax()
    index = tuple(int(i) for i in torch.unravel_index(largest, wrong.shape)) if wrong.dim() else ()
    wrong[index] *= 1.001
    difference = found.judge(wrong)
    assert difference is not None
    assert difference.wrong == 1
    assert difference.index == index
    assert difference.unit == "error bounds of finite differences"
    assert difference.units is not None
    assert difference.units > 1


ROUNDED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], torch.dtype]] = {
    "float32_inside": (lambda x: x.float().exp().double(), torch.exp, torch.float32),
    "float32_comes_out": (lambda x: x.float().exp(), torch.exp, torch.float32),
    "float32_factor": (lambda x: x * x.float().sigmoid(), lambda x: x * x.sigmoid(), torch.float32),
    "float16_inside": (lambda x: x.half().exp().double(), torch.exp, torch.float16),
    "bfloat16_inside": (lambda x: (x.bfloat16() * 2.296875).double(), lambda x: x * 2.296875, torch.bfloat16),
}


@pytest.mark.every(16)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ROUNDED)
def test_what_computes_in_less_is_held_to_less(name: str, seed: int) -> None:
    rounded, exact, dtype = ROUNDED[name]
    x = random(4, 6, seed=seed)
    found, grad = numerical(rounded, x, seed=seed)
    right = through_autograd(exact, x, grad)
    eps = torch.finfo(dtype).eps
    assert eps / 64 < found.second.noise.precision < eps * 4
    assert found.judge(right) is None
    assert found.judge(right.to(dtype)) is None
    wrong = right.clone()
    wrong[2, 3] *= -1
    assert found.judge(wrong) is not None
    assert found.judge(right * 1.5) is not None
    if dtype == torch.float32:
        assert found.judge(right * 1.01) is not None


def test_a_kink_takes_either_side_and_what_lies_between() -> None:
    x = torch.tensor([0.0, 1.0, -2.0], dtype=DOUBLE)
    for function, low, high in ((torch.relu, 0.0, 1.0), (torch.abs, -1.0, 1.0)):
        found, grad = numerical(function, x)
        right = through_autograd(function, x, grad)
        assert found.kinks.tolist() == [True, False, False]
        left, above = float(found.left[0]), float(found.right[0])
        assert (left, above) == pytest.approx((float(low * grad[0]), float(high * grad[0])))
        for answer in (low, (low + high) / 2, high):
            right[0] = answer * grad[0]
            assert found.judge(right) is None
        right[0] = (high + 0.2) * grad[0]
        difference = found.judge(right)
        assert difference is not None
        assert difference.index == (0,)
        assert found.describe_unknown("x") is None


def test_nan_at_a_kink_or_where_there_is_a_derivative_is_wrong() -> None:
    x = torch.tensor([0.0, 1.0], dtype=DOUBLE)
    found, grad = numerical(torch.abs, x)
    for index in range(2):
        got = grad.clone()
        got[index] = torch.nan
        difference = found.judge(got)
        assert difference is not None
        assert difference.index == (index,)


def test_at_a_jump_nothing_is_wrong() -> None:
    x = torch.tensor([0.5, 1.0, 2.0, -0.25, 0.3, -0.7], dtype=DOUBLE)
    found, _ = numerical(torch.floor, x)
    assert found.judge(torch.tensor([0.0, 5.0, -1.0, 0.0, 0.0, 0.0], dtype=DOUBLE)) is None
    assert found.judge(torch.tensor([0.0, 5.0, -1.0, 0.1, 0.0, 0.0], dtype=DOUBLE)) is not None


def test_what_cannot_be_told_is_said() -> None:
    found, _ = numerical(torch.sqrt, torch.tensor([0.0, 1.0, 2.0], dtype=DOUBLE))
    note = found.describe_unknown("x")
    assert note is not None
    assert note.startswith(
        "finite differences cannot determine 1 of 3 elements of the gradient of `x`: the function has a "
        "jump or an edge there, or noise that is larger than the derivative"
    )


def test_where_equal_elements_meet_an_answer_is_as_good_as_at_a_point_beside() -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0], [0.5, 0.1, -1.0, 0.7, 0.6]], dtype=DOUBLE)
    for function in (lambda x: x.sort(-1).values, lambda x: x.median(-1).values, lambda x: x.amax(-1)):
        found, grad = numerical(function, x)
        right = through_autograd(function, x, grad)
        assert found.judge(right) is None
        assert found.judge(2.5 * right) is not None


def test_the_slope_of_a_staircase_is_that_of_its_treads_as_well() -> None:
    x = 100 * random(4, 6)
    found, grad = numerical(lambda x: x.floor() + x.sin(), x)
    assert found.judge(grad * x.cos()) is None
    assert found.judge(grad * (x.cos() + 7)) is not None


def test_what_computes_in_half_precision_has_no_flat_treads() -> None:
    x = 100 * random(4, 6)
    found, _ = numerical(lambda x: x.bfloat16().sqrt().double(), x.abs())
    assert found.judge(None) is not None


@pytest.mark.parametrize(
    "function", [torch.sqrt, lambda x: x.abs().sqrt(), lambda x: 1 / x, lambda x: x.sign()]
)
def test_a_singularity_is_not_judged(function: Callable[[Tensor], Tensor]) -> None:
    found, _ = numerical(function, torch.tensor([0.0, 2.0], dtype=DOUBLE))
    assert found.is_known.tolist()[0] is False
    assert not found.wrong(torch.tensor([torch.inf, float(found.values[1])], dtype=DOUBLE)).any()


def test_a_derivative_with_a_kink_of_its_own_is_told() -> None:
    found, grad = numerical(lambda x: x * x.abs(), torch.tensor([0.0, 1.0, -2.0], dtype=DOUBLE))
    assert found.is_known.all()
    assert found.judge(grad * torch.tensor([0.0, 2.0, 4.0], dtype=DOUBLE)) is None
    assert found.judge(grad * torch.tensor([1e-3, 2.0, 4.0], dtype=DOUBLE)) is not None


def test_a_missing_gradient_stands_for_zeros() -> None:
    found, _ = numerical(torch.exp, MATRIX)
    difference = found.judge(None)
    assert difference is not None
    assert difference.got == 0
    assert numerical(lambda x: x.sign(), MATRIX)[0].judge(None) is None


def test_of_a_large_argument_some_elements_and_directions_stand_for_all() -> None:
    x = random(4000)
    found, grad = numerical(lambda x: (x * x.roll(1)).sum(), x, elements=200)
    right = through_autograd(lambda x: (x * x.roll(1)).sum(), x, grad)
    assert int(found.estimated.sum()) == 200
    assert bool(found.values.isfinite().equal(found.estimated))
    assert found.judge(right) is None
    assert found.judge(right * 1.01) is not None
    beside = right.clone()
    beside[~found.estimated] *= 1.01
    difference = found.judge(beside)
    assert difference is not None
    assert "along a random direction" in difference.unit
    assert len(found.along) == 8


ILL_CONDITIONED: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse": torch.linalg.inv,
    "inverse twice": lambda x: torch.linalg.matrix_power(torch.linalg.inv(x), 2),
    "one number": lambda x: 1 / torch.linalg.det(x),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("condition", [1e5, 1e6, 1e7])
@pytest.mark.parametrize("name", ILL_CONDITIONED)
def test_a_step_as_short_as_the_rounding_of_the_argument_is_not_trusted(name: str, condition: float) -> None:
    """Numbers near 1 move by whole roundings: along such a step, all of them by the same distance."""
    for seed in range(6):
        x = torch.ones(4, 4, dtype=DOUBLE) + random(4, 4, seed=seed) / condition
        found, grad = numerical(ILL_CONDITIONED[name], x, elements=1, seed=seed)
        right = through_autograd(ILL_CONDITIONED[name], x, grad)
        assert len(found.along) == 8
        assert found.judge(right) is None
        assert found.judge(1.01 * right) is not None


@pytest.mark.slow
def test_a_sum_of_many_elements_keeps_its_digits() -> None:
    found, grad = numerical(torch.sum, random(1500))
    assert found.judge(grad.expand(1500)) is None
    wrong = grad.repeat(1500)
    wrong[77] *= 1 + 1e-5
    difference = found.judge(wrong)
    assert difference is not None
    assert difference.index == (77,)


def test_several_results_are_weighed_by_their_gradients() -> None:
    x, grads = random(3), [random(3, seed=1), None, random(seed=2)]
    count = torch.tensor([1, 2])
    found = numerical_gradient(
        lambda flat: [flat[1].sin(), count, flat[1].prod()],
        ["words", x],
        1,
        [grads[0], None, grads[2]],
        generator=torch.Generator(),
    )
    assert grads[0] is not None
    assert grads[2] is not None
    assert found.judge(grads[0] * x.cos() + grads[2] * x.prod() / x) is None
    assert found.judge(grads[0] * x.cos()) is not None


def test_what_the_function_rejects_lies_outside_of_where_it_is_looked_at() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.min() < 1.0:
            raise ValueError("too small")
        return x**2

    x = torch.tensor([1.0, 3.0], dtype=DOUBLE)
    found, grad = numerical(picky, x)
    assert found.judge(2 * x * grad) is None
    assert found.is_known.tolist() == [False, True]
    assert float(found.right[0]) == pytest.approx(float(2 * grad[0]))
    with pytest.raises(ValueError, match="too small"):
        numerical(picky, x - 1)


def test_nothing_that_is_given_is_written_to_or_moved() -> None:
    x = random(3, 4).mT
    before = x.clone()
    seen: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        seen.append(x)
        return x.exp()

    numerical(function, x)
    assert torch.equal(x, before)
    assert len({each.data_ptr() for each in seen[:2]}) == 2
    assert not any(each.requires_grad for each in seen)


def test_an_empty_argument_has_an_empty_gradient() -> None:
    found, _ = numerical(torch.exp, random(0, 3))
    assert found.values.shape == (0, 3)
    assert found.judge(random(0, 3)) is None


def noise(function: Callable[[Tensor], Tensor], x: Tensor) -> Noise:
    line = DirectionalFunction(lambda flat: [function(flat[0])], [x], 0, [incoming(function(x))])
    return noise_of(line, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (torch.exp, 2.0**-54, 2.0**-51),
        (lambda x: (1000 * x).sin(), 2.0**-54, 2.0**-48),
        (lambda x: x.float().exp().double(), 2.0**-28, 2.0**-22),
        (lambda x: x.half().exp().double(), 2.0**-15, 2.0**-9),
        (lambda x: x.bfloat16().exp().double(), 2.0**-12, 2.0**-6),
        (lambda x: (x + 1e6) - 1e6, 2.0**-37, 2.0**-31),
    ],
)
def test_the_precision_that_a_function_computes_in_is_measured(
    function: Callable[[Tensor], Tensor], low: float, high: float
) -> None:
    assert low <= noise(function, random(50)).precision <= high


def test_a_slope_that_no_step_resolves_is_not_told() -> None:
    found = slope(
        lambda step: (step, 1.0 if step > 0 else 0.0), [2.0**-k for k in range(10)], 1e-16, 1.0, 1e-6
    )
    assert not found.is_known
    assert (found.left, math.isnan(found.right)) == (0.0, True)


def test_what_is_not_told_is_not_known() -> None:
    found, grad = numerical(torch.sqrt, torch.tensor([0.0, 4.0], dtype=DOUBLE))
    assert found.known.isnan().tolist() == [True, False]
    assert float(found.known[1]) == pytest.approx(float(grad[1]) / 4)
    found, _ = numerical(torch.abs, torch.tensor([0.0, 1.0], dtype=DOUBLE))
    assert found.known.isfinite().all()


@pytest.mark.parametrize(
    ("at_zero", "right"), [(0.0, True), (0.5, True), (1.0, True), (-1.0, False), (3.0, False)]
)
def test_at_a_kink_the_property_takes_what_lies_between_its_sides(at_zero: float, right: bool) -> None:
    class Rectify(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * torch.where(x == 0, at_zero, (x > 0).to(x.dtype))

    x = torch.tensor([[0.0, 1.0, -2.0], [0.5, 0.0, -0.25]])
    report = opsmith.check(Rectify, samples=[(x,)], only=["gradient"], effort="quick")
    assert (not report.failures) is right, str(report)


def test_a_gradient_that_differences_cannot_tell_is_not_passed_in_silence() -> None:
    @opsmith.operator("numerical::jumps", opaque=True)
    def jumps(x: Tensor) -> Tensor:
        digits = (x.detach().double() * 1e15).floor() % 7
        return digits.to(x.dtype)

    jumps.fake(torch.empty_like)
    jumps.gradients(x=lambda grad: 17 * grad)
    report = opsmith.check(jumps, samples=[(torch.rand(3) + 1,)], only=["gradient"], effort="quick")
    (outcome,) = (each for each in report.outcomes if each.property == "gradient")
    assert any(
        "finite differences cannot determine 3 of 3 elements of the gradient of `x`" in n
        for n in outcome.notes
    )
    assert outcome.status == "skipped"
    assert "no method decides an element of a gradient" in outcome.reason
    assert not report.passed_as_asked


def jumping(x: Tensor) -> Tensor:
    """Its second half jumps everywhere, and its first half is a square."""
    digits = (x.detach().double() * 1e15).floor() % 7
    return torch.where(torch.arange(x.numel()) < x.numel() // 2, x.detach() ** 2, digits.to(x.dtype))


@pytest.mark.parametrize(("factor", "status"), [(2, "passed"), (3, "failed")])
def test_a_gradient_that_differences_tell_in_part_is_passed_or_failed(factor: int, status: str) -> None:
    operator = opsmith.operator(f"numerical::half_jumps_{factor}", opaque=True)(jumping)
    operator.fake(torch.empty_like)
    operator.gradients(x=lambda grad, x: factor * x * grad)
    samples = [(torch.linspace(1.1, 1.9, 4, dtype=DOUBLE),)]
    report = opsmith.check(operator, samples=samples, only=["gradient"], effort="quick")
    (outcome,) = (each for each in report.outcomes if each.property == "gradient")
    assert outcome.status == status, str(report)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_gradient_that_is_no_number_in_any_sample_is_not_passed(number: float) -> None:
    @opsmith.operator("numerical::odd")
    def odd(x: Tensor) -> Tensor:
        return x * x.sin()

    odd.gradients(x=lambda grad, x: -grad * (x.sin() + x * x.cos()))  # of the other sign
    report = opsmith.check(odd, samples=[(torch.full((3,), number),)], only=["gradient"], effort="quick")
    (outcome,) = (each for each in report.outcomes if each.property == "gradient")
    assert outcome.status == "skipped"
    assert "no method decides an element of a gradient" in outcome.reason
    assert not report.passed_as_asked
