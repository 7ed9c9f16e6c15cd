"""Circumstances of failures: severity on a sample, in another dtype, and where nobody promised anything."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith

D = torch.float64


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=D)


def found(checked: Any, *sample: Any, only: list[str], effort: Any = "quick") -> set[tuple[str, str, str]]:
    """Property, cause and severity of each failure."""
    report = opsmith.check(checked, samples=[sample], only=only, effort=effort)
    return {(each.property, each.cause, each.severity) for each in report.failures}


class RefusesHalf(Function):
    """It states which dtypes it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise ValueError("no bfloat16")
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def test_a_dtype_of_few_digits_that_a_class_refuses_is_left_out_with_its_words() -> None:
    report = opsmith.check(RefusesHalf, samples=[(drawn(3, 4),)], only=["forward"], effort="quick")
    assert not report.failures
    notes = " ".join(note for outcome in report.outcomes for note in outcome.notes)
    assert "bfloat16 was left out: the reference does not run in this dtype: no bfloat16" in notes


def test_a_kernel_that_is_wrong_in_half_precision_alone_is_an_error() -> None:
    operator = opsmith.operator("circumstances::doubled")(_doubled)
    operator.kernel("cpu", lambda x: x * (3 if x.dtype == torch.bfloat16 else 2))
    assert found(operator, drawn(3, 4).float(), only=["forward"]) == {("forward", "kernel-mismatch", "error")}


def _doubled(x: Tensor) -> Tensor:
    return x * 2


class Approximate(Function):
    """Its derivative is off by half a thousandth, as that of another formula is."""

    share = 5e-4

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.cos() + Approximate.share * (3 * x).sin())


def test_an_approximation_is_a_warning_with_its_size_and_a_larger_error_is_an_error(monkeypatch: Any) -> None:
    samples = [(drawn(3, 4),)]
    (failure,) = opsmith.check(Approximate, samples=samples, only=["gradient"]).failures
    assert (failure.cause, failure.severity) == ("approximate", "warning")
    assert "of its largest element. If you intend this error, `accept` it" in failure.message
    monkeypatch.setattr(Approximate, "share", 5e-2)
    (failure,) = opsmith.check(Approximate, samples=samples, only=["gradient"]).failures
    assert (failure.cause, failure.severity) == ("unknown", "error")


class DrawsOneOfTwo(Function):
    """A surrogate that lets half of the gradients pass, by Python's random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if random.random() < 0.5 else 0.5 * grad


def test_a_surrogate_that_draws_its_gradient_gets_one_warning() -> None:
    operator = opsmith.adopt(DrawsOneOfTwo, "circumstances::draws", kind="surrogate")
    said = set()
    for _ in range(8):  # two draws may be the same
        said |= found(operator, drawn(3, 4), only=["determinism", "effects"])
    assert said == {("determinism", "nondeterministic", "warning")}


class NothingSavedInEval(Function):
    """A flag of its type, False, makes its backward raise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, training: bool = True) -> Tensor:
        if training:
            ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1 - ctx.saved_tensors[0].tanh() ** 2), None


def test_an_exception_behind_a_flag_is_an_error() -> None:
    assert found(NothingSavedInEval, drawn(3, 4), True, only=["gradient"]) == {
        ("gradient", "raises", "error")
    }


class FirstRow(Function):
    """A forward that takes no rows, and a backward that needs one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        into = 2 * x * grad
        into[0] = 2 * x[0] * grad[0]
        return into


def test_a_forward_that_returned_has_promised_its_backward_at_size_0_too() -> None:
    assert ("gradient", "empty", "error") in found(FirstRow, drawn(3, 4), only=["gradient"])


class NeedsRows(FirstRow):
    """A forward that raises without rows by surprise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square() + 0 * x[0, 0]


def test_a_forward_that_raises_without_rows_is_a_limit() -> None:
    said = found(NeedsRows, drawn(3, 4), only=["forward"])
    assert {severity for *_, severity in said} <= {"limit"}


class DirtyBehindAFlag(Function):
    """With `inplace` it marks its input as dirty, and returns another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool = False) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x.exp(), None


def test_a_rule_that_is_broken_behind_a_flag_is_no_refusal() -> None:
    operator = opsmith.adopt(DirtyBehindAFlag, "circumstances::dirty", samples=lambda: [(drawn(3, 4), False)])
    said = found(operator, drawn(3, 4), False, only=["forward"])
    assert said == {("forward", "mutates-input", "error")}


@pytest.mark.parametrize("kind", [None, "surrogate"])
def test_a_gradient_that_is_not_linear_is_no_error_of_a_surrogate(kind: Any) -> None:
    class Clips(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.clamp(-0.1, 0.1)

    options = {"kind": kind} if kind else {}
    operator = opsmith.adopt(Clips, f"circumstances::clips_{kind}", **options)
    said = found(operator, drawn(3, 4), only=["linearity", "surrogate"])
    property, severity = ("surrogate", "warning") if kind else ("linearity", "error")
    assert said == {(property, "nonlinear-grad", severity)}


class HalfTimesHalf(Function):
    """It splits a size that is even in every sample; of an odd one the halves broadcast by chance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        one, other = x.chunk(2, -1)
        return one * other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        one, other = ctx.saved_tensors[0].chunk(2, -1)
        return torch.cat([grad * other, grad * one], -1)


