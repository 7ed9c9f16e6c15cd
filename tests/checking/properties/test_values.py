"""The property `values`: what is held at zeros, infinities, nan, tiny and large values, and at boundaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.properties.numeric.values import _right_gradients
from opsmith.checking.samples.special_values import (
    SpecialCall,
    ValueGroup,
    boundaries,
    placements,
    value_groups,
)
from opsmith.checking.subject_kinds import subject_of

Formula = Callable[..., Tensor]


def declared(
    name: str,
    function: Callable[[Tensor], Tensor],
    formula: Formula | None = None,
    kernel: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    def reference(x: Tensor) -> Tensor:
        return function(x)

    operator = opsmith.operator(f"values::{name}")(reference)
    operator.samples(lambda make: [(make(3, 4),)])
    if formula is not None:
        operator.gradients(x=formula)
    return operator if kernel is None else operator.kernel("cpu", kernel)


def outcome(checked: Any, **options: Any) -> Any:
    report = opsmith.check(checked, only=["values"], **options)
    return next(each for each in report.outcomes if each.property == "values")


RIGHT: dict[str, tuple[Callable[[Tensor], Tensor], Formula | None]] = {
    "abs": (torch.abs, lambda grad, x: grad * x.sign()),
    "relu": (torch.relu, lambda grad, x: grad * (x > 0)),
    "softplus": (functional.softplus, lambda grad, x: grad * torch.sigmoid(x)),
    "log_sigmoid": (functional.logsigmoid, lambda grad, x: grad * torch.sigmoid(-x)),
    "reciprocal": (lambda x: 1 / x, lambda grad, result: -grad * result * result),
    "tanh": (torch.tanh, lambda grad, result: grad * (1 - result * result)),
    "softmax": (
        lambda x: x.softmax(-1),
        lambda grad, result: result * (grad - (grad * result).sum(-1, keepdim=True)),
    ),
    "logsumexp": (lambda x: x.logsumexp(-1), lambda grad, x: grad.unsqueeze(-1) * x.softmax(-1)),
    "clamp": (lambda x: x.clamp(-1, 1), lambda grad, x: grad * ((x > -1) & (x < 1))),
    "floor": (torch.floor, lambda grad: torch.zeros_like(grad)),
    "fourth_power": (lambda x: x**4, lambda grad, x: 4 * grad * x**3),
    "root": (lambda x: x.abs().sqrt(), None),
    "maximum": (lambda x: x.amax(-1), None),
    "layer_norm": (lambda x: functional.layer_norm(x, (4,)), None),
}


@pytest.mark.every(6)
@pytest.mark.parametrize("effort", ["quick", "default"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str, effort: Any) -> None:
    found = outcome(declared(f"right_{name}", *RIGHT[name]), effort=effort)
    assert (found.status, found.failures) == ("passed", ())


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], Formula, str, str]] = {
    "abs": (
        torch.abs,
        lambda grad, x: grad * x / x.abs(),
        "nan",
        "where `x` is -0 or 0: at [0, 0] it is nan",
    ),
    "softplus": (
        functional.softplus,
        lambda grad, x: grad * x.exp() / (1 + x.exp()),
        "nan",
        "where `x` is 1000",
    ),
    "sinc": (
        torch.sinc,
        lambda grad, x: grad * ((torch.pi * x).cos() - torch.sinc(x)) / x,
        "nan",
        "where `x` is -0 or 0",
    ),
    "relu": (
        torch.relu,
        lambda grad, x: grad * torch.where(x == 0, -3.0, (x > 0).to(x)),
        "region",
        "where `x` is -0 or 0",
    ),
    "clamp": (
        lambda x: x.clamp(-3, 3),
        lambda grad, x: grad * ((x > -2.9) & (x < 3)),
        "region",
        "where `x` is -2.9",
    ),
    "far_out": (
        torch.sin,
        lambda grad, x: grad * x.cos() * torch.where(x > 5, 0.5, 1.0).to(x),
        "region",
        "where `x` is 6.5 or 11 or 27",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_gradient_that_is_wrong_at_a_value_is_found(name: str) -> None:
    function, formula, cause, says = WRONG[name]
    (failure,) = outcome(declared(f"wrong_{name}", function, formula)).failures
    assert (failure.input, failure.cause) == ("x", cause)
    assert says in failure.message
    assert failure.evidence["values"]


@pytest.mark.parametrize(
    ("name", "function", "kernel", "cause", "says"),
    [
        (
            "hides_nan",
            torch.relu,
            lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
            "nan",
            "`result` is wrong where `x` is nan: at [2, 2] it is 0 where nan is right",
        ),
        (
            "overflows",
            torch.sigmoid,
            lambda x: x.exp() / (1 + x.exp()),
            "nan",
            "`result` is wrong where `x` is 1000",
        ),
        (
            "zero_by_zero",
            lambda x: torch.where(x == 0, torch.ones_like(x), x.sin() / x),
            lambda x: x.sin() / x,
            "nan",
            "`result` is wrong where `x` is -0 or 0",
        ),
    ],
)
def test_a_result_that_is_wrong_at_a_value_is_found(
    name: str, function: Any, kernel: Any, cause: str, says: str
) -> None:
    (failure,) = outcome(declared(f"kernel_{name}", function, kernel=kernel)).failures
    assert (failure.input, failure.cause) == ("result", cause)
    assert says in failure.message


def test_a_kernel_that_overflows_later_than_the_reference_is_no_fault() -> None:
    operator = declared("stable", lambda x: x.exp().add(1).log(), kernel=functional.softplus)
    assert outcome(operator).status == "passed"


def test_a_gradient_whose_squares_overflow_is_no_fault_at_the_end_of_the_range() -> None:
    operator = declared("angle", torch.atan, lambda grad, x: grad / (1 + x * x))
    assert outcome(operator).status == "passed"
    naive = declared("naive", lambda x: (1 + x * x).rsqrt(), lambda grad, x: -grad * x / (1 + x * x) ** 1.5)
    assert outcome(naive).status == "passed"


def test_either_side_of_a_kink_is_right_and_noted() -> None:
    operator = declared("other_side", torch.relu, lambda grad, x: grad * (x >= 0))
    found = outcome(operator)
    assert found.status == "passed"
    assert found.notes
    for note in found.notes:
        assert note.startswith("the gradient of `x` at `x` = ")
        assert note.endswith("the function has a kink or an edge there, and both values are valid")


def test_what_is_wrong_everywhere_is_left_to_gradient() -> None:
    found = outcome(declared("wrong_everywhere", torch.sin, lambda grad, x: -grad * x.cos()))
    assert found.status == "passed"
    assert found.notes == ("special values were skipped for `x`, which is already wrong on sample 0",)


class Magnitude(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.sign()


class Divided(Magnitude):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x / x.abs()


class Picky(Magnitude):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("only finite numbers")
        return Magnitude.forward(ctx, x)


def matrix() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_a_class_is_held_to_differences_of_its_own_forward() -> None:
    assert outcome(Magnitude, samples=[(matrix(),)]).status == "passed"
    (failure,) = outcome(Divided, samples=[(matrix(),)]).failures
    assert failure.cause == "nan"


def test_what_the_operator_rejects_is_noted() -> None:
    found = outcome(Picky, samples=[(matrix(),)])
    assert found.status == "passed"
    assert "the operator rejects `x` with nan in it (nan)" in found.notes


@pytest.mark.slow
def test_complex_numbers_have_special_values_too() -> None:
    @opsmith.operator("values::complex_product")
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    product.samples(lambda make: [(torch.complex(make(3), make(3)), make(3))])
    product.gradients(x=lambda grad, y: grad * y, y=lambda grad, x: (grad * x.conj()).real)
    assert outcome(product).status == "passed"


def test_random_operators_and_samples_without_numbers_are_skipped() -> None:
    @opsmith.operator("values::noisy", random=True)
    def noisy(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    noisy.samples(lambda make: [(make(3),)])
    assert outcome(noisy).reason.startswith("the operator draws random numbers")
    empty = declared("empty", torch.sin)
    found = outcome(empty, samples=[(torch.zeros(0, 2),)])
    assert (found.status, found.reason) == ("skipped", "no sample has a floating tensor with elements")


def test_surrogate_gradients_are_left_alone() -> None:
    operator = opsmith.operator("values::step")(_step)
    operator.samples(lambda make: [(make(3),)])
    operator.surrogate_gradients(x=lambda grad, x: grad * (1 - x.abs()).clamp(min=0))
    assert outcome(operator).status == "passed"


def _step(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


@pytest.mark.parametrize(
    ("function", "right"),
    [
        (lambda x: 1.0 if x > 0.25 else 0.0, [0.25]),
        (lambda x: 2 * x if abs(x) < 1 else 2.0, [-1.0]),
        (lambda x: 0.0 if abs(x) > 6 else 1.0, [-6.0, 6.0]),
        (lambda x: x**3, []),
        (lambda x: float("nan") if x > 3 else 1.0, []),
        (lambda x: 1.0 if x > torch.pi else 0.0, [torch.pi]),
    ],
)
def test_boundaries_are_found_by_bisection(function: Callable[[float], float], right: list[float]) -> None:
    assert boundaries(function) == pytest.approx(right, abs=1e-9)


def special(x: Tensor, where: dict[int, float]) -> Tensor:
    """The tensor with special values in it."""
    subject = subject_of(declared("special", torch.sin), [(x,)], 0, EFFORTS["quick"])
    group, dtype = ValueGroup("some", ()), x.dtype
    found: Tensor = SpecialCall(
        subject, subject.samples[0], dtype=dtype, argnum=0, special=where, group=group
    ).kept[0]
    return found


def test_values_take_the_place_of_at_most_half_of_the_elements() -> None:
    x, generator = matrix(), torch.Generator().manual_seed(0)
    numbers = tuple(float(i + 10) for i in range(14))
    found = [*placements(x, ValueGroup("some", numbers), generator)]
    assert [len(where) for where in found] == [6, 6, 2]
    assert [value for where in found for value in where.values()] == [*numbers]
    for where in found:
        other = special(x, where)
        assert all(float(other.view(-1)[position]) == value for position, value in where.items())
        assert int((other != x).sum()) == len(where)
    assert next(placements(torch.tensor(1.0), ValueGroup("some", (5.0, 6.0)), generator)) == {0: 5.0}


def test_what_stands_everywhere_fills_a_row_and_then_all() -> None:
    x, generator = matrix(), torch.Generator()
    group = ValueGroup("nothing but fives", (5.0,), everywhere=True)
    row, whole = (special(x, where) for where in placements(x, group, generator))
    assert torch.equal(row[0], torch.full_like(row[0], 5.0))
    assert torch.equal(row[1:], x[1:])
    assert torch.equal(whole, torch.full_like(x, 5.0))
    for vector in (torch.randn(3), torch.tensor(1.0)):
        assert [*placements(vector, group, generator)] == [dict.fromkeys(range(vector.numel()), 5.0)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_values_of_a_dtype_are_numbers_of_it(dtype: torch.dtype) -> None:
    for group in value_groups(dtype, [0.5]):
        values = torch.tensor(group.values, dtype=dtype)
        assert bool(values.isfinite().all()) or not group.finite
        assert "zeros" in group.name or bool((values != 0).all())


class Sinc(Function):
    """The forward has the limit at 0, through which autograd gives nan, and so does the backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.where(x == 0, torch.ones_like(x), x.sin() / x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.cos() / x - x.sin() / x**2)


