"""Modules, and what holds them, among the arguments: each call has a copy in the state that was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import opsmith
from opsmith.checking.effort import EFFORTS
from opsmith.checking.samples.object_arguments import (
    ObjectArguments,
    ObjectState,
    copied_object,
    tensors_of_object,
)
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject_kinds import subject_of
from opsmith.core.call_arguments import CallArguments
from opsmith.core.origins.function_class import class_of

X = torch.linspace(-2, 2, 12).view(4, 3) + 0.013
ONLY = ["forward", "gradient", "surrogate", "determinism", "effects", "state"]


class Applied(Function):
    """Runs a module, or a function, again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (by_x,) = torch.autograd.grad(ctx.run(x), x, grad)
        return by_x, None


class ForAllParameters(Applied):
    """Differentiates by parameters that may be frozen."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parameters = [each for each in tensors_of_object(ctx.run).values() if each.is_floating_point()]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            by_x, *_ = torch.autograd.grad(ctx.run(x), (x, *parameters), grad)
        return by_x, None


class ForTrainedAlone(Applied):
    """Takes a frozen module for one that nothing flows through."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        by_x, _ = Applied.backward(ctx, grad)
        return (by_x if any(each.requires_grad for each in ctx.run.parameters()) else 0 * by_x), None


class RecordsWhileTrained(Applied):
    """Gives a result without a graph where its module is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        result = Applied.forward(ctx, x, run)
        if not run.weight.requires_grad:
            ctx.mark_non_differentiable(result)
        return result


class Accumulates(Applied):
    """Leaves the gradients of parameters in their `.grad`."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.run(x).backward(grad)
        return x.grad, None


class Checkpoint(Function):
    """Runs again what it was given, for the input and the parameters that need a gradient."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(x.requires_grad)
            wanted = [each for each in (x, *parameters) if each.requires_grad]
            found = iter(torch.autograd.grad(ctx.run(x), wanted, grad, allow_unused=True))
        return (None, *(next(found) if each.requires_grad else None for each in (x, *parameters)))


class Updates(Function):
    """Takes off the mean of earlier calls, and writes its own into a buffer of a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.Module) -> Tensor:
        mean = norm.get_buffer("running_mean")
        centred = x - mean
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        return 3 * centred

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad, None


class UpdatesAndWrong(Updates):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class ScalesParameters(Applied):
    """Writes into the parameters of a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        with torch.no_grad():
            run.weight.mul_(0.5)
        return Applied.forward(ctx, x, run)


class Trains(Applied):
    """Switches a module to training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        run.train()
        return Applied.forward(ctx, x, run)


class Graph(nn.Module):
    """Multiplies by a sparse matrix, which is a buffer or a parameter."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        if isinstance(matrix, nn.Parameter):
            self.matrix = matrix
        else:
            self.register_buffer("matrix", matrix)
        self.scale = nn.Parameter(torch.full((), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.matrix, x) * self.scale


class WritesIntoMatrix(Applied):
    """Writes into the numbers of a sparse buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        run.matrix.mul_(0.5)
        return Applied.forward(ctx, x, run)


def linear(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, **options)


def closure() -> Callable[[Tensor], Tensor]:
    module = linear()
    return lambda x: module(x).tanh()


def method() -> Callable[[Tensor], Tensor]:
    return linear().forward


def bound() -> Callable[[Tensor], Tensor]:
    return partial(nn.functional.linear, weight=nn.Parameter(torch.arange(6.0).view(2, 3)))


def check(function_class: type[Function], *arguments: Any, kind: str = "") -> opsmith.Report:
    checked: Any = function_class
    if kind:
        checked = opsmith.adopt(
            function_class, "object_arguments::kind", kind=kind, samples=lambda: [arguments]
        )
        return opsmith.check(checked, only=ONLY, effort="quick")
    return opsmith.check(checked, samples=[arguments], only=ONLY, effort="quick")


def faults(found: opsmith.Report) -> set[tuple[str, str, str]]:
    return {(each.property, each.cause, each.severity) for each in found.failures}


HOLDERS = [linear, closure, method, bound, partial(linear, bias=False)]


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("make", HOLDERS, ids=["module", "closure", "method", "partial", "one parameter"])
def test_a_class_that_takes_a_module_is_checked_in_float64(make: Callable[[], Any]) -> None:
    found = check(Applied, X, make())
    assert not found.failures, str(found)


