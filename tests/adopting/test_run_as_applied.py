"""The code of a class runs as under `apply`: its forward without grad mode, under autocast of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import opsmith
from opsmith import errors
from opsmith.torch_library import capabilities


class Turn(Function):
    """It writes into chunks of a clone, which autograd does not record, and keeps an argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, angle: Tensor) -> Tensor:
        y = x.clone()
        a, b = y.chunk(2, -1)
        kept = a.clone()
        a.mul_(angle.cos()).sub_(b * angle.sin())
        b.mul_(angle.cos()).add_(kept * angle.sin())
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (angle,), (a, b) = ctx.saved_tensors, grad.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        (angle,), (a, b) = ctx.saved_tensors, tangent.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Exponential(Function):
    """It writes into chunks of its result, and keeps the result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, angle: Tensor) -> Tensor:
        y = x.clone()
        for part in y.chunk(2, -1):
            part.exp_()
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent * ctx.saved_tensors[0]


class Scaled(Function):
    """Of the old style, without a `jvp`; torch does not take it under a transform."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angle: Tensor) -> Tensor:
        y = x.clone()
        a, b = y.chunk(2, -1)
        a.mul_(2)
        b.mul_(3)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = grad.chunk(2, -1)
        return torch.cat([2 * a, 3 * b], -1) + 0 * ctx.saved_tensors[0], None