def test_an_exception_at_a_size_that_breaks_what_divides_it_in_every_sample_is_a_warning() -> None:
    samples = [(torch.randn(2, 3, 4),), (torch.randn(3, 2, 6),)]
    report = opsmith.check(HalfTimesHalf, samples=samples, only=["gradient"])
    assert {(each.severity, each.given) for each in report.failures} == {("warning", "strained")}, report
    report = opsmith.check(HalfTimesHalf, samples=[(torch.randn(2, 3),)], only=["gradient"])
    assert "error" in {each.severity for each in report.failures}, report


class Marked(Function):
    """Its second result takes no gradient, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(y)
        return x * x, y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_a_result_that_a_class_marks_as_non_differentiable_takes_no_grad_output() -> None:
    report = opsmith.check(Marked, samples=[(torch.randn(3, 4),)], effort="quick")
    assert not [each for each in report.failures if each.severity == "error"], report


class ByDefaultTensor(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor = torch.tensor(2.0)) -> Tensor:  # noqa: B008
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def test_a_class_with_a_tensor_as_a_default_is_checked() -> None:
    report = opsmith.check(ByDefaultTensor, samples=[(torch.randn(3, 4), torch.tensor(3.0))], effort="quick")
    assert not [each for each in report.failures if each.severity == "error"], report


class LosesLargeNumbersInHalf(Function):
    """In float16 it is right for small numbers alone, as where it squares them on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-limit, limit) if x.dtype == torch.float16 else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clone(), None


@pytest.mark.parametrize(("limit", "severity"), [(10.0, "warning"), (0.25, "error")])
def test_other_magnitudes_in_half_precision_are_strained(limit: float, severity: str) -> None:
    samples = [(torch.linspace(-3.0, 3.0, 12), limit)]
    report = opsmith.check(LosesLargeNumbersInHalf, samples=samples, only=["forward"])
    assert {each.severity for each in report.failures if each.input == "result"} == {severity}, report


class KeepsStatistics(Function):
    """Normalises, and keeps a running mean; a buffer that its backward fills holds the last gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, last: Tensor) -> Tensor:
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        ctx.last = last
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.last.copy_(grad.sum(0))
        return grad * 2.0, None, None


class MasksLabels(Function):
    """It overwrites the labels that it is to ignore: their new values come from them alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        labels.clamp_(min=0.0)
        ctx.save_for_backward(labels)
        return x * labels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class SpoilsItsBank(Function):
    """Its backward writes into a bank of features that the next backward through the graph reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bank: Tensor) -> Tensor:
        ctx.bank = bank
        ctx.save_for_backward(x)
        return x @ bank.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        by_x = grad @ ctx.bank
        ctx.bank.mul_(0.5).add_(0.5 * x.mean(0))
        return by_x, None


def test_a_buffer_that_a_class_keeps_for_later_calls_is_a_warning() -> None:
    only = ["effects", "layouts"]
    kept = found(KeepsStatistics, drawn(4, 3), torch.zeros(3), torch.zeros(3), only=only)
    assert ("effects", "mutates-input", "warning") in kept
    assert {severity for *_, severity in kept} == {"warning"}


class SubtractsInItsTarget(Function):
    """It computes a difference in the memory of its target: the result depends on what that held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        difference = target.sub_(x)
        ctx.save_for_backward(difference.clone())
        return (difference**2).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -2 * grad * ctx.saved_tensors[0], None


@pytest.mark.parametrize("checked", [MasksLabels, SpoilsItsBank, SubtractsInItsTarget])
def test_other_writes_into_an_argument_stay_errors(checked: Any) -> None:
    assert ("effects", "mutates-input", "error") in found(checked, drawn(4, 3), drawn(4, 3), only=["effects"])


class TakesADefault(Function):
    """It returns a gradient for each argument that its author passes, and none for one with a default."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int = 3) -> Tensor:
        return x * float(steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3.0


def test_an_argument_that_no_sample_passes_keeps_its_default() -> None:
    assert not found(TakesADefault, drawn(3, 4), only=["gradient", "effects"])
    assert ("gradient", "gradient-count", "error") in found(TakesADefault, drawn(3, 4), 3, only=["gradient"])


class NearlyLinear(Function):
    """Its gradient ends at an absolute tolerance, as that of an iterative solver."""

    off = 3e-6

    @classmethod
    def solved(cls, grad: Tensor) -> Tensor:
        return 2 * grad + cls.off * torch.sin(1e4 * grad)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return NearlyLinear.solved(grad)


class HardlyLinear(NearlyLinear):
    off = 3e-3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return HardlyLinear.solved(grad)


@pytest.mark.parametrize(("checked", "severity"), [(NearlyLinear, "warning"), (HardlyLinear, "error")])
def test_few_digits_of_small_gradients_are_minor(checked: Any, severity: str) -> None:
    said = found(checked, drawn(3, 4), only=["linearity"])
    assert said == {("linearity", "nonlinear-grad", severity)}


def test_a_write_into_an_argument_names_both_ways_out() -> None:
    report = opsmith.check(
        MasksLabels, samples=[(drawn(4, 3), drawn(4, 3))], only=["effects"], effort="quick"
    )
    assert (
        "work on a copy, `.clone()`, or call `ctx.mark_dirty(labels)` and return `labels`"
        in report.errors[0].message
    )