@pytest.mark.slow
@pytest.mark.every(8)
@pytest.mark.parametrize("make", HOLDERS, ids=["module", "closure", "method", "partial", "one parameter"])
def test_a_frozen_parameter_of_an_object_that_ends_the_backward_is_found(make: Callable[[], Any]) -> None:
    found = check(ForAllParameters, X, make())
    assert faults(found) == {("gradient", "input-needs-grad", "error")}, str(found)
    assert ", it raises RuntimeError" in found.failures[0].message


def test_a_frozen_parameter_beside_a_surrogate_gradient_is_found() -> None:
    found = check(ForAllParameters, X, linear(), kind="surrogate")
    assert faults(found) == {("surrogate", "input-needs-grad", "error")}, str(found)


@pytest.mark.slow
def test_a_gradient_that_vanishes_where_a_module_is_frozen_is_found() -> None:
    found = check(ForTrainedAlone, X, linear())
    (failure,) = found.failures
    assert (failure.property, failure.cause, failure.input) == ("gradient", "input-needs-grad", "x")
    assert "differs where no parameter of `run` requires a gradient" in failure.message


@pytest.mark.slow
def test_a_graph_that_is_lost_where_a_module_is_frozen_is_found() -> None:
    (failure,) = check(RecordsWhileTrained, X, linear()).failures
    assert (failure.property, failure.cause, failure.input) == ("gradient", "input-needs-grad", "x")
    assert "where `weight` of `run` requires no gradient: it is None, where a tensor" in failure.message


@pytest.mark.slow
def test_a_module_with_a_sparse_buffer_is_checked() -> None:
    module = Graph(torch.eye(4).to_sparse())
    found = opsmith.check(Applied, samples=[(X, module)], skip=["second_order", "integration"])
    assert found.passed, str(found)
    assert not found.errors + found.warnings, str(found)


SPARSE = [Tensor.to_sparse_csr, lambda matrix: nn.Parameter(matrix.to_sparse())]


@pytest.mark.slow
@pytest.mark.every(5)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("make", SPARSE, ids=["rows", "parameter"])
def test_a_module_with_a_sparse_tensor_that_torch_does_not_copy_is_not_cast(make: Any) -> None:
    found = check(Applied, X, Graph(make(torch.eye(4))))
    assert faults(found) == {("forward", "raises", "limit")}, str(found)
    assert "it takes float32 and not float64" in found.failures[0].message


@pytest.mark.slow
def test_a_write_into_a_sparse_tensor_of_a_module_is_found() -> None:
    found = check(WritesIntoMatrix, X, Graph(torch.eye(4).to_sparse()).eval())
    assert ("effects", "mutates-input", "error") in faults(found), str(found)


@pytest.mark.slow
def test_a_module_that_the_author_froze_is_tried_in_training() -> None:
    frozen = linear().requires_grad_(False)
    found = check(ForTrainedAlone, X, frozen)
    assert ("gradient", "input-needs-grad", "error") in faults(found), str(found)
    assert not check(Applied, X, frozen).failures


@pytest.mark.slow
def test_parameters_that_are_arguments_as_well_are_left_alone() -> None:
    module = linear()
    found = check(Checkpoint, module, X, *module.parameters())
    assert not found.failures, str(found)


@pytest.mark.slow
def test_gradients_that_go_to_parameters_of_an_object_are_a_warning() -> None:
    found = check(Accumulates, X, linear())
    assert faults(found) == {("effects", "side-effect", "warning")}, str(found)
    assert "adds to the `.grad` of `weight`, `bias` of `run`" in found.failures[0].message


@pytest.mark.slow
def test_running_statistics_of_a_module_in_training_are_noted_and_hide_nothing() -> None:
    norm = nn.BatchNorm1d(3)
    found = check(Updates, X, norm)
    assert not found.failures, str(found)
    (effects,) = [each for each in found.outcomes if each.property == "effects"]
    note = (
        "a call changes `running_mean` of `norm`, which is in training mode: each call of this check "
        "began with a fresh copy"
    )
    assert effects.notes == (note,)
    assert ("gradient", "scale", "error") in faults(check(UpdatesAndWrong, X, norm))
    assert not norm.get_buffer("running_mean").any()