class SincWithItsLimit(Sinc):
    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where(x == 0, torch.zeros_like(x), Sinc.backward(ctx, grad))


class Root(Function):
    """Its slope at 0 is infinite on both sides: nan is as good an answer as any."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.abs().sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.sign() / (2 * x.abs().sqrt())


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.parametrize("effort", ["quick", "default"])
def test_a_classes_nan_is_held_to_differences_where_its_forward_gives_nan_too(effort: Any) -> None:
    samples = [(torch.linspace(-3.0, 3.0, 8),)]
    (failure,) = outcome(Sinc, samples=samples, effort=effort).failures
    assert (failure.input, failure.cause) == ("x", "nan")
    assert "at [0] it is nan where 0 is right" in failure.message
    assert failure.dtypes == ("float64",)
    assert outcome(SincWithItsLimit, samples=samples, effort=effort).status == "passed"
    assert outcome(Root, samples=samples, effort=effort).status == "passed"


class Softmax(Function):
    """The one of every textbook. Where a result is nearly one, its terms cancel."""

    @staticmethod
    def forward(ctx: Any, x: Any, dim: int) -> Any:
        exponential = (x - x.amax(dim, keepdim=True)).exp()
        result = exponential / exponential.sum(dim, keepdim=True)
        ctx.save_for_backward(result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (result,) = ctx.saved_tensors
        return result * (grad - (grad * result).sum(ctx.dim, keepdim=True)), None


class SoftmaxOfSums(Softmax):
    """It adds something to the gradient, where a large number stands."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (result,) = ctx.saved_tensors
        right, _ = Softmax.backward(ctx, grad)
        return right + 1e-9 * (result == 1), None


