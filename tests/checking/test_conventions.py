"""What an author writes on purpose: the check says where it differs, and calls it no error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking import Failure
from opsmith.checking.effort import EFFORTS
from opsmith.checking.properties.numeric import conventions
from opsmith.checking.properties.numeric.conventions import CONVENTIONS, StraightThrough, by_convention
from opsmith.checking.subject_kinds import subject_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_of(checked: Any, *samples: Any, only: tuple[str, ...] = ("gradient",)) -> opsmith.Report:
    return opsmith.check(checked, samples=list(samples), only=list(only), effort="quick")


class DoublesInFloat32(Function):
    """In float32 alone its gradient is twice the right one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (2 if grad.dtype == torch.float32 else 1)


RIGHT = "it is right in float64, but not in float32"


def test_float64_is_called_right_where_it_is() -> None:
    (failure,) = gradient_of(DoublesInFloat32, (drawn(3, 4),)).errors
    assert failure.message.endswith(RIGHT)


class RaisesInFloat64(DoublesInFloat32):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * torch.eye(len(grad)) @ grad


class TakesFloat32(DoublesInFloat32):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.eye(len(x)) @ x


def test_float64_is_not_called_right_where_it_raises_or_is_cast() -> None:
    for checked in (RaisesInFloat64, TakesFloat32):
        report = gradient_of(checked, (drawn(3, 4),))
        wrong = [each for each in report.errors if each.cause == "scale"]
        assert len(wrong) == 1, report
        assert "float64" not in wrong[0].message


