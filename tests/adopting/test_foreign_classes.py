"""Classes as they are found in the wild: what torch's `apply` accepts, an adopted operator accepts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import InplaceFunction

import opsmith

wide = torch.float64


class Scaled(Function):
    """`setup_context` unpacks an argument that a call may leave out."""

    @staticmethod
    def forward(x: Tensor, factor: float = 3.0) -> Any:
        return x * factor, x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return grad * ctx.factor + _, None


@pytest.mark.slow
def test_a_default_that_setup_context_unpacks() -> None:
    x = torch.randn(3, dtype=wide)
    scaled = opsmith.adopt(Scaled, "foreign::scaled", samples=lambda: [(x,), (x, 2.0)])
    assert torch.equal(scaled(x)[0], 3 * x)
    report = opsmith.check(Scaled, samples=[(x,), (x, 2.0)], only=["forward", "gradient"])
    assert report.passed, report


class Rounded(InplaceFunction):
    """Derived from torch's own class with an `__init__`, which `apply` never calls."""

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, scale: float = 2.0) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.scale, None


class Unused(Rounded):
    """Has an `__init__` that its methods cannot depend on."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_an_init_that_apply_never_calls() -> None:
    x = torch.randn(3, requires_grad=True)
    for function_class in (Rounded, Unused):
        operator = opsmith.adopt(function_class, f"foreign::{function_class.__name__}")
        operator(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((3,), 2.0))
        x.grad = None


class Anything(Function):
    """No annotation: a tensor, a number or None in one place, flags that choose the results, any *others."""

    @staticmethod
    def forward(ctx: Any, x, scale, mode, *others):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, scale if isinstance(scale, Tensor) else None)
        ctx.number = None if isinstance(scale, Tensor) else scale
        ctx.count = len(others)
        y = x if scale is None else x * scale
        return (y, None if mode == "alone" else (x > 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, scale = ctx.saved_tensors
        factor = scale if ctx.number is None else ctx.number
        grads = (grad if factor is None else grad * factor, None if scale is None else grad * x)
        return (*grads, None, *[None] * ctx.count)


def calls_of_anything() -> list[tuple[Any, ...]]:
    x = torch.randn(3, dtype=wide)
    return [
        (x, 2.0, "alone"),
        (x, torch.randn(3, dtype=wide), "both"),
        (x, None, "alone", x, x),
        (x, 3, "both", x, 4, [x, "name"]),
    ]


def gradients(function: Any, call: tuple[Any, ...]) -> list[Any]:
    given = [v.clone().requires_grad_() if isinstance(v, Tensor) else v for v in call[:2]]
    results = function(*given, *call[2:])
    asked = [value for value in given if isinstance(value, Tensor)]
    weights = torch.arange(1.0, 4.0, dtype=wide)
    return [*results, *torch.autograd.grad((results[0] * weights).sum(), asked)]


def test_a_class_without_annotations_and_samples_learns_from_its_calls() -> None:
    operator = opsmith.adopt(Anything, "foreign::anything")
    for call in [*calls_of_anything(), *calls_of_anything()]:
        torch.testing.assert_close(gradients(operator, call), gradients(Anything.apply, call))
    assert repr(operator) == (
        "<opsmith operator foreign::anything(Tensor x, Tensor? scale, int? scale_value, str mode, "
        "Tensor[] others, int? others_value) -> (Tensor, Tensor)>"
    )
    sampled = opsmith.adopt(Anything, "foreign::anything_sampled", samples=calls_of_anything)
    for call in calls_of_anything():
        torch.testing.assert_close(gradients(sampled, call), gradients(Anything.apply, call))


def test_a_call_that_fails_teaches_nothing() -> None:
    operator = opsmith.adopt(Scaled, "foreign::taught")
    before = repr(operator)
    with pytest.raises(TypeError, match="can't multiply"):
        operator("text")
    with pytest.raises(RuntimeError, match="must match the size"):
        operator(torch.ones(3), torch.ones(4))
    assert repr(operator) == before


class Interrupted(Function):
    """Its first forward runs while another thread makes a call."""

    between: Callable[[], None] | None = None

    @staticmethod
    def forward(ctx: Any, x):  # type: ignore[no-untyped-def]
        between, Interrupted.between = Interrupted.between, None
        if between is not None:
            between()
        pair = x * 2, x * 3
        return pair

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return 2 * first + 3 * second


def test_first_calls_of_two_threads() -> None:
    interrupted, x = opsmith.adopt(Interrupted, "foreign::interrupted"), torch.ones(2)

    def between() -> None:
        thread = threading.Thread(target=interrupted, args=(x,))
        thread.start()
        thread.join()

    Interrupted.between = between
    assert [each.tolist() for each in interrupted(x)] == [[2.0, 2.0], [3.0, 3.0]]


TABLE = np.array([1.0, 2.0])


class HasTable(Function):
    """Has a default that is equal to nothing, or to something element by element."""

    @staticmethod
    def forward(ctx: Any, x, table=TABLE):  # type: ignore[no-untyped-def]
        return x * float(table.sum())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad, None


def test_an_array_as_a_default() -> None:
    table = opsmith.adopt(HasTable, "foreign::table")
    assert table(torch.ones(2)).tolist() == [3.0, 3.0]
    assert table(torch.ones(2), np.array([1.0, 1.0])).tolist() == [2.0, 2.0]


class Misleading(Function):
    """Annotations that its callers do not keep, and a callable annotated as such."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, name: str, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        return act(x).clamp(low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None, None


