"""No call, node, hook or argument keeps anything, whatever raises at any point of a call or a backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising_points import PLACES, PlantedError, Points, left_after
from torch import Tensor
from torch.autograd import Function
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import opsmith
from opsmith import config, ops
from opsmith.torch_library import capabilities

NUMBER = iter(range(10_000))


@pytest.fixture(params=["in C++", "in Python"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How operators that are declared from now on are called."""
    if request.param == "in Python":
        monkeypatch.setattr(capabilities, "calls_in_cpp", lambda: None)
    elif config.conservative() or capabilities.calls_in_cpp() is None:
        pytest.skip("calls in C++ are not built, or turned off")
    return str(request.param)


Call = Callable[[Tensor, Tensor], Tensor]


def name() -> str:
    return f"nothing_is_kept::case_{next(NUMBER)}"


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).exp() * 2


def declared(points: Points) -> Call:
    operator = opsmith.operator(name())(points.around(scaled))
    return operator.gradients(
        x=points.around(lambda grad, result, w: grad * result * w),
        w=points.around(lambda grad, result, x: grad * result * x),
    )


def with_a_kernel(points: Points) -> Call:
    return declared(points).kernel("cpu", points.around(scaled))  # type: ignore[attr-defined,no-any-return]


def derived(points: Points) -> Call:
    return opsmith.operator(name())(scaled).kernel("cpu", points.around(scaled))


def hidden(points: Points) -> Call:
    def reference(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        grown = (x * w).exp()
        return grown * 2, grown

    operator = opsmith.operator(name(), hidden=("grown",))(points.around(reference))
    return operator.gradients(
        x=points.around(lambda grad, grown, w: 2 * grad * grown * w),
        w=points.around(lambda grad, grown, x: 2 * grad * grown * x),
    )


def in_place(points: Points) -> Call:
    def reference(y: Tensor, w: Tensor) -> Tensor:
        return y.mul_(w).exp_().mul_(2)

    operator = opsmith.operator(name(), mutates=("y",), returns="y")(points.around(reference))
    operator.gradients(
        y=points.around(lambda grad, result, w: grad * result * w),
        w=points.around(lambda grad, y, w: grad * (y * w).exp() * y * 2),
    )
    return lambda x, w: operator(x.clone(), w)


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        y = (x * w).exp() * 2
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        return grad * y * w, grad * y * x


class ScaledInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x.clone(), w)
        ctx.mark_dirty(x)
        return x.mul_(w).exp_().mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        y = (x * w).exp() * 2
        return grad * y * w, grad * y * x


def adopted(points: Points, function_class: type[Function] = Scaled) -> Call:
    methods = {
        "forward": staticmethod(points.around(function_class.forward)),
        "backward": staticmethod(points.around(function_class.backward)),
    }
    pointed: Any = type(function_class.__name__, (function_class,), methods)
    return opsmith.adopt(pointed, name())


def adopted_in_place(points: Points) -> Call:
    operator = adopted(points, ScaledInPlace)
    return lambda x, w: operator(x.clone(), w)


OPERATORS: dict[str, Callable[[Points], Call]] = {
    "declared": declared,
    "with a kernel": with_a_kernel,
    "derived": derived,
    "hidden": hidden,
    "in place": in_place,
    "adopted": adopted,
    "adopted in place": adopted_in_place,
}


def arguments() -> tuple[Tensor, Tensor]:
    return torch.full((4,), 0.5).requires_grad_(), torch.full((4,), 0.3).requires_grad_()


def backward(points: Points, call: Call, x: Tensor, w: Tensor) -> None:
    call(x, w).sum().backward()


def hooked_backward(points: Points, call: Call, x: Tensor, w: Tensor) -> None:
    """A backward with hooks of tensors and of nodes, at which it raises, too."""
    y = call(x, w)
    assert y.grad_fn is not None
    for register in (x.register_hook, y.register_hook, y.grad_fn.register_hook, y.grad_fn.register_prehook):
        register(points.pass_one)
    x.register_post_accumulate_grad_hook(points.pass_one)
    y.sum().backward()


def checkpointed(points: Points, call: Call, x: Tensor, w: Tensor) -> None:
    checkpoint(call, x, w, use_reentrant=False).sum().backward()