@pytest.mark.slow
def test_a_write_into_what_a_module_holds_is_found() -> None:
    assert ("effects", "mutates-input", "error") in faults(check(Updates, X, nn.BatchNorm1d(3).eval()))
    found = check(ScalesParameters, X, linear())
    assert ("effects", "mutates-input", "error") in faults(found), str(found)
    failure = next(each for each in found.failures if each.property == "effects")
    assert failure.message == "a call wrote into `weight` of `run`; work on a copy, `.clone()`"


@pytest.mark.slow
def test_a_flag_of_a_module_that_changes_is_a_side_effect() -> None:
    found = check(Trains, X, linear().eval())
    assert ("effects", "side-effect", "error") in faults(found), str(found)
    assert "changes `training` of `run`" in str(found)


def test_a_copy_of_an_object_shares_nothing_with_it() -> None:
    for make in HOLDERS:
        own = make()
        copied = copied_object(own, torch.float64, None)
        pairs = zip(tensors_of_object(own).values(), tensors_of_object(copied).values(), strict=True)
        for one, other in pairs:
            assert other.dtype == torch.float64
            assert one.dtype == torch.float32
            assert one.data_ptr() != other.data_ptr()


def test_an_object_without_tensors_stays_as_it_is() -> None:
    assert not ObjectArguments([X, print, "text", {"k": 3}, torch.float32, len])


def test_derived_samples_share_the_copies_of_their_objects() -> None:
    operator = opsmith.adopt(Applied, "object_arguments::shared", samples=lambda: [(X, linear())])
    adopted = class_of(operator.specification.origin)
    module = linear()
    sample = Sample.of(0, CallArguments(tuple(adopted.packed([X, module]))), operator.specification.schema)
    (argnum,) = sample.objects
    fewer = tuple(value[:2] if value is X else value for value in sample.flat)
    derived = replace(sample, flat=fewer, origin="fewer rows")
    assert derived.at()[argnum] is sample.at()[argnum]
    assert sample.at()[argnum] is not module
    other = tuple(linear() if value is module else value for value in sample.flat)
    assert replace(sample, flat=other).at()[argnum] is not sample.at()[argnum]


def test_a_copied_function_shares_what_the_original_shares() -> None:
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return layer.weight, weight

    one, other = copied_object(both, None, None)()
    assert one is other
    assert one is not weight


def test_a_copied_function_sees_a_name_that_is_assigned_later() -> None:
    def later() -> torch.Tensor:
        return unassigned

    made = copied_object(later, None, None)
    unassigned = torch.ones(1)
    assert made() is unassigned


def test_the_attributes_of_a_function_are_copied_too() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    scaled.weight = torch.ones(2)  # type: ignore[attr-defined]
    made = copied_object(scaled, torch.float64, None)
    assert made.weight.dtype == torch.float64
    assert scaled.weight.dtype == torch.float32  # type: ignore[attr-defined]


class Curve:
    """Holds its coefficients in a tuple of a list, and calls itself through a function."""

    def __init__(self, *coefficients: Tensor) -> None:
        self.parts = [coefficients]

    def __call__(self, x: Tensor) -> Tensor:
        ((scale, offset),) = self.parts
        return (x * scale).sin() + offset


def nested(scale: Tensor, offset: Tensor) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor) -> Tensor:
        return x * scale

    def shifted(x: Tensor, shift: Tensor = offset) -> Tensor:
        return scaled(x).sin() + shift

    return shifted


class Holding(nn.Module):
    """Has the coefficients as parameters, and itself in one of its attributes."""

    def __init__(self, scale: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(scale), nn.Parameter(offset)
        self.around = [self.forward]

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin() + self.offset


class Solved(Function):
    """Differentiates what it was given, again in its backward, by tensors that are arguments as well."""

    factor = 1.0

    @classmethod
    def forward(cls, ctx: Any, run: Any, x: Tensor, scale: Tensor, offset: Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x, scale, offset)
        return run(x)

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Any:
        x, *others = ctx.saved_tensors
        wanted = [each for each in others if each.requires_grad]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            by_x, *found = torch.autograd.grad(ctx.run(x), [x, *wanted], grad)
        rest = iter(found)
        by_scale, by_offset = (next(rest) if each.requires_grad else None for each in others)
        return None, by_x, None if by_scale is None else cls.factor * by_scale, by_offset


class HalfSolved(Solved):
    factor = 0.5


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers).requires_grad_()


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("make", [Curve, nested, Holding], ids=["attribute", "closure", "module"])
@pytest.mark.parametrize(("function", "causes"), [(Solved, set()), (HalfSolved, {"scale"})])
def test_an_argument_is_the_same_tensor_within_an_object(make: Any, function: Any, causes: set[str]) -> None:
    run = make(leaf(0.7, 1.3, -0.4), leaf(0.1, 0.2, 0.3))
    found = opsmith.check(
        function,
        samples=[(run, X, *tensors_of_object(run).values())],
        only=[*ONLY, "layouts", "linearity", "state", "memory"],
        effort="quick",
    )
    assert {each.cause for each in found.failures} == causes, str(found)