@pytest.mark.every(5)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_terms_of_ordinary_size_leave_when_they_cancel_is_no_fault(seed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(2, 5, generator=generator), 0), (torch.randn(3, 4, generator=generator), 1)]
    found = outcome(Softmax, samples=samples, seed=seed)
    assert (found.status, found.notes) == ("passed", ())
    (failure,) = outcome(SoftmaxOfSums, samples=samples, seed=seed).failures
    assert (failure.input, failure.cause) == ("x", "approximate")


class Single(Function):
    """Its numbers differ from those of autograd by rounding alone, and it has no kink."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return (x.float() * x.float().sigmoid()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        sigmoid = x.sigmoid()
        return grad * (sigmoid + x * sigmoid * (1 - sigmoid))


@pytest.mark.slow
def test_rounding_is_called_no_kink() -> None:
    found = outcome(Single, samples=[(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),)])
    assert (found.status, found.notes) == ("passed", ())


class WithoutNan(Function):
    """It puts its input in order before it computes, in place."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        if bool(x.isnan().any()):
            x.nan_to_num_()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 2 * grad


def test_a_write_that_only_nan_brings_about_is_found() -> None:
    (failure,) = outcome(WithoutNan, samples=[(torch.ones(2, 3),)]).failures
    assert (failure.input, failure.cause) == ("x", "mutates-input")
    assert failure.message.startswith(
        "the operator writes into `x` where `x` has nan in it (nan), but not at ordinary"
    )
    kernel = opsmith.operator("values::without_nan")(doubled)
    kernel.kernel("cpu", lambda x: 2 * (x.nan_to_num_() if bool(x.isnan().any()) else x))
    kernel.samples(lambda make: [(make(3, 4),)])
    assert "mutates-input" in {failure.cause for failure in outcome(kernel).failures}


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_a_reference_that_does_not_depend_on_an_argument_has_zeros_for_its_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(()))

    def constant(x: Tensor) -> Tensor:
        return x.detach() * 0 + weight

    def by_reference(reference: Callable[[Tensor], Tensor]) -> Any:
        operator = declared(f"apart_{reference.__name__}", reference)
        subject = subject_of(operator, None, 0, EFFORTS["quick"])
        sample = subject.samples[0]
        group = ValueGroup("zeros", (0.0,))
        call = SpecialCall(subject, sample, by=(0,), argnum=0, special={0: 0.0}, group=group)
        return [each.value for each in _right_gradients(call)]

    (found,) = by_reference(constant)
    assert not found.any()
    assert by_reference(_detached) == []


def _detached(x: Tensor) -> Tensor:
    return x.detach() * 2


class Relaxed(Function):
    """Numbers that tend to the given ones from a start, of which a hundred-millionth is left in the end."""

    STEPS = 8

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, start: Tensor) -> Tensor:
        state = start.detach().numpy()
        for _ in range(cls.STEPS):
            state = 0.1 * state + 0.9 * x.detach().numpy()
        return torch.from_numpy(state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.zeros_like(grad)


class RelaxedLess(Relaxed):
    STEPS = 4


@pytest.mark.parametrize(("function", "severity"), [(Relaxed, "warning"), (RelaxedLess, "error")])
def test_what_is_below_the_digits_of_a_solver_is_a_warning(function: Any, severity: str) -> None:
    samples = [(torch.linspace(-1, 2, 6), torch.linspace(1, 2, 6))]
    report = opsmith.check(function, samples=samples, only=["gradient", "values"], effort="quick")
    found = {each.property: each.severity for each in report.failures if each.input == "start"}
    assert found == dict.fromkeys(("gradient", "values"), severity), report
