"""Calls that torch.compile cannot trace: after a graph break they run as without torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opsmith
from opsmith import config, errors
from opsmith.torch_library import capabilities

pytestmark = pytest.mark.compile

_numbers = itertools.count()


class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, by):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.by = by
        return x**by

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad * ctx.by * x ** (ctx.by - 1), None


class Cubes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3 * ctx.saved_tensors[0] ** 2


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


def summed(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def lone_sine(x: Tensor) -> Tensor:
    return x.sin()


@pytest.fixture
def name() -> str:
    return f"untraced::operator_{next(_numbers)}"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch reads it
@pytest.mark.parametrize("inference", [False, True])
def test_a_class_without_types_learns_them_after_the_graph_break(name: str, inference: bool) -> None:
    power = opsmith.adopt(Power, name)
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    with torch.inference_mode(inference):
        result = torch.compile(lambda x: power(x, 2), backend="aot_eager")(x)
    assert result.tolist() == [4.0, 9.0]
    if not inference:
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [4.0, 6.0]


def test_a_class_without_types_says_in_one_graph_what_declares_them(name: str) -> None:
    power = opsmith.adopt(Power, name)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="`by` has the wrong type") as raised:
        torch.compile(lambda x: power(x, 2), backend="aot_eager", fullgraph=True)(x)
    assert 'signature="(x: Tensor, n: int) -> Tensor"' in str(raised.value)
    power = opsmith.adopt(Power, f"{name}_declared", signature="(x: Tensor, by: int) -> Tensor")
    assert torch.compile(lambda x: power(x, 2), backend="aot_eager", fullgraph=True)(x).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("reference", "given", "argument"), [(scaled, "two", "by"), (summed, 2, "y"), (summed, "two", "y")]
)
def test_a_wrong_type_is_refused_as_without_torch_compile(
    name: str, reference: Any, given: object, argument: str, inference: bool
) -> None:
    operator = opsmith.operator(name)(reference)
    with torch.inference_mode(inference), pytest.raises(errors.ArgumentError) as raised:
        torch.compile(lambda x: operator(x, given), backend="aot_eager")(torch.ones(2))
    assert (raised.value.operator, raised.value.argument) == (name, argument)


@pytest.mark.parametrize("given", [2, "two", [2.0]])
def test_a_wrong_type_beside_a_number_is_refused(name: str, given: object) -> None:
    @opsmith.operator(name)
    def shifted(x: Tensor, y: Tensor, *, by: float = 1.0) -> Tensor:
        return x + by * y

    with pytest.raises(errors.ArgumentError, match="`y` has the wrong type"):
        torch.compile(lambda x: shifted(x, given, by=2.0), backend="aot_eager")(torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_graph_break_under_a_transform(name: str, transform: str, hidden: bool) -> None:
    if config.conservative():
        pytest.skip(
            "no public name of torch tells that Dynamo compiles what runs: torch raises its own error"
        )
    if hidden:

        @opsmith.operator(name, results=["y", "slope"], hidden=["slope"])
        def sine(x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sin(), x.cos()

        operator: Any = sine.gradients(x=lambda grad, slope: grad * slope)
    else:
        operator = opsmith.operator(name)(lone_sine).gradients(x=lambda grad, x: grad * x.cos())
    transforms: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "grad": lambda function: torch.func.grad(lambda x: function(x).sum()),
        "jvp": lambda function: lambda x: torch.func.jvp(function, (x,), (x,)),
        "vmap": torch.func.vmap,
    }

    def broken(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return function(x)

        return call

    x = torch.tensor([0.5, 1.5])
    found = torch.compile(transforms[transform](broken(operator)), backend="aot_eager")(x)
    torch.testing.assert_close(found, transforms[transform](torch.sin)(x))


def test_a_number_of_numpy_is_converted(name: str) -> None:
    numpy = pytest.importorskip("numpy")
    operator = opsmith.operator(name)(scaled)
    compiled = torch.compile(lambda x, by: operator(x, by), backend="aot_eager")
    assert compiled(torch.ones(2), numpy.float32(2)).tolist() == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it
@pytest.mark.parametrize("kind", ["class", "formula", "derived"])
def test_a_known_backward_after_a_graph_break_is_not_compiled(name: str, kind: str) -> None:
    if capabilities.calls_in_cpp() is None:
        pytest.skip("calls in C++ are not built, or turned off")
    operator: Any = opsmith.adopt(Cubes, name) if kind == "class" else opsmith.operator(name)(lone_sine)
    if kind == "formula":
        operator.gradients(x=lambda grad, x: grad * x.cos())
    if kind == "derived":
        operator.kernel("cpu", lone_sine)
    for _ in range(4):
        operator(torch.ones(2, requires_grad=True)).sum().backward()
    x = torch.ones(2, requires_grad=True)
    y = operator(x)
    (right,) = torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)

    def broken(y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return torch.autograd.grad(y, x, torch.ones(2))[0]

    compiled_frames: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_frames.append(str(graph.graph))
        return graph.forward

    found = torch.compile(broken, backend=backend)(y)
    assert torch.equal(found, right)
    assert len(compiled_frames) <= 1  # that of `torch.autograd.grad`, which makes the ones