class Squared(Function):
    """It keeps what it computed on the way, which must have a graph where the backward is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angle: Tensor) -> Tensor:
        doubled = 2 * x
        ctx.save_for_backward(doubled)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


def scaled(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([2 * a, 3 * b], -1)


CLASSES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    Turn: turned,
    Exponential: lambda x, _: x.exp(),
    Scaled: scaled,
    Squared: lambda x, _: x * x,
}
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
ANGLE = torch.linspace(0, 2, 12, dtype=torch.float64).reshape(4, 3)
ALONG = X.flip(1).cos()


def squares(f: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: (f(x, ANGLE) ** 2).sum()


def by_autograd(f: Any) -> Tensor:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(squares(f)(x), x, create_graph=True)
    return torch.autograd.grad((first * ALONG).sum(), x)[0]


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: grad(squares(f))(X),
    "jvp": lambda f: jvp(lambda x: f(x, ANGLE), (X,), (ALONG,))[1],
    "grad of jvp": lambda f: grad(
        lambda x: (jvp(lambda x: f(x, ANGLE), (x,), (x,))[1] * ALONG).sum(),
    )(X),
    "grad of grad": lambda f: grad(lambda x: (grad(squares(f))(x) * ALONG).sum())(X),
    "jvp of grad": lambda f: jvp(grad(squares(f)), (X,), (ALONG,))[1],
    "jvp of jvp": lambda f: jvp(lambda x: jvp(lambda x: f(x, ANGLE) ** 2, (x,), (x,))[1], (X,), (ALONG,))[1],
    "vmap of grad": lambda f: vmap(grad(lambda x, angle: (f(x, angle) ** 2).sum()))(X, ANGLE),
    "vmap of jvp": lambda f: vmap(lambda x, angle: jvp(lambda x: f(x, angle), (x,), (x,))[1])(X, ANGLE),
    "hessian": lambda f: hessian(lambda x: (f(x, ANGLE[0]) ** 2).sum())(X[0]),
    "jacrev": lambda f: jacrev(lambda x: f(x, ANGLE[0]))(X[0]),
    "jacfwd": lambda f: jacfwd(lambda x: f(x, ANGLE[0]))(X[0]),
    "autograd, twice": by_autograd,
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("function", CLASSES, ids=lambda f: f.__name__)
def test_forward_that_grad_mode_would_refuse(function: Any, derivative: str) -> None:
    operator = opsmith.adopt(function, f"as_applied::{function.__name__.lower()}", samples=[(X, ANGLE)])
    compute = DERIVATIVES[derivative]
    torch.testing.assert_close(compute(operator), compute(CLASSES[function]), rtol=1e-12, atol=1e-12)


def multiplying(name: str, forward_by: Any, backward_by: Any, *, by_numpy: bool = False) -> Any:
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        if by_numpy:
            a.detach().float().numpy()
        return a.mm(b)

    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        if by_numpy:
            grad.detach().float().numpy()
        return grad.mm(b.t()), a.t().mm(grad)

    methods = {"forward": staticmethod(forward_by(forward)), "backward": staticmethod(backward_by(backward))}
    return type(name, (Function,), methods)


def itself(method: Any) -> Any:
    return method


INLINED = pytest.mark.skipif(
    not capabilities.on("inlining"),
    reason="without `inlining`, compiled code and export keep every class whole",
)
FORWARD, BACKWARD = custom_fwd(device_type="cpu"), custom_bwd(device_type="cpu")
CASTING = {
    "plain": multiplying("plain", itself, itself),
    "amp": multiplying("amp", FORWARD, BACKWARD),
    "bfloat16": multiplying("bfloat16", custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16), BACKWARD),
    "float32": multiplying("float32", custom_fwd(device_type="cpu", cast_inputs=torch.float32), BACKWARD),
    "forward_alone": multiplying("forward_alone", FORWARD, itself),
    "by_numpy": multiplying("by_numpy", FORWARD, BACKWARD, by_numpy=True),
}
A, B = torch.linspace(-1, 1, 9).reshape(3, 3).cos(), torch.linspace(1, 3, 9).reshape(3, 3).sin()


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def loss(function: Any, seen: list[torch.dtype]) -> Callable[[Tensor], Tensor]:
    def of(a: Tensor) -> Tensor:
        y = function(a, B)
        seen.append(y.dtype)
        return y.float().square().sum()

    return of


def of_autograd(function: Any, backward_under: Any = autocast, around: Any = None) -> Tensor:
    a = A.clone().requires_grad_()
    with autocast():
        found = loss(function, [])(a) if around is None else around(function, a)
    with backward_under():
        return torch.autograd.grad(found, a)[0]


def of_transform(transform: Callable[[Any], Any], function: Any) -> tuple[Tensor, torch.dtype]:
    seen: list[torch.dtype] = []
    with autocast():
        return transform(loss(function, seen)), seen[0]


TRANSFORMS: dict[str, Callable[[Any], Tensor]] = {
    "grad": lambda f: grad(f)(A),
    "vmap of grad": lambda f: vmap(grad(f))(torch.stack([A, A]))[1],
    "vjp": lambda f: vjp(f, A)[1](torch.ones(()))[0],
    "jacrev": lambda f: jacrev(f)(A),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CASTING)
def test_autocast_under_a_transform(name: str, transform: str) -> None:
    operator = opsmith.adopt(CASTING[name], f"as_applied::{name}")
    with autocast():
        dtype = CASTING[name].apply(A, B).dtype
    found, seen = of_transform(TRANSFORMS[transform], operator)
    assert seen is dtype
    assert torch.equal(found, of_autograd(CASTING[name].apply))


@pytest.mark.parametrize("name", ["amp", "bfloat16", "float32", "by_numpy"])
def test_backward_after_autocast(name: str) -> None:
    """A pullback that is called where autocast is off, and a checkpoint, which runs the forward again."""
    operator, function = opsmith.adopt(CASTING[name], f"as_applied::{name}"), CASTING[name].apply
    with autocast():
        _, pull = vjp(loss(operator, []), A)
    outside = of_autograd(function, backward_under=torch.enable_grad)
    assert torch.equal(pull(torch.ones(()))[0], outside)

    def around(function: Any, a: Tensor) -> Tensor:
        found: Any = checkpoint(loss(function, []), a, use_reentrant=False)
        return found

    assert torch.equal(of_autograd(operator, torch.enable_grad, around), outside)


@pytest.mark.parametrize("name", ["plain", "amp", "bfloat16", "float32"])
def test_autocast_in_forward_mode(name: str) -> None:
    operator = opsmith.adopt(CASTING[name], f"as_applied::{name}")
    with autocast():
        result, tangent = jvp(lambda a: operator(a, B), (A,), (torch.ones_like(A),))
        right = CASTING[name].apply(torch.ones_like(A), B)
    assert tangent.dtype is result.dtype is right.dtype
    # The tangent is the transpose of a backward, which rounds as the product does.
    torch.testing.assert_close(tangent, right)


@INLINED
@pytest.mark.compile
@pytest.mark.xdist_group("run-as-applied")
@pytest.mark.parametrize("name", ["plain", "bfloat16"])
def test_compiled_under_autocast(name: str) -> None:
    operator, function = opsmith.adopt(CASTING[name], f"as_applied::{name}"), CASTING[name].apply

    def step(a: Tensor) -> Any:
        with autocast():
            return operator(a, B)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with autocast():
        right = function(A, B)
    assert compiled(A).dtype is right.dtype
    assert torch.equal(compiled(A), right)
    gradient = of_autograd(lambda a, b: compiled(a), torch.enable_grad if name == "bfloat16" else autocast)
    assert torch.equal(gradient, of_autograd(function))


@INLINED
@pytest.mark.compile
@pytest.mark.xdist_group("run-as-applied")
def test_compiled_code_that_keeps_a_class_whole() -> None:
    """Compiled code runs what it keeps whole without autocast: refused where that shows."""
    operator = opsmith.adopt(CASTING["by_numpy"], "as_applied::by_numpy")

    def under_autocast(a: Tensor) -> Any:
        with autocast():
            return operator(a, B)

    def followed(a: Tensor) -> Any:
        with autocast(), torch.autocast("cpu", enabled=False):
            return operator(a.bfloat16(), B.bfloat16())

    with pytest.raises(Exception, match="returns a different dtype under autocast") as caught:
        torch.compile(under_autocast, backend="aot_eager", fullgraph=True)(A)
    assert "torch.autocast(device, enabled=False)" in str(caught.value)
    assert torch.equal(torch.compile(followed, backend="aot_eager", fullgraph=True)(A), under_autocast(A))


@INLINED
@pytest.mark.compile
@pytest.mark.xdist_group("run-as-applied")
def test_exported_under_autocast() -> None:
    operator = opsmith.adopt(CASTING["amp"], "as_applied::amp")

    class Model(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            with autocast():
                return operator(a, b)

    program = torch.export.export(Model(), (A, B))
    right = Model()(A, B)
    assert right.dtype is torch.bfloat16
    for each in (program, program.run_decompositions()):
        assert torch.equal(each.module()(A, B), right)


def test_drawing_forward_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn again must be what was drawn: a class that draws is not run twice in its place."""

    class Dropped(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            mask = (torch.rand_like(x) > 0.5) * 2.0
            ctx.save_for_backward(mask * x.cos())
            return mask * x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * ctx.saved_tensors[0]

    operator = opsmith.adopt(Dropped, "as_applied::dropped", kind="stochastic")
    x = torch.linspace(0.1, 1, 64, dtype=torch.float64, requires_grad=True)
    y = operator(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    mask = (y != 0) * 2.0
    torch.testing.assert_close(second, -mask * x.detach().sin())
    with pytest.raises(errors.TransformError):
        grad(lambda x: operator(x).sum())(x.detach())
