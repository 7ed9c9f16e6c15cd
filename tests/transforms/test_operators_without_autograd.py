"""Formulas and references that call operators without autograd: derivatives are right, or refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import opsmith
from opsmith import errors
from opsmith.torch_library import capabilities

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*an autograd kernel was not registered:UserWarning",
        "ignore:There is a performance drop:UserWarning",
    ),
    pytest.mark.skipif(
        not (capabilities.on("library_operators") and capabilities.on("torch_func")),
        reason="what an operator of torch.library has, and a level of torch.func, have no public names",
    ),
]
LIBRARY = torch.library.Library("no_autograd", "DEF")


def in_torch(g: Tensor, x: Tensor) -> Tensor:
    return 2 * g * x


def in_numpy(g: Tensor, x: Tensor) -> Tensor:
    return torch.from_numpy(2 * g.detach().numpy() * x.detach().numpy())


def defined(name: str, key: str, kernel: Callable[..., Tensor]) -> Any:
    LIBRARY.define(f"{name}(Tensor g, Tensor x) -> Tensor")
    LIBRARY.impl(name, kernel, key)
    if key != "CompositeImplicitAutograd":
        torch.library.register_fake(f"no_autograd::{name}", lambda g, x: torch.empty_like(x), lib=LIBRARY)
    return getattr(torch.ops.no_autograd, name)


ON_CPU = defined("on_cpu", "CPU", in_torch)
EVERYWHERE = defined("everywhere", "CompositeExplicitAutograd", in_torch)
OUTSIDE = defined("outside", "CPU", in_numpy)
FALLING = defined("falling", "CPU", in_numpy)
LIBRARY.impl("falling", torch.library.fallthrough_kernel, "Autograd")
COMPOSITE = defined("composite", "CompositeImplicitAutograd", in_torch)


@torch.library.custom_op("no_autograd::custom", mutates_args=())
def CUSTOM(g: Tensor, x: Tensor) -> Tensor:  # noqa: N802
    return 2 * g * x


@torch.library.custom_op("no_autograd::custom_with_formula", mutates_args=())
def WITH_FORMULA(g: Tensor, x: Tensor) -> Tensor:  # noqa: N802
    return 2 * g * x


CUSTOM.register_fake(lambda g, x: torch.empty_like(x))
WITH_FORMULA.register_autograd(
    lambda ctx, grad: (2 * grad * ctx.saved_tensors[1], 2 * grad * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

WITHOUT = {
    "on_cpu": ON_CPU,
    "everywhere": EVERYWHERE,
    "outside": OUTSIDE,
    "falling": FALLING,
    "custom": CUSTOM,
    "custom_with_formula": WITH_FORMULA,  # torch does not take it under a transform
}
X = torch.tensor([1.0, 2.0, 3.0])


def with_formula(name: str, other: Any) -> Any:
    @opsmith.operator(f"no_autograd_formula::{name}")
    def square(x: Tensor) -> Tensor:
        return x * x

    return square.gradients(x=lambda grad, x: other(grad, x))


def by_reference(name: str, other: Any) -> Any:
    @opsmith.operator(f"no_autograd_reference::{name}")
    def square(x: Tensor) -> Tensor:
        return other(x, x) / 2

    return square


def with_kernel(name: str, other: Any) -> Any:
    @opsmith.operator(f"no_autograd_kernel::{name}")
    def square(x: Tensor) -> Tensor:
        return other(x, x) / 2

    square.kernel("cpu")(lambda x: x * x)
    return square


def total(operator: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: operator(x).sum()


SECOND: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda f: jvp(f, (X,), (torch.ones(3),))[1],
    "grad of grad": lambda f: grad(lambda x: grad(total(f))(x).sum())(X),
    "hessian": lambda f: hessian(total(f))(X),
    "jacrev of jacrev": lambda f: jacrev(jacrev(total(f)))(X),
    "jacfwd of grad": lambda f: jacfwd(grad(total(f)))(X),
    "vmap of hessian": lambda f: vmap(hessian(total(f)))(torch.stack([X, X])),
    "jacfwd of vmap": lambda f: jacfwd(vmap(total(f)))(torch.stack([X, X])),
    "vmap of a second order": lambda f: vmap(grad(lambda x: grad(total(f))(x).sum()))(torch.stack([X, X])),
}
FIRST: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: grad(total(f))(X),
    "jacrev": lambda f: jacrev(f)(X),
    "vmap of grad": lambda f: vmap(grad(total(f)))(torch.stack([X, X])),
}


def plain(x: Tensor) -> Tensor:
    return x * x


@pytest.mark.parametrize("name", WITHOUT)
def test_formula(name: str) -> None:
    square = with_formula(name, WITHOUT[name])
    for first in FIRST.values():
        assert torch.equal(first(square), first(plain)), "a first order goes through no derivative of it"
    for second in SECOND.values():
        with pytest.raises(errors.GraphCutError, match=f"the gradient of `x` calls `no_autograd::{name}`"):
            second(square)


@pytest.mark.parametrize("declared", [by_reference, with_kernel], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", WITHOUT)
def test_reference(name: str, declared: Any) -> None:
    square = declared(name, WITHOUT[name])
    for derivative in (FIRST | SECOND).values():
        with pytest.raises(errors.GraphCutError, match=f"the reference calls `no_autograd::{name}`"):
            derivative(square)


@pytest.mark.parametrize("declared", [with_formula, by_reference, with_kernel], ids=lambda f: f.__name__)
def test_composite_operator(declared: Any) -> None:
    """An operator that torch takes apart needs no autograd of its own."""
    square = declared("composite", COMPOSITE)
    for derivative in (FIRST | SECOND).values():
        assert torch.equal(derivative(square), derivative(plain))


def twice(operator: Any) -> Tensor:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(operator(x).sum(), x, create_graph=True)
    assert torch.equal(first, 2 * X)
    return torch.autograd.grad(first.sum(), x)[0]


@pytest.mark.parametrize("name", ["outside", "falling", "custom"])
def test_autograd_through_a_kernel_that_torch_does_not_see(name: str) -> None:
    with pytest.raises(errors.GraphCutError, match="torch does not know its derivative"):
        twice(with_formula(f"{name}_by_autograd", WITHOUT[name]))
    square = by_reference(f"{name}_by_autograd", WITHOUT[name])
    for _ in range(4):  # known calls, also
        square(X)
        x = X.clone().requires_grad_()
        result = square(x)
        assert torch.equal(result, X * X)
        with pytest.raises(errors.GraphCutError, match="the reference calls"):
            result.sum().backward()


@pytest.mark.parametrize("name", ["on_cpu", "everywhere", "custom_with_formula"])
def test_autograd_through_a_kernel_that_it_records(name: str) -> None:
    assert torch.equal(twice(with_formula(f"{name}_by_autograd", WITHOUT[name])), torch.full((3,), 2.0))
    assert torch.equal(twice(by_reference(f"{name}_by_autograd", WITHOUT[name])), torch.full((3,), 2.0))


def test_a_cut_that_only_a_later_call_reaches() -> None:
    """Under a transform each call is watched; in eager code the first, as docs/gradients.md says."""

    @opsmith.operator("no_autograd_reference::later")
    def later(x: Tensor, n: int) -> Tensor:
        return OUTSIDE(x, x) / 2 if n > 5 else x * x

    for _ in range(4):
        x = X.clone().requires_grad_()
        assert torch.equal(torch.autograd.grad(later(x, 1).sum(), x)[0], 2 * X)
    for derivative in (FIRST | SECOND).values():
        assert torch.equal(derivative(lambda x: later(x, 1)), derivative(plain))
        with pytest.raises(errors.GraphCutError, match="the reference calls `no_autograd::outside`"):
            derivative(lambda x: later(x, 9))


def test_check_finds_the_cut() -> None:
    for name in ("on_cpu", "outside"):
        report = opsmith.check(with_formula(f"{name}_checked", WITHOUT[name]), samples=[(X,)], effort="quick")
        found = [failure for failure in report.failures if failure.property == "second_order"]
        assert [(each.cause, each.severity) for each in found] == [("second-order", "warning")]
        assert f"calls `no_autograd::{name}`" in found[0].message


def test_the_hint_followed() -> None:
    followed = defined("followed", "CPU", in_numpy)
    square = with_formula("followed", followed)
    with pytest.raises(errors.GraphCutError) as caught:
        SECOND["hessian"](square)
    assert caught.value.hint is not None
    assert "`opsmith.adopt(torch.ops.no_autograd.followed, reference=...)`" in caught.value.hint
    opsmith.adopt(torch.ops.no_autograd.followed, reference=in_torch)
    for derivative in (FIRST | SECOND).values():
        assert torch.equal(derivative(square), derivative(plain))
    assert torch.equal(twice(square), torch.full((3,), 2.0))


def test_a_call_keeps_nothing() -> None:
    square = by_reference("keeps_nothing", OUTSIDE)
    gc.disable()
    try:
        for _ in range(3):
            x = X.clone().requires_grad_()
            seen = weakref.ref(x)
            result = square(x)
            del x, result
            assert seen() is None
    finally:
        gc.enable()


@pytest.mark.compile
@pytest.mark.xdist_group("operators-without-autograd")
def test_compiled() -> None:
    x = X.clone().requires_grad_()
    right = torch.compile(with_formula("compiled", OUTSIDE), backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(right(x).sum(), x)[0], 2 * X)
    cut = torch.compile(by_reference("compiled", OUTSIDE), backend="aot_eager", fullgraph=True)
    assert torch.equal(cut(X), X * X)
    with pytest.raises(Exception, match="the reference calls `no_autograd::outside`"):
        cut(x)


def class_with(name: str, backward: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def forward(x: Tensor) -> Tensor:
        return x**3

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    methods = {
        "generate_vmap_rule": True,
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(lambda ctx, grad: backward(grad, *ctx.saved_tensors)),
    }
    return type(name, (torch.autograd.Function,), methods)


ON_PURPOSE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros": lambda grad, x: torch.zeros_like(grad),
    "rounded": lambda grad, x: grad.round(),
    "half_detached": lambda grad, x: grad * x.detach(),
}


def penalised(function: Any, power: int) -> Tensor:
    """A second order beside something else, so that a constant gradient can be part of it."""
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad((function(x) ** power).sum(), x, create_graph=True)
    return torch.autograd.grad((first + x**3).sum(), x)[0]


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_constant_on_purpose_in_a_class(name: str) -> None:
    function = class_with(name, ON_PURPOSE[name])
    operator = opsmith.adopt(function, f"no_autograd_class::{name}", kind="surrogate")
    for first in (FIRST["grad"], FIRST["vmap of grad"], SECOND["grad of grad"]):
        assert torch.equal(first(operator), first(function.apply))
    for power in (1, 2):
        assert torch.equal(penalised(operator, power), penalised(function.apply, power))


def filled_by_numpy(grad: Tensor, x: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    found.numpy()[:] = (grad * 3 * x**2).detach().numpy()
    return found


LOST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "detached": lambda grad, x: (grad * 3 * x**2).detach(),
    "filled zeros": filled_by_numpy,
    "a new tensor": lambda grad, x: x.new_tensor((grad * 3 * x**2).detach().numpy()),
}


@pytest.mark.parametrize("name", LOST)
def test_class_that_loses_its_graph(name: str) -> None:
    """Zeros may be meant, and what a surrogate says is; other numbers without a graph are not."""
    operator = opsmith.adopt(
        class_with(name.title().replace(" ", ""), LOST[name]), f"no_autograd_lost::{name.split()[-1]}"
    )
    assert torch.equal(FIRST["grad"](operator), 3 * X**2)
    with pytest.raises(errors.GraphCutError, match="cannot see that the gradients"):
        penalised(operator, 1)


def keeping(backward: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A class that keeps a value on the way, for which its forward runs again in a second order."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(square := x * x)
        return square * x

    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(lambda ctx, grad: backward(grad, *ctx.saved_tensors)),
    }
    return type("Keeping", (torch.autograd.Function,), methods)


KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "detached": lambda grad, square: (grad * 3 * square).detach(),
    "NumPy": lambda grad, square: torch.from_numpy((grad * 3 * square).detach().numpy()),
    "data": lambda grad, square: grad.data * 3 * square.data,
}


@pytest.mark.parametrize("constant", [True, False], ids=["a constant grad_output", "one with a graph"])
@pytest.mark.parametrize("name", KEPT)
def test_class_that_keeps_a_value_and_loses_its_graph(name: str, constant: bool) -> None:
    def second_order(operator: Any) -> Tensor:
        x = X.clone().requires_grad_()
        result = operator(x).sum() if constant else operator(x).square().sum()
        (first,) = torch.autograd.grad(result, x, create_graph=True)
        return torch.autograd.grad((first.square() + 0 * x).sum(), x)[0]

    for kind in ("true", "surrogate"):
        operator = opsmith.adopt(keeping(KEPT[name]), "no_autograd_lost::keeping", kind=kind)
        for _ in range(2):
            with pytest.raises(errors.GraphCutError, match="cannot see that the gradients"):
                second_order(operator)
    # As the hint says.
    operator = opsmith.adopt(keeping(KEPT[name]), "no_autograd_lost::keeping", reference=lambda x: x**3)
    torch.testing.assert_close(second_order(operator), second_order(lambda x: x**3))


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.detach().numpy() ** 2 * grad.detach().numpy())


def test_a_reference_gives_a_second_order_with_a_constant_grad_output() -> None:
    """Nothing else shows that a gradient without a graph is no constant."""
    operator = opsmith.adopt(ByNumpy, "no_autograd_lost::by_numpy", reference=lambda x: x**3)
    for _ in range(2):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(operator(x).sum(), x, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * X)


def test_out_of_memory_is_no_reason_to_refuse_a_second_order() -> None:
    left = [2]

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("out of memory")
        return grad * 3 * x**2

    operator = opsmith.adopt(class_with("OutOfMemory", backward), "no_autograd_lost::out_of_memory")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            penalised(operator, 1)
    torch.testing.assert_close(penalised(operator, 1), penalised(lambda x: x**3, 1))


def test_zeros_of_a_class_are_meant() -> None:
    function = class_with("Zeros", lambda grad, x: torch.zeros_like(grad))
    operator = opsmith.adopt(function, "no_autograd_lost::meant")
    for order in (FIRST["grad"], FIRST["vmap of grad"], SECOND["grad of grad"]):
        assert torch.equal(order(operator), order(function.apply))


def test_class_that_leaves_torch() -> None:
    function = class_with("ByNumpy", lambda grad, x: torch.from_numpy(3 * grad.detach().numpy()))
    operator = opsmith.adopt(function, "no_autograd_class::by_numpy", kind="surrogate")
    assert torch.equal(FIRST["grad"](operator), torch.full((3,), 3.0))
    for power in (1, 2):
        with pytest.raises(errors.GraphCutError, match="cannot see that the gradients"):
            penalised(operator, power)


@pytest.mark.parametrize("name", ["on_cpu", "outside", "custom"])
def test_class_that_calls_it(name: str) -> None:
    function = class_with(f"Calls_{name}", lambda grad, x: 1.5 * WITHOUT[name](grad, x) * x)
    operator = opsmith.adopt(function, f"no_autograd_class::calls_{name}")
    assert torch.equal(FIRST["grad"](operator), 3 * X**2)
    with pytest.raises(errors.GraphCutError, match=f"calls `no_autograd::{name}`"):
        SECOND["grad of grad"](operator)
