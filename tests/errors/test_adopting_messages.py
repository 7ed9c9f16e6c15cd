"""Messages of adopting a Function class, and of calling what was adopted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from functions import Square
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import opsmith
from opsmith import errors
from opsmith.core.location import where


class Empty(Function):
    pass


class WithState(Function):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class ByKeyword(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *, factor: float) -> Tensor:
        return x * factor


class Nothing(Function):
    @staticmethod
    def forward(ctx: Any, x):  # type: ignore[no-untyped-def]
        return None


class ANumber(Function):
    @staticmethod
    def forward(ctx: Any, x):  # type: ignore[no-untyped-def]
        return x * 2, 3


class Sparse(Function):
    @staticmethod
    def forward(ctx: Any, x):  # type: ignore[no-untyped-def]
        return x.to_sparse()


DECLARING: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "no name": (
        lambda: opsmith.adopt(Square),
        errors.NameFormatError,
        ["`namespace::name`", "None", 'opsmith.adopt(MyFunction, "mylib::my_function")'],
    ),
    "its apply": (
        lambda: opsmith.adopt(Square.apply, "refused::square"),
        errors.UsageError,
        ["argument: subject", "derived from torch.autograd.Function", "give the class, not its `apply`"],
    ),
    "no forward": (
        lambda: opsmith.adopt(Empty, "refused::empty"),
        errors.UsageError,
        ["refused::empty", "`Empty` has no `forward`", "as a static method"],
    ),
    "state": (
        lambda: opsmith.adopt(WithState, "refused::state"),
        errors.UsageError,
        ["`WithState` has an `__init__`", "of `__init__` to `forward`"],
    ),
    "unknown kind": (
        lambda: opsmith.adopt(Square, "refused::kind", kind="wrong"),
        errors.UsageError,
        ["argument: kind", "`true`, `surrogate`, `approximate`", "'wrong'", 'kind="surrogate"'],
    ),
    "by keyword": (
        lambda: opsmith.adopt(ByKeyword, "refused::keyword"),
        errors.ParameterKindError,
        ["`ByKeyword.forward` takes `factor` by keyword", "but `apply` passes no keywords", "by position"],
    ),
    "signature that cannot be read": (
        lambda: opsmith.adopt(Square, "refused::text", signature="x: Tensor"),
        errors.UsageError,
        ["`signature` cannot be read", "argument: signature", '"(x: Tensor, dim: int = 1) -> Tensor"'],
    ),
    "signature of another": (
        lambda: opsmith.adopt(Square, "refused::other", signature="(x: Tensor, y: Tensor) -> Tensor"),
        errors.UsageError,
        ["does not fit `Square.forward`", "expected: 1 argument: x", "got: 2: x, y", "without `ctx`"],
    ),
    "unknown result": (
        lambda: opsmith.adopt(Nothing, "refused::result"),
        errors.MissingAnnotationError,
        ["the results of `Nothing.forward` are not declared", "give `samples=`"],
    ),
    "result that is no tensor": (
        lambda: opsmith.adopt(ANumber, "refused::integer", samples=lambda: [(torch.ones(2),)]),
        errors.UnsupportedTypeError,
        ["`ANumber.forward` returns a value that is not a tensor", "got: int 3", "torch.as_tensor"],
    ),
    "result that is sparse": (
        lambda: opsmith.check(Sparse, samples=[(torch.ones(2),)]),
        errors.LayoutError,
        [
            "Sparse: `Sparse.forward` returns a tensor that is not strided and dense",
            "got: torch.sparse_coo",
            "`result.to_dense()`",
        ],
    ),
    "reference of other arguments": (
        lambda: opsmith.adopt(Square, "refused::reference", reference=lambda: torch.ones(2)),
        errors.NotAFunctionError,
        ["the reference cannot be called like the operator", "a function of `x`"],
    ),
    "reference that is none": (
        lambda: opsmith.adopt(Square, "refused::no_reference", reference=3),  # type: ignore[arg-type]
        errors.NotAFunctionError,
        ["the reference is not a function", "got: int 3"],
    ),
}


@pytest.mark.parametrize("case", DECLARING)
def test_declaring(case: str) -> None:
    call, kind, words = DECLARING[case]
    with pytest.raises(kind) as caught:
        call()
    for each in words:
        assert each in str(caught.value)


def x() -> Tensor:
    return torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)


class TwoWays(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, write: int) -> Tensor:
        return x.mul_(2).clone() if write else x * 2


class OneOrTwo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, two: bool) -> tuple[Tensor, Tensor]:
        return (x * 2, x * 3) if two else (x * 2,)  # type: ignore[return-value]


class MaybeNumber(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2.0  # type: ignore[return-value]


class TooFew(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class ForANumber(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: float) -> Tensor:
        return x * n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad


class WritesLater(Function):
    written = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.mul_(2) if cls.written else grad * 2


class ByNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.square(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * x.detach().numpy() * grad.detach().numpy())


class BackByNumpy(Square):
    backward = staticmethod(ByNumpy.backward)


def forward_by(computed: Callable[[Tensor], Any]) -> type[Function]:
    """A class whose forward leaves torch, and whose backward does not."""

    class Leaving(Square):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.from_numpy(np.square(computed(x)))

    return Leaving


LEAVING: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "detached": lambda x: x.detach().numpy(),
    "data": lambda x: x.data.numpy(),
}


@pytest.mark.parametrize("how", LEAVING)
def test_a_forward_that_leaves_torch_is_named_and_not_its_backward(how: str) -> None:
    function_class = forward_by(LEAVING[how])
    operator = adopted(function_class)
    for _ in range(2):
        with pytest.raises(
            errors.TransformError, match=r"Leaving\.forward` runs only on real tensors"
        ) as caught:
            torch.func.hessian(lambda v: operator(v).sum())(torch.ones(3))
        assert caught.value.where == where(function_class.forward)
    assert torch.equal(torch.func.grad(lambda v: operator(v).sum())(torch.ones(3)), torch.full((3,), 2.0))
    right = adopted(function_class, reference=lambda x: x * x)  # as the hint says
    assert torch.equal(torch.func.hessian(lambda v: right(v).sum())(torch.ones(3)), 2 * torch.eye(3))


def test_the_check_names_the_forward_that_leaves_torch() -> None:
    operator, only = adopted(forward_by(Tensor.numpy)), ["vmap", "batched_gradients"]
    report = opsmith.check(operator, samples=[(torch.randn(3, 4),)], only=only, effort="quick")
    (reason,) = (each.reason for each in report.outcomes if each.property == "batched_gradients")
    assert "Leaving.forward` cannot run under vmap" in reason


class TwoTangents(Square):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return tangent, tangent


class Undetached(ByNumpy):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(2 * x.numpy())


class Positive(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()[x.numpy() > 0])


class Once(Square):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class Draws(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(x) > 0.5
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.mask


class WrongRule(Square):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:  # type: ignore[override]
        return x * x


def adopted(function_class: type[Function], **options: Any) -> opsmith.Operator[..., Any]:
    return opsmith.adopt(function_class, f"refused::{function_class.__name__.lower()}", **options)


def other_calls(operator: opsmith.Operator[..., Any], *calls: tuple[Any, ...]) -> None:
    for call in calls:
        operator(*call)


def later_write() -> None:
    operator = adopted(WritesLater)
    operator(x()).square().sum().backward()
    WritesLater.written = True
    try:
        operator(x()).square().sum().backward()
    finally:
        WritesLater.written = False


def second_order(operator: opsmith.Operator[..., Any]) -> None:
    value = x()
    (gradient,) = torch.autograd.grad(operator(value).sum(), value, create_graph=True)
    gradient.sum().backward()


CALLING: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "another type": (
        lambda: adopted(Square)(2.0),
        errors.ArgumentError,
        ["refused::square: `x` has the wrong type", "expected: Tensor", "float 2.0", "adopt(..., signature="],
    ),
    "a write that comes later": (
        lambda: other_calls(adopted(TwoWays), (torch.ones(2), 0), (torch.ones(2), 1)),
        errors.MutationError,
        [
            "`TwoWays.forward` wrote into an input, but earlier runs did not",
            "argument: x",
            "x.clone()",
        ],
    ),
    "another number of results": (
        lambda: other_calls(adopted(OneOrTwo), (torch.ones(2), True), (torch.ones(2), False)),
        errors.ResultCountError,
        ["`OneOrTwo.forward` returned a different number of results", "a tuple of 2", "got: 1", "signature="],
    ),
    "a number": (
        lambda: adopted(MaybeNumber)(torch.ones(2)),
        errors.ResultTypeError,
        [
            "`MaybeNumber.forward` returned a different result",
            "argument: result",
            "float 2.0",
            "torch.as_tensor",
        ],
    ),
    "too few gradients": (
        lambda: adopted(TooFew)(x(), x()).sum().backward(),
        errors.GradientCountError,
        [
            "`TooFew.backward` does not return one gradient",
            "argument: y",
            "2 gradients: `x`, `y`",
            "got: 1",
            "in order",
        ],
    ),
    "a gradient for a number": (
        lambda: adopted(ForANumber)(x(), 2.0).sum().backward(),
        errors.GradientCountError,
        ["`ForANumber.backward` returns a gradient for `n`, which is not a tensor", "expected: None"],
    ),
    "a backward that writes later": (
        later_write,
        errors.SavedTensorModifiedError,
        ["`WritesLater.backward` wrote into a grad_output, but not in its first run", "grad.clone()"],
    ),
    "two tangents for one result": (
        lambda: torch.func.jvp(adopted(TwoTangents), (torch.ones(3),), (torch.ones(3),)),
        errors.GradientCountError,
        [
            "`TwoTangents.jvp` does not return one tangent for each result",
            "expected: 1 tangent",
            "got: 2",
            "one tangent for each",
        ],
    ),
    "NumPy of a saved tensor in a second order": (
        lambda: second_order(adopted(Undetached)),
        errors.TransformError,
        [
            "`Undetached.backward` cannot run in a second-order gradient",
            "there is no reference",
            "reference=...",
        ],
    ),
    "NumPy twice by transforms": (
        lambda: torch.func.hessian(lambda v: adopted(ByNumpy)(v).sum())(torch.ones(3)),
        errors.TransformError,
        ["`ByNumpy.forward` runs only on real tensors", "no second-order derivative", "reference=..."],
    ),
    "NumPy in the backward alone, twice by transforms": (
        lambda: torch.func.hessian(lambda v: adopted(BackByNumpy)(v).sum())(torch.ones(3)),
        errors.TransformError,
        ["`BackByNumpy.backward` runs only on real tensors", "no second-order derivative", "reference=..."],
    ),
    "results that depend on data, compiled": (
        lambda: torch.compile(adopted(Positive), backend="eager", fullgraph=True)(torch.tensor([1.0, -1.0])),
        errors.ShapeError,
        [
            "the results of `Positive.forward` depends on the numbers",
            "which compiled code cannot know",
            "got: ",
        ],
    ),
    "NumPy in a second order": (
        lambda: second_order(adopted(ByNumpy)),
        errors.GraphCutError,
        ["the gradients of `ByNumpy.backward` depend on `grad`", "once_differentiable", "reference=..."],
    ),
    "twice through once_differentiable": (
        lambda: second_order(adopted(Once)),
        errors.TransformError,
        ["`Once.backward` is marked with `once_differentiable`", "remove the mark", "reference=..."],
    ),
    "twice through once_differentiable, by transforms": (
        lambda: torch.func.hessian(lambda v: adopted(Once)(v).sum())(torch.ones(2)),
        errors.TransformError,
        ["`Once.backward` is marked with `once_differentiable`"],
    ),
    "drawing again": (
        lambda: torch.func.grad(lambda v: adopted(Draws, kind="stochastic")(v).sum())(torch.ones(2)),
        errors.TransformError,
        ["`Draws.forward` draws random numbers", "as an argument"],
    ),
    "forward mode of what is not linear": (
        lambda: torch.func.jvp(adopted(Square, kind="nonlinear"), (torch.ones(2),), (torch.ones(2),)),
        errors.GradientNotImplementedError,
        ["its backward is not linear in grad_output"],
    ),
    "a rule that returns no dimensions": (
        lambda: torch.vmap(adopted(WrongRule))(torch.ones(2, 3)),
        errors.ResultCountError,
        ["`WrongRule.vmap` does not return the results and their batch dimensions", "`(result, 0)`"],
    ),
}


@pytest.mark.parametrize("case", CALLING)
def test_calling(case: str) -> None:
    call, kind, words = CALLING[case]
    with pytest.raises(kind) as caught:
        call()
    for each in words:
        assert each in str(caught.value)
