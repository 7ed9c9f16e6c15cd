"""The rule of a node: what it saves, the name in a graph, and a backward by formulas through torch."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.testing import assert_close

import opsmith
from opsmith import errors
from opsmith.torch_library.autograd.node import Node, TransformedNode, node_class, through


class Squares(Function):
    """It keeps a value that it computed on the way, so that a second order needs the argument from before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sin().asin())
        ctx.mark_dirty(x)
        return x.mul_(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


def squares(x: Tensor) -> None:
    x.mul_(x.clone())


def both(x: Tensor, y: Tensor) -> None:
    x.mul_(y)
    y.exp_()


by_formula = opsmith.operator("rules::squares", mutates=["x"])(squares).gradients(
    x=lambda grad_x, x: 2 * grad_x * x
)
of_two = opsmith.operator("rules::both", mutates=["x", "y"])(both).gradients(
    x=lambda grad_x, y: grad_x * y, y=lambda grad_x, grad_y, x, y: grad_x * x + grad_y * y.exp()
)
by_class = opsmith.adopt(Squares, "rules::squares_of_a_class")
WRITING: dict[str, tuple[Callable[..., Any], int]] = {
    "a formula": (by_formula, 1),
    "formulas of two arguments": (of_two, 2),
    "a class": (by_class, 1),
}


@pytest.mark.parametrize("name", WRITING)
def test_the_copy_of_what_is_written_over_is_saved_alone(name: str) -> None:
    """A hook that moves saved tensors elsewhere moves the copy, too: nothing else holds it."""
    operator, count = WRITING[name]
    leaves = [torch.tensor([0.2, 0.3, 0.4], requires_grad=True) for _ in range(count)]

    def call() -> tuple[list[Tensor], list[weakref.ref[Tensor]]]:
        saved: list[weakref.ref[Tensor]] = []
        written = [leaf * 1 for leaf in leaves]

        def pack(tensor: Tensor) -> Tensor:
            saved.append(weakref.ref(tensor))
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            operator(*written)
        return written, saved

    call()  # the first run of a class copies what later runs need not
    written, saved = call()
    assert len(saved) >= count
    kept = [ref() for ref in saved]
    assert all(each is None or any(each is one for one in written) for each in kept)
    del kept
    found = torch.autograd.grad(written, leaves, [torch.ones(3)] * count)
    x = leaves[0].detach()
    expected = [2 * x] if count == 1 else [x, x + x.exp()]
    assert_close(list(found), expected)


@opsmith.operator("rules::scaled")
def scaled(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin()


scaled.gradients(x=lambda grad, x, w: grad * (x * w).cos() * w, w=lambda grad, x, w: grad * (x * w).cos() * x)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_node_under_a_transform_has_the_name_of_its_operator(levels: int) -> None:
    names: list[str] = []

    def function(x: Tensor) -> Tensor:
        result = scaled(x, torch.tensor(2.0))
        names.append("" if result.grad_fn is None else result.grad_fn.name())
        return result

    derivative: Any = function
    for _ in range(levels):
        derivative = torch.func.grad(derivative)
    x = torch.tensor(0.5)
    expected = [2 * torch.cos(2 * x), -4 * torch.sin(2 * x)][levels - 1]
    assert_close(derivative(x), expected)
    assert all(name.startswith("scaled") and name.endswith("Backward") for name in names if name)


Formula = Callable[..., Any]


def through_torch(x_formula: Formula, w_formula: Formula, number: int) -> Any:
    """A new operator, whose first call goes through the dispatcher."""
    operator = opsmith.operator(f"rules::first_{number}")(times)
    return operator.gradients(x=x_formula, w=w_formula)


def times(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def expanded(grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return grad * x  # of the shape of the result: summed to that of `w`


ANSWERS: dict[str, tuple[Formula, Formula]] = {
    "as they are": (lambda grad, w: grad * w, lambda grad, x: (grad * x).sum(0)),
    "broadcast": (lambda grad, w: grad * w, expanded),
    "wider": (lambda grad, w: (grad * w).double(), lambda grad, x: (grad * x).sum(0)),
    "sparse": (lambda grad, w: (grad * w).to_sparse(), lambda grad, x: (grad * x).sum(0)),
}


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "with a graph"])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_first_call_fits_what_formulas_return(name: str, create_graph: bool) -> None:
    x_formula, w_formula = ANSWERS[name]
    operator = through_torch(x_formula, w_formula, 2 * list(ANSWERS).index(name) + create_graph)
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64 if name == "wider" else None, requires_grad=True)
    grad = torch.full((2, 3), 2.0, dtype=w.dtype)
    found = torch.autograd.grad(operator(x, w), (x, w), grad, create_graph=create_graph)
    expected = torch.autograd.grad(x * w, (x, w), grad)
    assert_close([each.detach() for each in found], list(expected))


def test_a_formula_that_raises_runs_once_and_is_named() -> None:
    runs: list[int] = []

    def raising(grad: Tensor) -> Tensor:
        runs.append(1)
        raise ValueError("planted")

    operator = through_torch(raising, lambda grad, x: (grad * x).sum(0), 100)
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3)
    with pytest.raises(ValueError, match="planted") as caught:
        operator(x, w).backward(torch.ones(2, 3))
    assert len(runs) == 1
    assert any("the gradient of `x` of rules::first_100" in note for note in caught.value.__notes__)


def test_a_formula_that_writes_is_refused_in_a_first_call() -> None:
    operator = through_torch(lambda grad, w: grad * w, lambda grad, x: (grad.mul_(x)).sum(0), 101)
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(errors.SavedTensorModifiedError, match="wrote into `grad`"):
        operator(x, w).backward(torch.ones(2, 3))
    fixed = operator.gradients(w=lambda grad, x: (grad.clone().mul_(x)).sum(0))
    found = torch.autograd.grad(fixed(x, w), (x, w), torch.ones(2, 3))
    assert_close(list(found), [torch.ones(2, 3), torch.full((3,), 2.0)])


class Raising:
    """A rule for which torch has a warning when its node ends."""

    def forward(self, ctx: Any, flat: Any) -> Any:
        return self.compute(flat)

    def compute(self, flat: Any) -> Any:
        torch.ops.aten.std.default(flat[0].detach()[:1])
        raise ValueError("planted")


@pytest.mark.parametrize("base", [Node, TransformedNode], ids=lambda base: base.__name__)
@pytest.mark.parametrize("action", ["ignore", "always", "error"])
def test_what_a_rule_raises_arrives_after_a_warning_of_torch(base: Any, action: Any) -> None:
    """Torch gives its warning while the error is set."""
    rule: Any = Raising()
    with warnings.catch_warnings(record=True):
        warnings.filterwarnings(action, ".*degrees of freedom", UserWarning)
        with pytest.raises((ValueError, UserWarning)) as plain:  # torch 2.15 raises it where it is given
            rule.compute([torch.ones(2)])
        for _ in range(3):
            with pytest.raises(plain.type, match=re.escape(str(plain.value))) as caught:
                through(node_class("raising", base).apply, rule, torch.ones(2, requires_grad=True))
            assert caught.value.__context__ is None


def test_what_a_rule_raises_arrives_where_python_has_lost_it() -> None:
    def losing(*arguments: Any) -> Any:
        with suppress(ValueError):
            node_class("raising", Node).apply(*arguments)
        raise SystemError("returned NULL without setting an exception")

    rule: Any = Raising()
    with warnings.catch_warnings(action="ignore"), pytest.raises(ValueError, match="planted"):
        through(losing, rule, torch.ones(2))