class Adjoint(Function):
    """Returns the gradient by the parameters of a module as that by their row, which it does not read."""

    factor = 1.0

    @classmethod
    def row(cls, module: nn.Module) -> Tensor:
        return torch.cat([each.detach().flatten() for each in module.parameters()])

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any, row: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @classmethod
    def _gradients(cls, ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            trained = [each for each in ctx.module.parameters() if each.requires_grad]
            by_x, *found = torch.autograd.grad(ctx.module(x), (x, *trained), grad)
        known = dict(zip(map(id, trained), found, strict=True))
        every = [known.get(id(each), torch.zeros_like(each)) for each in ctx.module.parameters()]
        return by_x, None, cls.factor * torch.cat([each.flatten() for each in every])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Adjoint._gradients(ctx, grad)


class TwiceAdjoint(Adjoint):
    factor = 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return TwiceAdjoint._gradients(ctx, grad)


@pytest.mark.parametrize("checked", [Adjoint, TwiceAdjoint])
def test_a_row_of_parameters_stands_for_them(checked: type[Adjoint]) -> None:
    module = nn.Linear(3, 2)
    kept = [each.detach().clone() for each in module.parameters()]
    samples = [(X, module, Adjoint.row(module))]
    report = opsmith.check(checked, samples=samples, only=["gradient"], effort="quick")
    assert [each.input for each in report.errors] == (["row"] if checked is TwiceAdjoint else []), report
    assert all(map(torch.equal, kept, module.parameters()))


class Solver:
    """Keeps the last result to begin with, and its matrix in a layout that no other device has."""

    def __init__(self) -> None:
        self.guess: Tensor | None = None
        self.calls: list[Tensor] = []
        self.matrix = torch.eye(3).to_sparse()

    def __call__(self, x: Tensor) -> Tensor:
        if self.guess is not None and self.guess.shape != x.shape:
            raise ValueError("another shape than before")
        self.guess = 2.0 * x
        self.calls.append(self.guess)
        return self.guess


class Solves(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, solver: Any) -> Tensor:
        return solver(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2.0 * grad, None


def test_what_an_object_keeps_between_calls_is_restored_and_no_leak() -> None:
    solver = Solver()
    report = opsmith.check(Solves, samples=[(X, solver)], only=[*ONLY, "fake", "memory"], effort="quick")
    assert not report.errors, report
    assert solver.guess is None
    assert not solver.calls
    (held,) = (each for each in report.warnings if each.property == "memory")
    assert (held.cause, "is kept by `solver`" in held.message) == ("held", True), held


def test_an_object_with_a_tensor_that_cannot_be_cast_is_copied_all_the_same() -> None:
    solver = Solver()
    made = copied_object(solver, None, torch.device("meta"))
    assert made is not solver
    assert made.matrix.device.type == "cpu"


def test_what_a_module_caches_is_restored() -> None:
    module = nn.Linear(3, 2)
    module.seen = []  # type: ignore[assignment]
    state = ObjectState.of(module)
    module.seen.append(X)  # type: ignore[operator]
    module.last = X
    del module._parameters["bias"]
    state.restore()
    assert not module.seen
    assert not hasattr(module, "last")
    assert module.bias is not None


class Multiplies(Function):
    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad, grad


def test_a_sample_in_another_dtype_keeps_what_its_objects_hold() -> None:
    module = nn.Linear(3, 2, bias=False).double()
    given = [(module, X.double(), module.weight)]
    (sample,) = subject_of(Multiplies, given, 0, EFFORTS["quick"]).samples
    assert sample.objects.arguments == sample.cast(torch.float32).objects.arguments == {2}


def test_parameters_on_another_device_are_no_row() -> None:
    meta = nn.Linear(2, 1, bias=False, device="meta")
    assert not ObjectArguments([meta, torch.ones(2)]).flattened