class Rounds(Function):
    """A quantiser with a straight-through gradient inside of its range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        ctx.save_for_backward(x)
        return (x.clamp(-2, 2) * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 2), None


class FiresByNumpy(Function):
    """Spikes of two inputs, one a threshold of each row, by numpy; autograd does not go through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(x, threshold)
        return torch.from_numpy((x.numpy() > threshold.numpy()).astype(x.numpy().dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, threshold = ctx.saved_tensors
        slope = grad / (1 + (x - threshold).abs()) ** 2
        return slope, -slope.sum(-1, keepdim=True)


class Codes(Function):
    """The sign of the largest entry of each row, weighted: smooth by the weight, a step by `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        sign = x.gather(-1, x.abs().argmax(-1, keepdim=True)).sign()
        ctx.save_for_backward(sign, weight)
        return sign * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        sign, weight = ctx.saved_tensors
        return grad * weight, (grad * sign).sum(0)


STEPS: dict[str, tuple[Any, list[Any], set[str]]] = {
    "rounding": (Rounds, [(drawn(3, 4), 4), (drawn(2, 5), 8)], {"x"}),
    "threshold": (FiresByNumpy, [(drawn(3, 4), 0.3 + 0.1 * drawn(3, 1, seed=1))], {"x", "threshold"}),
    "argmax": (Codes, [(drawn(4, 5), drawn(5, seed=1))], {"x"}),
}


@pytest.mark.parametrize("name", [pytest.param("threshold", marks=pytest.mark.slow), "rounding", "argmax"])
def test_a_surrogate_of_a_step_function_is_a_warning_that_says_how_to_declare_it(name: str) -> None:
    checked, samples, inputs = STEPS[name]
    report = gradient_of(checked, *samples, only=("gradient", "linearity"))
    assert {each.input for each in report.failures} == inputs, report
    for each in report.failures:
        assert (each.property, each.given, each.severity) == ("gradient", "unpromised", "warning"), report
        assert 'opsmith.adopt(..., kind="surrogate")' in each.message


class Ignores(Rounds):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ones_like(grad), None


class Overflows(Rounds):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / 0.0, None


class NoMask(Rounds):
    """The samples show no slope; other numbers do, and it has forgotten there that half of them have none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class NotRead(NoMask):
    """It has forgotten to add its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return torch.full_like(x, steps)


@pytest.mark.parametrize("checked", [Ignores, Overflows, NoMask, NotRead])
def test_a_gradient_that_is_no_surrogate_of_a_step_function_stays_an_error(checked: type[Function]) -> None:
    report = gradient_of(checked, (-drawn(3, 4).abs() - 0.1, 4))
    assert [each.input for each in report.errors] == ["x"], report


class Clips(Rounds):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-0.5, 0.5), None


class ClipsSlopes(Clips):
    """Its forward is smooth: torch adds up its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return x * 1.0


def test_a_surrogate_that_is_not_linear_is_a_warning_for_a_step_function_alone() -> None:
    both = ("gradient", "linearity")
    report = gradient_of(Clips, (drawn(3, 4), 4), only=both)
    assert {each.cause for each in report.warnings} >= {"nonlinear-grad"}, report
    assert not report.errors, report
    (failure,) = gradient_of(ClipsSlopes, (drawn(3, 4), 4), only=both).errors
    assert failure.cause == "nonlinear-grad"
    assert 'declare it: `opsmith.adopt(..., kind="nonlinear")`' in failure.message


class Quantizes(Function):
    """A learnt step of a quantiser, with the gradient by it as LSQ has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        whole = (x / step).clamp(-8, 7).round_()
        ctx.save_for_backward(x, step)
        return whole * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        ratio = x / step
        inside = (ratio >= -8) & (ratio <= 7)
        by_step = torch.where(inside, ratio.round() - ratio, ratio.clamp(-8, 7))
        return grad * inside, (grad * by_step).sum().reshape(step.shape)


class Activates(Function):
    """A clipped activation: rounding is left out of the gradient by the bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: Tensor) -> Tensor:
        ctx.save_for_backward(x, bound)
        scale = 15 / bound
        return torch.round(torch.clamp(x, 0, bound.item()) * scale) / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, bound = ctx.saved_tensors
        return grad * ((x > 0) & (x < bound)), (grad * (x >= bound)).sum()


class Passes(Function):
    """It gives each grad_output on, as if it rounded nothing."""

    @staticmethod
    def forward(ctx: Any, low: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.round(-low * 15 / width)
        return -zero * width / 15, width * 1.5

    @staticmethod
    def backward(ctx: Any, grad_low: Tensor, grad_width: Tensor) -> tuple[Tensor, Tensor]:
        return grad_low, grad_width


class ForgetsTheClamp(Quantizes):
    """Its gradient by the step is that within the range, everywhere: no convention has that."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        ratio = x / step
        return grad, (grad * (ratio.round() - ratio) / 2).sum().reshape(step.shape)


class ForgetsTheBound(Activates):
    """Its gradient by the bound is zero, also where something is clipped."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        by_x, by_bound = Activates.backward(ctx, grad)
        return by_x, torch.zeros_like(by_bound)


def test_a_gradient_of_zero_where_something_is_clipped_stays_an_error() -> None:
    report = gradient_of(ForgetsTheBound, (3 * drawn(3, 4), torch.tensor(2.0)))
    assert {(each.property, each.input) for each in report.errors} == {("gradient", "bound")}, report


QUANTIZERS = {
    "learnt step": (Quantizes, (drawn(3, 4), torch.tensor([0.2]))),
    "clipped": (Activates, (3 * drawn(3, 4), torch.tensor(2.0))),
    "nothing clipped": (Activates, (drawn(3, 4), torch.tensor(20.0))),
    "both results": (Passes, (-drawn(3).abs() - 0.2, drawn(3, seed=1).abs() + 1)),
}
DEAR = ("nothing clipped", "both results")


@pytest.mark.parametrize(
    "name", ["learnt step", "clipped", *(pytest.param(name, marks=pytest.mark.slow) for name in DEAR)]
)
def test_a_gradient_that_passes_straight_through_what_rounds_is_a_warning(name: str) -> None:
    checked, sample = QUANTIZERS[name]
    report = gradient_of(checked, sample)
    assert report.warnings, report
    assert not report.errors, report
    assert any("the gradient of a straight-through estimator" in each.message for each in report.warnings)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_special_values_accuse_no_quantizer_either(name: str) -> None:
    checked, sample = QUANTIZERS[name]
    report = gradient_of(checked, sample, only=("gradient", "values"))
    assert not report.errors, report


class DividesInItsBackward(Function):
    """A step that is computed without a division, and whose gradient has one: nan at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return x.tanh() * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, step = ctx.saved_tensors
        y = x.tanh() * step
        return grad * (step - y * y / step), (grad * (y / step)).sum().reshape(step.shape)


def test_nan_at_a_zero_by_which_the_forward_does_not_divide_stays_an_error() -> None:
    sample = (drawn(3, 4), torch.tensor([0.2]))
    report = gradient_of(DividesInItsBackward, sample, only=("gradient", "values"))
    assert {each.property for each in report.errors} == {"values"}, report


class Searches(Function):
    """The root of `y ** 3 + y = x` by bisection between bounds that move with `x`, exact to 1e-4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        low, high = x.sin() - 2, x.cos() + 2
        for _ in range(16):
            middle = (low + high) / 2
            below = middle**3 + middle < x
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        found = (low + high) / 2
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        return grad / (3 * found**2 + 1)


class SearchesWrongly(Searches):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        return grad / (3 * found**2 + 2)


class Smooth(Searches):
    """It has a derivative that steps of any size show, and its gradient is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()


@pytest.mark.parametrize(
    ("checked", "given"), [(Searches, "unpromised"), (SearchesWrongly, "usual"), (Smooth, "usual")]
)
def test_the_gradient_of_what_a_forward_searches_for_in_steps_is_meant(checked: Any, given: str) -> None:
    subject = subject_of(checked, [(drawn(3, 4),)], 0, EFFORTS["quick"])
    failure = Failure("gradient", "x", "unknown", "", None, {"sample": str(subject.samples[0])})
    found = by_convention(failure, subject)
    assert (found.given, CONVENTIONS[-1].words in found.message) == (given, given == "unpromised")


def test_another_gradient_of_a_quantizer_stays_an_error() -> None:
    report = gradient_of(ForgetsTheClamp, (drawn(3, 4), torch.tensor([0.2])))
    assert [each.input for each in report.errors] == ["step"], report


class Selects(Function):
    """The values of one argument, with the gradient by another one."""

    @staticmethod
    def forward(ctx: Any, hard: Tensor, soft: Tensor) -> Tensor:
        return hard.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def test_an_argument_that_no_result_reads_is_meant_where_the_samples_ask_for_its_gradient_alone() -> None:
    hard, soft = drawn(3, 4).sign(), drawn(3, 4, seed=1)
    asked = gradient_of(Selects, (hard, soft.clone().requires_grad_()))
    assert asked.warnings, asked
    assert not asked.errors, asked
    assert [each.input for each in gradient_of(Selects, (hard, soft)).errors] == ["soft"]


class ScalesGradients(Function):
    """It returns its argument, and brings its gradient to a norm of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class Reroutes(Function):
    """A value that is known, with the gradients by what it was computed from."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None,) + tuple(grad.sum() * each for each in ctx.saved_tensors)  # noqa: RUF005


class ScalesCopies(ScalesGradients):
    """A copy is computed: the gradient of what it is an operation on is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0


ROUTING = [(ScalesGradients, (drawn(3, 4),)), (Reroutes, (drawn(2), drawn(3), drawn(4)))]


@pytest.mark.parametrize(("checked", "sample"), ROUTING)
def test_the_gradient_of_a_forward_that_only_returns_arguments_is_meant(checked: Any, sample: Any) -> None:
    report = gradient_of(checked, sample, only=("gradient", "linearity", "values"))
    assert report.warnings, report
    assert not report.errors, report


def test_the_gradient_of_a_copy_stays_an_error() -> None:
    report = gradient_of(ScalesCopies, (drawn(3, 4),), only=("gradient", "linearity"))
    assert [each.cause for each in report.errors] == ["nonlinear-grad"], report


class StoresInFewDigits(Function):
    """It saves its argument in float8, if a caller asks for that."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, packs: bool) -> Tensor:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn) if packs else x)
        return x * x.sigmoid()

    @classmethod
    def slope(cls, grad: Tensor, x: Tensor) -> Tensor:
        s = x.to(grad.dtype).sigmoid()
        return cls.factor * grad * s * (1 + x.to(grad.dtype) * (1 - s))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return StoresInFewDigits.slope(grad, ctx.saved_tensors[0]), None


class StoresAndForgets(StoresInFewDigits):
    factor = 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return StoresAndForgets.slope(grad, ctx.saved_tensors[0]), None


def test_a_gradient_of_what_is_saved_in_few_digits_is_a_warning() -> None:
    report = gradient_of(StoresInFewDigits, (drawn(3, 4), True))
    assert not report.errors, report
    assert (
        "the forward saves values in float8_e4m3fn; for these values the gradient is right"
        in report.warnings[0].message
    )
    assert gradient_of(StoresAndForgets, (drawn(3, 4), True)).errors


class AddsInto(Function):
    """Its forward writes into a buffer by `out=`, which torch refuses where autograd records it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.mul(x, x, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad * ctx.saved_tensors[0]


def test_what_a_forward_raises_under_a_mode_is_no_fault_of_ours() -> None:
    assert [each.input for each in gradient_of(AddsInto, (drawn(3, 4),)).errors] == ["x"]


class Jitters(Function):
    """A sample of a normal distribution, whose gradient by the scale is right on average."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, scale: Tensor) -> Tensor:
        noise = torch.randn_like(mean)
        ctx.save_for_backward(noise, scale)
        return mean + scale * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        noise, scale = ctx.saved_tensors
        return grad, (grad * noise).mean().expand_as(scale).clone()


class Drops(Function):
    """Dropout that forgets its mask: right on average for a constant grad_output alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.4) / 0.6

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_gradient_that_is_right_on_average_over_draws_is_a_warning() -> None:
    report = gradient_of(Jitters, (torch.zeros(4), torch.full((4,), 0.5)))
    assert not report.errors, report
    assert any("it is right on average over draws" in each.message for each in report.warnings), report


def test_a_gradient_that_forgets_what_was_drawn_stays_an_error() -> None:
    assert [each.input for each in gradient_of(Drops, (drawn(3, 4),)).errors] == ["x"]


def test_an_operator_with_a_reference_declares_its_surrogate() -> None:
    def rounds(x: Tensor) -> Tensor:
        return x.round()

    operator = opsmith.operator("conventions::rounds")(rounds).gradients(x=lambda grad: grad)
    assert gradient_of(operator, (drawn(3, 4),)).errors


def symmetric(*shape: int, seed: int = 0) -> Tensor:
    matrix = drawn(*shape, seed=seed)
    return (matrix + matrix.mT) / 2


class Squared(Function):
    """The square of a symmetric matrix; of its gradient the symmetric part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        right = grad @ x.mH + x.mH @ grad
        return (right + right.mH) / 2


class Roots(Function):
    """Square roots of singular values, of positive matrices those of its eigenvalues, with a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        u, s, _ = torch.linalg.svd(x)
        ctx.save_for_backward(u, s, weight)
        return (u * s.sqrt()[..., None, :]) @ u.mT * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        u, s, weight = ctx.saved_tensors
        root = s.sqrt()
        inner = u.mT @ (grad * weight) @ u / (root[..., :, None] + root[..., None, :])
        inner = (inner + inner.mT) / 2
        return u @ inner @ u.mT, (grad * ((u * root[..., None, :]) @ u.mT)).sum(0)


class Halved(Squared):
    """Wrong along symmetric matrices, too, though symmetric."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        right = grad @ x
        return (right + right.mT) / 2


POSITIVE = symmetric(2, 3, 3) @ symmetric(2, 3, 3) + torch.eye(3)


@pytest.mark.parametrize(
    ("checked", "samples"),
    [
        (Squared, [(symmetric(3, 3),), (symmetric(2, 4, 4),)]),
        (Squared, [(torch.complex(symmetric(3, 3), drawn(3, 3).triu(1) - drawn(3, 3).triu(1).mT),)]),
        (Roots, [(POSITIVE, drawn(3, 3, seed=2))]),
    ],
    ids=["square", "hermitian", "root"],
)
def test_a_gradient_that_is_right_along_symmetric_matrices_is_a_warning(checked: Any, samples: Any) -> None:
    report = gradient_of(checked, *samples)
    assert {(each.input, each.given, each.severity) for each in report.failures} == {
        ("x", "strained", "warning")
    }, report
    assert "the gradient is right along symmetric matrices" in report.failures[0].message


@pytest.mark.parametrize(
    ("checked", "samples"),
    [
        (Halved, [(symmetric(3, 3),)]),
        (Squared, [(symmetric(3, 3),), (drawn(3, 3),)]),
    ],
    ids=["wrong along symmetric ones", "a sample of another kind"],
)
def test_a_gradient_that_is_wrong_for_what_samples_show_stays_an_error(checked: Any, samples: Any) -> None:
    assert [each.input for each in gradient_of(checked, *samples).errors] == ["x"]


def test_a_transposed_gradient_is_an_error_where_samples_are_symmetric_by_chance() -> None:
    class Transposes(Squared):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 3 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 3 * grad.mT

    for chance in (torch.ones(3, 3), torch.eye(3)):
        assert gradient_of(Transposes, (chance,)).errors


class Transposes(Function):
    """It returns a view of its argument with its elements elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class Triples(Function):
    """It returns its argument, into which it writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class WeighsByRounded(Function):
    """It rounds its weight; the gradient by the other input does not pass through that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * (3 * weight).round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clone(), None


class SavesAMask(Function):
    """Its gradient is 5 % off, and nothing of that comes from the mask, which is saved in half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, (x > 0).half())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return grad * x.exp() * (1 + 0.05 * x.sin())


class FiveTimesInFloat32(Squared):
    """Of its gradient the symmetric part; in float32 five times that."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Squared.backward(ctx, grad) * (5 if grad.dtype == torch.float32 else 1)


FAULTS = {
    "view": (Transposes, (drawn(4, 4),)),
    "write": (Triples, (drawn(3, 4),)),
    "other input rounds": (WeighsByRounded, (drawn(3, 4), drawn(3, 4, seed=1))),
    "mask": (SavesAMask, (drawn(3, 4),)),
    "other dtype": (FiveTimesInFloat32, (symmetric(4, 4),)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_beside_a_convention_stays_an_error(name: str) -> None:
    checked, sample = FAULTS[name]
    report = gradient_of(checked, sample)
    assert len(report.errors) == 1, report


class WrongAtOneHalf(Function):
    """Right for a symmetric matrix, but where an element is one half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x == 0.5, 9 * grad, grad * x.cos())


def test_a_gradient_that_is_right_at_the_samples_follows_no_convention_elsewhere() -> None:
    report = gradient_of(WrongAtOneHalf, (symmetric(4, 4),), only=("gradient", "values"))
    assert [each.property for each in report.errors] == ["values"], report


class SpectralNorm(Function):
    """A weight over its largest singular value, by vectors that its forward computes without a gradient."""

    factor = 1.0

    @classmethod
    def vectors(cls, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            v = weight.sum(0)
            v = v / v.norm()
            u = weight @ v
            return u / u.norm(), v

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        u, v = SpectralNorm.vectors(weight)
        ctx.save_for_backward(weight, u, v)
        return weight / (u @ weight @ v)

    @classmethod
    def gradient(cls, ctx: Any, grad: Tensor) -> Tensor:
        weight, u, v = ctx.saved_tensors
        sigma = u @ weight @ v
        return grad / sigma - cls.factor * (grad * weight).sum() / sigma**2 * torch.outer(u, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return SpectralNorm.gradient(ctx, grad)


class HalfSpectralNorm(SpectralNorm):
    factor = 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return HalfSpectralNorm.gradient(ctx, grad)


def test_the_gradient_of_a_forward_that_hides_something_is_meant() -> None:
    report = gradient_of(SpectralNorm, (drawn(3, 4),))
    assert not report.errors, report
    assert [each.input for each in report.warnings] == ["weight"]
    assert gradient_of(HalfSpectralNorm, (drawn(3, 4),)).errors


class GivesTheTargetNothing(Function):
    """It differentiates within, and returns None for its target."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            loss = ((leaf - target) ** 2).sum()
        (ctx.grad,) = torch.autograd.grad(loss, leaf)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.grad, None


def test_special_values_accuse_no_input_that_gets_no_gradient_anywhere() -> None:
    report = gradient_of(GivesTheTargetNothing, (drawn(3), drawn(3, seed=1)), only=("gradient", "values"))
    assert not report.errors, report


class OffByMuch(Function):
    """It loses most of what flows through its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x.exp()).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp() * (1 + x.sin())


@pytest.mark.parametrize(("x", "resembles"), [(drawn(1), False), (drawn(6), True)])
def test_one_element_resembles_no_other(x: Tensor, resembles: bool) -> None:
    (failure,) = gradient_of(OffByMuch, (x,)).errors
    assert ("roughly proportional" in failure.message) == resembles


class SavesAMaskAndIsNearlyRight(SavesAMask):
    """Its gradient is off by a ten-thousandth, which the mask in half precision does not make."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return grad * x.exp() * (1 + 1e-4 * x.sin())


def test_a_mask_in_half_precision_explains_no_error() -> None:
    (failure,) = gradient_of(SavesAMaskAndIsNearlyRight, (drawn(3, 4),)).warnings
    assert "saves in" not in failure.message


def test_what_rounds_by_keyword_passes_straight_too() -> None:
    x = drawn(3).requires_grad_()
    with StraightThrough() as mode:
        (torch.round(input=x) + torch.round(x, decimals=1)).sum().backward()
    assert mode.used
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_a_mistake_of_ours_in_a_convention_leaves_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(conventions, "OTHERS")
    (failure,) = gradient_of(Rounds, (drawn(3, 4), 4)).errors
    assert (
        "opsmith itself failed when it looked for a convention that explains this (NameError: "
        in failure.message
    )
    assert failure.message.endswith(": please report this error")


class Guided(Function):
    """Guided backpropagation: of the gradients of a rectifier, only the positive ones pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x > 0) * (grad > 0)


class Floored(Function):
    """A lower bound; below it, the gradients that lead back to it pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, least: Tensor) -> Tensor:
        ctx.save_for_backward(x, least)
        return torch.maximum(x, least)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, least = ctx.saved_tensors
        return torch.where((x >= least) | (grad < 0), grad, 0.0), None


class OnlyDescends(Function):
    """A layer that lets nothing through by which its input would fall."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        z = x @ weight
        ctx.save_for_backward(x, weight, z)
        return z.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, z = ctx.saved_tensors
        d = grad * (1 - z.tanh() ** 2)
        return (d @ weight.mT).clamp(max=0), x.mT @ d


class SelectsByProduct(Guided):
    """Only where a gradient times its input is large enough does it pass."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where((x > 0) & (x * grad > 0.2), grad, 0.0)


LEAST = torch.zeros(1)
GATES: dict[type[Function], tuple[Any, ...]] = {
    Guided: (drawn(4, 5),),
    Floored: (drawn(4, 5), LEAST),
    OnlyDescends: (drawn(3, 4), drawn(4, 2)),
    SelectsByProduct: (drawn(4, 5),),
}


@pytest.mark.parametrize("checked", GATES, ids=lambda each: each.__name__)
def test_a_gradient_that_grad_output_gates_is_a_warning(checked: type[Function]) -> None:
    report = gradient_of(checked, GATES[checked], only=("gradient", "linearity", "values"))
    assert not report.errors, report
    assert "decides which of its elements pass" in report.warnings[0].message


def test_a_gate_that_special_values_alone_reach_is_a_warning() -> None:
    sample = (drawn(4, 5).abs() + 0.5, LEAST + 0.3)
    report = gradient_of(Floored, sample, only=("gradient", "linearity", "values"))
    assert not report.errors, report
    assert [each.input for each in report.warnings if "decides which" in each.message] == ["x"]


class Squares(Guided):
    """A gate times another grad_output."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x > 0) * grad.clamp(min=0)


class LacksTheMask(Guided):
    """It looks at grad_output where it should look at its input."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (grad > 0)


class LeadsAway(Floored):
    """Below the bound, the gradients pass that lead away from it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, least = ctx.saved_tensors
        return torch.where((x >= least) | (grad > 0), grad, 0.0), None


class DropsByInput(Floored):
    """Just above the bound it drops every gradient."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, least = ctx.saved_tensors
        return torch.where((x >= least + 0.5) | ((grad < 0) & (x < least)), grad, 0.0), None


class TakesTheOtherSign(OnlyDescends):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_x, by_weight = OnlyDescends.backward(ctx, grad)
        return -by_x, by_weight


class ClipsAbove(Guided):
    """A gate that also clips what passes."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad.clamp(0.0, 100.0) * (x > 0)


UNGATED: dict[type[Function], tuple[Any, ...]] = {
    Squares: (drawn(4, 5),),
    LacksTheMask: (drawn(4, 5),),
    LeadsAway: (drawn(4, 5), LEAST),
    DropsByInput: (drawn(4, 5), LEAST),
    TakesTheOtherSign: (drawn(3, 4), drawn(4, 2)),
    ClipsAbove: (drawn(4, 5),),
}


@pytest.mark.parametrize("checked", UNGATED, ids=lambda each: each.__name__)
def test_a_fault_of_a_gradient_that_grad_output_gates_stays_an_error(checked: type[Function]) -> None:
    report = gradient_of(checked, UNGATED[checked], only=("gradient", "linearity"))
    assert "x" in {each.input for each in report.errors}, report