def test_a_call_outranks_annotations() -> None:
    x = torch.randn(4)
    operator = opsmith.adopt(Misleading, "foreign::misleading", kind="surrogate")
    for low, name in ((-0.5, "a"), (torch.tensor(-0.5), None), (0.0, "b")):
        assert torch.equal(operator(x, low, name, torch.tanh), torch.tanh(x).clamp(low))


class Pair(NamedTuple):
    tensor: Tensor
    number: int


class Settings(NamedTuple):
    factor: float
    name: str


class Configured(Function):
    """Runs on real tensors only, and takes a named tuple without tensors."""

    @staticmethod
    def forward(ctx: Any, x, settings):  # type: ignore[no-untyped-def]
        return torch.from_numpy(x.numpy() * settings.factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def test_a_named_tuple_without_tensors_in_a_trial() -> None:
    configured, settings = opsmith.adopt(Configured, "foreign::configured"), Settings(2.0, "twice")
    assert configured(torch.ones(3), settings).tolist() == [2.0, 2.0, 2.0]
    assert configured(torch.ones(3, device="meta"), settings).shape == (3,)


class ScaledBy(Function):
    """Takes a tensor or a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float | Tensor, mode="once"):  # type: ignore[no-untyped-def]
        return x * scale * (2 if mode == "twice" else 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


def test_the_operators_own_arguments_by_keyword_in_any_order() -> None:
    x = torch.ones(2)
    scaled = opsmith.adopt(ScaledBy, "foreign::scaled_by", samples=[(x, x), (x, 2.0)])
    given = {"mode": None, "scale_value": 3.0, "x": x, "scale": None}
    assert scaled(**given).tolist() == [3.0, 3.0]
    assert "(Tensor x, Tensor? scale, int? scale_value, str? mode)" in repr(scaled)


class Holds(Function):
    """Tensors in a list, a dict and a named tuple, which have no gradient, as under `apply`."""

    @staticmethod
    def forward(ctx: Any, x, parts, table, pair):  # type: ignore[no-untyped-def]
        ctx.factor = sum(parts) * table["w"] * pair.tensor * pair.number
        assert type(parts) is list
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None, None, None


def test_containers_of_tensors() -> None:
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    operator = opsmith.adopt(Holds, "foreign::holds")
    for table in ({"w": w}, {"w": w, "n": 3}):
        call = (x, [w, w], table, Pair(w, 2))
        result = operator(*call)
        assert torch.equal(result, Holds.apply(*call))
        assert torch.equal(*(torch.autograd.grad(each.sum(), x)[0] for each in (result, Holds.apply(*call))))
    assert (
        torch.vmap(lambda x, w: operator(x, [w, w], {"w": w}, Pair(w, 2)))(
            torch.ones(2, 3), torch.ones(2, 3)
        )[0, 0].item()
        == 4.0
    )


class Clips(Function):
    """Writes into its input where a flag says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool | None = False) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            return x.clamp_(0)
        return x.clamp(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def test_a_flag_chooses_to_write() -> None:
    operator = opsmith.adopt(Clips, "foreign::clips", kind="surrogate")
    for inplace in (False, None, True, False, None, True):
        x = torch.tensor([-1.0, 2.0])
        assert operator(x, inplace).tolist() == [0.0, 2.0]
        assert x.tolist() == ([0.0, 2.0] if inplace else [-1.0, 2.0])


def test_samples_in_a_list_are_no_memory_of_a_call() -> None:
    x = torch.randn(3, dtype=wide)
    operator = opsmith.adopt(Inner, "foreign::listed", samples=[(x,)])
    report = opsmith.check(operator, only=["memory"])
    assert not report.failures, report


class TwoTangents(Scaled):
    """A tangent more than it has results."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        return tangent * ctx.factor, tangent, tangent


def test_a_tangent_too_many_is_a_finding() -> None:
    x = torch.randn(3, dtype=wide)
    operator = opsmith.adopt(TwoTangents, "foreign::two_tangents", samples=lambda: [(x,)])
    report = opsmith.check(operator, only=["forward_mode"])
    assert [failure.cause for failure in report.failures] == ["gradient-count"]


class Masked(Function):
    """Torch operations that no batch and no trace takes: a boolean mask, a number read from a tensor."""

    @staticmethod
    def forward(ctx: Any, x, largest):  # type: ignore[no-untyped-def]
        scale = x.abs().max().item() if largest else 1.0
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.relu() / scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found = grad / ctx.scale
        found[x < 0] = 0
        if ctx.scale != 1.0:
            at = x.abs().argmax()
            found[at] -= (grad * x.relu()).sum() / ctx.scale**2 * x[at].sign()
        return found, None


class Inner(Function):
    """Old style, and used by another class, inside of which torch.func refuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class DifferentiatesInside(Function):
    """Calls another class, and autograd, inside of forward and backward."""

    @staticmethod
    def forward(ctx: Any, x, module):  # type: ignore[no-untyped-def]
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            total = (Inner.apply(inside) * module.weight).sum()
            (ctx.slope,) = torch.autograd.grad(total, inside)
        return total.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * Inner.apply(ctx.slope).arcsin(), None


class AsksForGrad(Function):
    """Saves only where its input requires a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (1 + ctx.saved_tensors[0].abs()) ** 2


class Weighs(torch.nn.Module):
    weight = torch.tensor([0.1, 0.2, 0.3], dtype=wide)


CANNOT_BE_MAPPED = {
    "a mask": (Masked, (False,)),
    "a number": (Masked, (True,)),
    "autograd inside": (DifferentiatesInside, (Weighs(),)),
    "requires_grad": (AsksForGrad, ()),
}


@pytest.mark.parametrize("case", CANNOT_BE_MAPPED)
def test_transforms_of_code_that_runs_on_real_tensors_only(case: str) -> None:
    function_class, others = CANNOT_BE_MAPPED[case]
    kind = "surrogate" if function_class is AsksForGrad else "true"
    operator = opsmith.adopt(function_class, f"foreign::mapped_{case.replace(' ', '_')}", kind=kind)
    x = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]], dtype=wide)

    def total(function: Any, row: Tensor) -> Tensor:
        result: Tensor = (function(row, *others) * torch.tensor([1.0, 2.0, 3.0], dtype=wide)).sum()
        return result

    def expected(row: Tensor) -> Tensor:
        row = row.clone().requires_grad_()
        return torch.autograd.grad(total(function_class.apply, row), row)[0]

    slope = torch.func.grad(lambda row: total(operator, row))
    torch.testing.assert_close(slope(x[0]), expected(x[0]))
    torch.testing.assert_close(torch.vmap(slope)(x), torch.stack([expected(row) for row in x]))
    mapped = torch.vmap(lambda row: operator(row, *others))(x)
    torch.testing.assert_close(mapped, torch.stack([function_class.apply(row, *others) for row in x]))
    twice = torch.vmap(torch.vmap(lambda row: operator(row, *others)))(x.expand(2, 2, 3))
    torch.testing.assert_close(twice[1], mapped)
    if case == "autograd inside":
        with pytest.raises(opsmith.errors.TransformError, match="runs only on real tensors") as caught:
            torch.func.jvp(lambda row: total(operator, row), (x[0],), (torch.ones_like(x[0]),))
        assert caught.value.operator == operator.name


@pytest.mark.slow
@pytest.mark.xdist_group("foreign")
@pytest.mark.parametrize("case", CANNOT_BE_MAPPED)
def test_code_that_runs_on_real_tensors_only_compiled(case: str) -> None:
    function_class, others = CANNOT_BE_MAPPED[case]
    kind = "surrogate" if function_class is AsksForGrad else "true"
    operator = opsmith.adopt(function_class, f"foreign::compiled_{case.replace(' ', '_')}", kind=kind)
    x = torch.tensor([0.5, -1.0, 2.0], dtype=wide, requires_grad=True)
    operator(x, *others)
    compiled = torch.compile(lambda row: operator(row, *others), backend="aot_eager", fullgraph=True)
    for function in (compiled, lambda row: function_class.apply(row, *others)):
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=wide)
        (found,) = torch.autograd.grad((function(x) * weights).sum(), x)
        if function is compiled:
            first = found
    torch.testing.assert_close(first, found)


@opsmith.operator("foreign::sine_backward")
def sine_backward(upstream: Tensor, x: Tensor) -> Tensor:
    return upstream * x.cos()


class Sine(Function):
    """Runs on real tensors only; its author has an operator of the name that its backward would have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.numpy()).sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return sine_backward(grad, torch.from_numpy(ctx.saved_tensors[0].numpy()))


def test_the_name_of_a_backward_may_be_taken() -> None:
    sine, x = opsmith.adopt(Sine, "foreign::sine"), torch.tensor([0.5, -1.0])
    torch.testing.assert_close(torch.vmap(torch.func.grad(sine))(x), x.cos())
    assert torch.equal(sine_backward(x, x), x * x.cos())


class PerhapsTwo(Function):
    """Its second result is None where it is not asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, both: bool = False) -> Any:
        return x * 2, x * 3 if both else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        first, second = grads
        assert first is not None
        return 2 * first if second is None else 2 * first + 3 * second, None


def test_a_result_that_is_none_in_some_calls_may_be_none() -> None:
    operator = opsmith.adopt(PerhapsTwo, "foreign::perhaps_two")
    x = torch.ones(3, dtype=wide, requires_grad=True)
    assert operator(x)[1] is None
    first, second = operator(x, True)
    (found,) = torch.autograd.grad((first + second).sum(), x)
    torch.testing.assert_close(found, torch.full_like(x, 5.0))
