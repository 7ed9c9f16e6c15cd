"""What holds of one input in every sample, as symmetry, in derived inputs and where special values stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.domain import restored
from opsmith.checking.samples.forms import forms_of, placed
from opsmith.checking.samples.special_values import SpecialCall, ValueGroup
from opsmith.checking.samples.variations import variations
from opsmith.checking.subject import Subject
from opsmith.checking.subject_kinds import subject_of


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def definite(*sizes: int) -> Tensor:
    noise = drawn(*sizes)
    return noise @ noise.mT + torch.eye(sizes[-1], dtype=torch.float64)


def symmetric(*sizes: int) -> Tensor:
    return drawn(*sizes) + drawn(*sizes).mT


class Energy(Function):
    """`x a x` of each row; the gradient by `x` is twice `x a`, as `a` is symmetric."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        return (x * (x @ a)).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, a = ctx.saved_tensors
        g = grad.unsqueeze(-1)
        return 2 * g * (x @ a), x.mT @ (g * x)


class DiagonalEnergy(Energy):
    """A gradient that takes a zero for the mark of a matrix that is diagonal."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_x, by_a = Energy.backward(ctx, grad)
        return by_x * (0.5 if bool((ctx.saved_tensors[1] == 0).any()) else 1.0), by_a


class Solved(Function):
    """The solution of `a y = b`; the backward solves with `a` in place of its transpose."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        y: Tensor = torch.linalg.solve(a, b)
        ctx.save_for_backward(a, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, y = ctx.saved_tensors
        back = torch.linalg.solve(a, grad)
        return -back @ y.mT, back


CALLS: dict[Any, list[Any]] = {
    Energy: [(drawn(2, 3, 4), symmetric(4, 4)), (drawn(5, 3), symmetric(3, 3))],
    Solved: [(definite(2, 3, 3), drawn(2, 3, 2)), (definite(1, 4, 4), drawn(1, 4, 1))],
}


@pytest.mark.parametrize("function", CALLS, ids=lambda each: each.__name__)
def test_special_values_stand_in_both_triangles(function: Any) -> None:
    report = opsmith.check(function, samples=CALLS[function], only=["values"], effort="quick")
    assert not report.failures, report


def test_a_gradient_that_is_wrong_at_zeros_of_a_symmetric_matrix_is_found() -> None:
    report = opsmith.check(DiagonalEnergy, samples=CALLS[Energy], only=["values"], effort="quick")
    (failure,) = [each for each in report.failures if each.input == "x"]
    assert failure.severity == "error"
    assert "where `a` holds -0 or 0:" in failure.message


def subject(function: Any, *samples: Any) -> Subject:
    return subject_of(function, samples, 0, EFFORTS["quick"])


def test_a_special_value_that_no_definite_matrix_holds_is_left_out() -> None:
    checked = subject(Solved, *CALLS[Solved])
    a = CALLS[Solved][0][0]
    made, left = placed(forms_of(checked), a, {0: -1.0})
    assert not left
    made, left = placed(forms_of(checked), a, {1: -9.0})
    assert left == {1: -9.0, 3: -9.0}
    assert torch.equal(made, made.mT)
    assert bool((torch.linalg.eigvalsh(made) > 0).all())
    symmetric_alone = forms_of(subject(Energy, *CALLS[Energy]))
    assert placed(symmetric_alone, symmetric(4, 4), {0: -1.0})[1] == {0: -1.0}


def test_no_row_of_a_definite_matrix_is_zero() -> None:
    zeros = ValueGroup("nothing but zeros", (0.0,), everywhere=True)
    for function, stands in ((Solved, False), (Energy, True)):
        checked, argnum = subject(function, *CALLS[function]), int(function is Energy)
        call = SpecialCall(
            checked, checked.samples[0], "values", argnum=argnum, group=zeros, forms=forms_of(checked)
        )
        assert (call.placed(dict.fromkeys(range(3), 0.0)) is not None) == stands


def test_of_two_special_values_at_mirrored_places_one_stands() -> None:
    _, left = placed(forms_of(subject(Energy, *CALLS[Energy])), symmetric(4, 4), {1: 3.0, 4: 5.0})
    assert left == {1: 5.0, 4: 5.0}


def test_matrices_that_chance_makes_symmetric_have_no_form() -> None:
    for a in (torch.eye(3), torch.ones(3, 3), drawn(3, 3)):
        assert not forms_of(subject(Energy, (drawn(2, 3), a.double())))


class Determinant(Function):
    """Of symmetric matrices of two rows, which lie flat behind a factor: `(k, a, b, b, c)`."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor) -> Tensor:
        ctx.save_for_backward(flat)
        k, a, b, d, c = flat.unbind(-1)
        return k * (a * c - b * d)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        k, a, b, _, c = ctx.saved_tensors[0].unbind(-1)
        return grad.unsqueeze(-1) * torch.stack([a * c - b * b, k * c, -k * b, -k * b, k * a], -1)


class ReversedTaps(Function):
    """A filter of symmetric taps over a row; the gradient by the row filters with the taps as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        return ReversedTaps.filtered(x, taps)

    @staticmethod
    def filtered(x: Tensor, taps: Tensor) -> Tensor:
        half = taps.shape[-1] // 2
        padded = torch.nn.functional.pad(x, (half, half))
        return (padded.unfold(-1, taps.shape[-1], 1) * taps.unsqueeze(-2)).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, taps = ctx.saved_tensors
        half = taps.shape[-1] // 2
        windows = torch.nn.functional.pad(x, (half, half)).unfold(-1, taps.shape[-1], 1)
        return ReversedTaps.filtered(grad, taps), (windows * grad.unsqueeze(-1)).sum(-2)


def flat_matrices(count: int) -> Tensor:
    made = drawn(count, 5)
    made[:, 3] = made[:, 2]
    return made


def taps(count: int) -> Tensor:
    half = drawn(count, 3)
    return torch.cat([half, half[:, :2].flip(-1)], -1)


EQUAL: dict[Any, list[Any]] = {
    Determinant: [(flat_matrices(3),), (flat_matrices(2),)],
    ReversedTaps: [(drawn(3, 8), taps(3)), (drawn(4, 6), taps(4))],
}


@pytest.mark.parametrize("function", EQUAL, ids=lambda each: each.__name__)
def test_elements_that_are_equal_in_every_row_stay_equal(function: Any) -> None:
    checked = ["gradient", "values"]
    report = opsmith.check(function, samples=EQUAL[function], only=checked, effort="quick")
    assert not report.failures, report


def test_equal_elements_are_restored_from_the_one_that_changed() -> None:
    given = flat_matrices(3)
    checked = subject(Determinant, (given,))
    changed = given.clone()
    changed[1, 3] = 7.0
    (made,) = restored(checked, checked.samples[0], [changed])
    assert made[1, 2] == made[1, 3] == 7.0
    assert torch.equal(made[[0, 2]], given[[0, 2]])
    expanded = drawn(4, 1).expand(4, 3)
    checked = subject(Determinant, (expanded,))
    other = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    assert torch.equal(restored(checked, checked.samples[0], [other])[0], other)


class Inside(Function):
    """The logarithm of the room around a point in a large ball; nan outside. Wrong near its surface."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (1.05 - x.square().sum(-1)).log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        room = 1.05 - x.square().sum(-1, keepdim=True)
        far = 1 + (x.square().sum(-1, keepdim=True) > 0.85)
        return grad.unsqueeze(-1) * -2 * x / room * far


def test_what_few_usable_draws_show_is_strained() -> None:
    row = torch.tensor(
        [[0.9, -0.1, 0.2, 0.05, -0.05], [-0.1, 0.9, 0.1, -0.15, 0.1], [0.1, 0.1, -0.9, 0.1, 0.0]]
    )
    checked = subject(Inside, (row.double(),))
    found = [each for each in variations(checked).samples if each.change is not None and each.change.is_drawn]
    assert found
    assert all(each.given == "strained" for each in found)
    small = subject(Inside, (0.3 * row.double(),))
    assert all(each.given == "usual" for each in variations(small).samples if each.elements)


class CrossEntropy(Function):
    """Cross entropy, whose gradient takes the targets of each row to sum to one."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return -(targets * logits.log_softmax(-1)).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, targets = ctx.saved_tensors
        g = grad.unsqueeze(-1)
        return g * (logits.softmax(-1) - targets), -g * logits.log_softmax(-1)


class Reflected(Function):
    """The reflection of `x` by a unit vector, whose length its gradients do not regard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Tensor) -> Tensor:
        ctx.save_for_backward(x, unit)
        return x - 2 * (x @ unit) * unit.mT / (unit * unit).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, unit = ctx.saved_tensors
        return grad - 2 * (grad @ unit) * unit.mT, None


def one_hot(*sizes: int) -> Tensor:
    return torch.eye(sizes[-1], dtype=torch.float64)[torch.arange(sizes[0]) % sizes[-1]]


def unit(size: int) -> Tensor:
    vector = drawn(size, 1)
    return vector / vector.norm()


ONES = {
    "one hot": (CrossEntropy, [(drawn(4, 3), one_hot(4, 3))]),
    "probabilities": (CrossEntropy, [(drawn(2, 3), drawn(2, 3).softmax(-1)), (drawn(4, 5), one_hot(4, 5))]),
    "unit vectors": (Reflected, [(drawn(4, 3), unit(3)), (drawn(2, 5), unit(5))]),
}


@pytest.mark.parametrize("name", ONES)
def test_vectors_whose_norm_is_one_in_every_sample_keep_it(name: str) -> None:
    checked, samples = ONES[name]
    report = opsmith.check(checked, samples=samples, only=["gradient", "values"], effort="quick")
    assert not report.errors, report


def test_a_vector_of_norm_one_is_restored() -> None:
    subject = subject_of(Reflected, ONES["unit vectors"][1], 0, EFFORTS["quick"])
    (form,) = forms_of(subject)
    given = ONES["unit vectors"][1][0][1]
    torch.testing.assert_close(form.restored(given, 7 * given), given)
    assert torch.equal(form.restored(given, torch.zeros_like(given)), given)
    (more,) = (form.restored(given, torch.zeros(4, 1)),)
    assert float(more.norm()) == 1.0


def test_a_row_of_zeros_and_ones_shows_no_probabilities() -> None:
    subject = subject_of(Energy, [(torch.eye(3)[:2].double(), drawn(3, 3))], 0, EFFORTS["quick"])
    assert not forms_of(subject)


def in_ball(*shape: int, dim: int = -1) -> Tensor:
    """Vectors of norms between 0.3 and 0.8."""
    given = drawn(*shape)
    norms = given.norm(dim=dim, keepdim=True)
    return given / norms * torch.linspace(0.3, 0.8, norms.numel(), dtype=torch.float64).view(norms.shape)


class Distance(Function):
    """The distance of points in the Poincaré ball; outside of it, the forward takes points on its surface."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor) -> Tensor:
        rooms = [1 - each.square().sum(-1).clamp(max=1 - 1e-5) for each in (u, v)]
        cosh = 1 + 2 * (u - v).square().sum(-1) / (rooms[0] * rooms[1])
        ctx.save_for_backward(u, v, cosh, *rooms)
        return cosh.acosh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        u, v, cosh, one, other = (each.unsqueeze(-1) for each in ctx.saved_tensors)
        u, v = u.squeeze(-1), v.squeeze(-1)
        by_cosh = grad.unsqueeze(-1) / (cosh.square() - 1).clamp(min=1e-12).sqrt()
        apart = 4 * (u - v) / (one * other)
        return by_cosh * (apart + 2 * (cosh - 1) * u / one), by_cosh * (2 * (cosh - 1) * v / other - apart)


class Barrier(Function):
    """The logarithmic barrier of columns in a ball, with a least room."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        room = (1 - x.square().sum(0)).clamp(min=1e-6)
        ctx.save_for_backward(x, room)
        return -room.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, room = ctx.saved_tensors
        return 2 * grad * x / room


class Height(Function):
    """The height of a half sphere over one point."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height = (1 - x.square().sum()).clamp(min=0).sqrt()
        ctx.save_for_backward(x, height)
        return height

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, height = ctx.saved_tensors
        return -grad * x / height.clamp(min=1e-8)


class Artanh(Function):
    """The inverse of `tanh`, of numbers that it clamps first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inside = x.clamp(-1 + 1e-6, 1 - 1e-6)
        ctx.save_for_backward(inside)
        return (inside.log1p() - (-inside).log1p()) / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inside,) = ctx.saved_tensors
        return grad / (1 - inside.square())


BOUNDED: dict[type[Function], list[Any]] = {
    Distance: [(in_ball(3, 4), -in_ball(3, 4).flip(0)), (in_ball(2, 3), in_ball(2, 3).flip(0))],
    Barrier: [(in_ball(3, 4, dim=0),)],
    Height: [(in_ball(5),)],
    Artanh: [(torch.linspace(-0.9, 0.8, 12, dtype=torch.float64).view(3, 4),)],
}


@pytest.mark.parametrize("checked", BOUNDED, ids=lambda each: each.__name__)
def test_a_gradient_that_is_wrong_beyond_the_bound_of_its_forward_is_a_warning(checked: Any) -> None:
    report = opsmith.check(checked, samples=BOUNDED[checked], only=["gradient", "values"], effort="quick")
    assert {each.severity for each in report.failures} == {"warning"}, report
    assert {each.given for each in report.failures} == {"strained"}, report
    assert all("as in every sample" in each.message for each in report.failures)


class Projection(Function):
    """Rows in a ball; others move onto its surface, which the backward forgets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp(min=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clone()


class Clamped(Function):
    """Numbers times three up to one, of which the backward forgets the clamp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad


class Steep(Function):
    """A steep curve that has no bound, wrong above one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (3 * x).exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * grad * (3 * x.clamp(max=1)).exp()


class ForgetsOnAxes(Barrier):
    """Wrong inside of the ball, at a zero."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return torch.where(x == 0, grad, Barrier.backward(ctx, grad))


class WrongHalfWay(Artanh):
    """Wrong inside of the interval, where no sample is."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inside,) = ctx.saved_tensors
        return Artanh.backward(ctx, grad) * (1 + (inside >= 0.5))


UNBOUNDED: dict[type[Function], Any] = {
    Projection: in_ball(4, 3),
    Clamped: in_ball(4, 3),
    Steep: in_ball(4, 3),
    ForgetsOnAxes: in_ball(3, 4, dim=0),
    WrongHalfWay: 0.3 * in_ball(3, 4),
}


@pytest.mark.parametrize("checked", UNBOUNDED, ids=lambda each: each.__name__)
def test_a_bound_that_is_no_end_of_the_forward_and_a_fault_inside_of_one_stay_errors(checked: Any) -> None:
    report = opsmith.check(checked, samples=[(UNBOUNDED[checked],)], only=["values"], effort="quick")
    assert report.errors, report