def second_order(points: Points, call: Call, x: Tensor, w: Tensor) -> None:
    (first,) = torch.autograd.grad(call(x, w).sum(), x, create_graph=True)
    first.sum().backward()


RUNS = {each.__name__: each for each in (backward, hooked_backward, checkpointed, second_order)}
FAST = {
    ("functions", "checkpointed"),
    ("hooks", "backward"),
    ("operations", "backward"),
    ("functions", "hooked_backward"),
}
QUICK = ("with a kernel", "adopted")
CASES = [
    pytest.param(
        operator,
        place,
        run,
        error,
        id=f"{operator}-{place}-{run}-{error.__name__}",
        marks=()
        if error is (KeyboardInterrupt if place == "calls" else PlantedError)
        and ((place, run) in FAST or (operator in QUICK and (place, run) == ("calls", "backward")))
        else pytest.mark.slow,
    )
    for operator in OPERATORS
    for place in PLACES
    for run in RUNS
    for error in (PlantedError, KeyboardInterrupt, torch.OutOfMemoryError)
]


@pytest.mark.parametrize(("operator", "place", "run", "error"), CASES)
def test_nothing_is_left_where_a_point_raises(
    operator: str, place: str, run: str, error: type[BaseException], calls: str
) -> None:
    points = Points(error)
    call = OPERATORS[operator](points)
    left, count = left_after(arguments, lambda x, w: RUNS[run](points, call, x, w), points, place)
    assert left == []
    assert count >= 2
    points.at = 0
    (x, w), (u, v) = arguments(), arguments()
    found, right = call(x, w), scaled(u, v)
    assert_close(found, right)
    assert_close(torch.autograd.grad(found.sum(), (x, w)), torch.autograd.grad(right.sum(), (u, v)))


def counted() -> tuple[int, int]:
    gc.collect()
    every = gc.get_objects()
    return sum(issubclass(type(each), Tensor) for each in every), len(every)


def exponential(x: Tensor) -> Tensor:
    return x.exp()


@pytest.mark.parametrize("early_stop", [True, False], ids=["early stop", "all"])
def test_an_operator_that_saves_its_result_last_in_a_checkpoint(early_stop: bool, calls: str) -> None:
    operator = opsmith.operator(name())(exponential).gradients(x=lambda grad, result: grad * result)
    x = torch.randn(1000, requires_grad=True)

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            checkpoint(operator, x, use_reentrant=False, early_stop=early_stop).sum().backward()
        return counted()

    before = steps(10)
    assert steps(20) <= before


class Network(torch.nn.Module):
    """Bundled operators in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(16, 8) / 4)
        self.second = torch.nn.Parameter(torch.randn(8, 16) / 4)
        self.scale = torch.nn.Parameter(torch.ones(8))

    def block(self, x: Tensor) -> Tensor:
        y = ops.rms_norm(x, self.scale)
        y = ops.exp(ops.mul(ops.linear(y, self.first), torch.tensor(0.1)))
        return ops.add(ops.linear(y, self.second), x)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return x


class Interrupting:
    """Hooks of saved tensors that raise in every third step, each time at another point."""

    def __init__(self) -> None:
        self.step = self.passed = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        self.passed += 1
        if self.step % 3 == 0 and self.passed == 1 + self.step // 3 % 12:
            raise KeyboardInterrupt
        return tensor.detach()


@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks that raise"])
def test_a_training_loop_of_checkpoints_keeps_nothing(hooks: bool, steps: int, calls: str) -> None:
    for each in (ops.rms_norm, ops.exp, ops.mul, ops.linear, ops.add):
        each.forget_calls()  # its calls are made anew, in Python or in C++
    network, interrupting = Network(), Interrupting()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    raised = 0
    counts: dict[int, tuple[int, int]] = {}
    for step in range(1, steps + 1):
        interrupting.step, interrupting.passed = step, 0
        optimizer.zero_grad()
        try:
            if hooks:
                with torch.autograd.graph.saved_tensors_hooks(interrupting, interrupting):
                    network.block(torch.randn(4, 8)).sum().backward()
            network(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        except KeyboardInterrupt:
            raised += 1
        if step in (10, steps):
            counts[step] = counted()
    assert raised == hooks * (steps // 3)
    (tensors, objects), (later, more) = counts.values()
    assert (later, more <= objects) == (tensors, True), f"{counts}"
