"""The names of an operator below autograd: checkpoints, modes and counters of flops know it by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import opsmith

RUNS: list[str] = []


def ran(name: str, value: Any) -> Any:
    RUNS.append(name)
    return value


def sine(x: Tensor) -> Tensor:
    return x.sin()


def sine_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


def slope_between(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.sin(), x.cos(), x * 2


def sines(x: Tensor) -> tuple[list[Tensor], Tensor]:
    return [x.sin(), x * 2], x.cos()


def sine_(x: Tensor) -> Tensor:
    return x.sin_()


def write_sine(x: Tensor) -> None:
    x.sin_()


def write_and_double(x: Tensor) -> tuple[Tensor, Tensor]:
    slope = x.cos()
    x.sin_()
    return x * 2, slope


def by_slope(grad_x: Tensor, x: Tensor) -> Tensor:
    return grad_x * x.cos()


@dataclass(frozen=True)
class Case:
    """An operator, and the function of the sine that a test differentiates.

    Args:
        operator: The operator.
        after: Makes one tensor of the argument and of what the operator returned.
        again: True if a saved call runs again: a write that returns nothing has nothing to save.
    """

    operator: Any
    after: Callable[[Tensor, Any], Tensor]
    again: bool = False


def declared(name: str, reference: Callable[..., Any], rule: Any, **options: Any) -> Any:
    operator = opsmith.operator(f"identity::{name}", **options)(reference)
    operator.gradients(x=rule) if rule is not None else None
    return operator.kernel("cpu", lambda x: ran(name, reference(x)))


def returned(_: Tensor, result: Any) -> Tensor:
    return result  # type: ignore[no-any-return]


CASES = {
    "plain": Case(declared("plain", sine, lambda grad, x: grad * x.cos()), returned),
    "derived": Case(declared("derived", sine, None), returned),
    "hidden": Case(declared("hidden", sine_and_slope, lambda grad, k: grad * k, hidden=("k",)), returned),
    "hidden-between": Case(
        declared(
            "between",
            slope_between,
            lambda grad_y, grad_z, k: grad_y * k + 2 * grad_z,
            results={"y": ..., "k": ..., "z": ...},
            hidden=("k",),
        ),
        lambda x, found: found[0] + found[1],
    ),
    "list": Case(
        declared(
            "list",
            sines,
            lambda grad_y, k: grad_y[0] * k + 2 * grad_y[1],
            results={"y": ..., "k": ...},
            hidden=("k",),
        ),
        lambda x, found: found[0] + found[1],
    ),
    "in-place": Case(declared("sine_", sine_, by_slope, mutates=["x"], returns="x"), returned),
    "in-place-argument": Case(
        declared("argument_", sine_, by_slope, mutates=["x"], returns="x"), lambda x, found: x * found
    ),
    "void": Case(declared("write", write_sine, by_slope, mutates=["x"]), lambda x, found: x, again=True),
    "void-hidden": Case(
        declared(
            "write_and_double",
            write_and_double,
            lambda grad_x, grad_y, k: (grad_x + 2 * grad_y) * k,
            mutates=["x"],
            results={"y": ..., "k": ...},
            hidden=("k",),
        ),
        lambda x, found: x + found,
        again=True,
    ),
}


def gradient(case: Case, run: Callable[..., Any] = lambda f, x: f(x)) -> Tensor:
    x = torch.linspace(0.1, 1.0, 5).requires_grad_()

    def computed(x: Tensor) -> Tensor:
        y = x * 2
        return case.after(y, case.operator(y)).exp()

    (found,) = torch.autograd.grad(run(computed, x).sum(), x)
    return found


POLICIES: dict[str, Callable[[Any], Any]] = {
    "equal": lambda operator: lambda _, function, *a, **k: saved(function == operator.torch_operator),
    "in-set": lambda operator: lambda _, function, *a, **k: saved(function in {operator.torch_operator}),
    "any-name": lambda operator: lambda _, function, *a, **k: saved(function in operator.torch_operators),
    "list": lambda operator: [operator.torch_operator],
}


def saved(hit: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if hit else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_a_selective_checkpoint_saves_by_the_operator(name: str, policy: str) -> None:
    case = CASES[name]
    right = gradient(case)
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy](case.operator))
    RUNS.clear()
    found = gradient(case, lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=contexts))
    assert torch.equal(found, right)
    assert len(RUNS) == 1 + case.again


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("requires", [True, False], ids=["gradient", "constant"])
def test_an_operator_of_a_library_writes_again(requires: bool, policy: str) -> None:
    """It writes past autograd, as one in C++ does."""

    @torch.library.custom_op(f"identity::library_{requires}_{[*POLICIES].index(policy)}", mutates_args=["x"])
    def library_sine(x: Tensor) -> None:
        np.copyto(x.detach().numpy(), np.sin(ran("library", x).detach().numpy()))

    operator = opsmith.adopt(library_sine, reference=write_sine)

    def after(x: Tensor, _: None) -> Tensor:
        operator(constant := torch.linspace(0.1, 1.0, 5))
        return x * constant

    case = Case(operator, after) if requires else Case(lambda x: x, after)
    right = gradient(case)
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy](operator))
    RUNS.clear()
    found = gradient(case, lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=contexts))
    assert torch.equal(found, right)
    assert len(RUNS) == (4 if requires else 2)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_that_saves_nothing_computes_again(name: str) -> None:
    case = CASES[name]
    right = gradient(case)
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *a, **k: saved(False))
    RUNS.clear()
    found = gradient(case, lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=contexts))
    assert torch.equal(found, right)
    assert len(RUNS) == 2


class Log(TorchDispatchMode):
    """The operators of this file that a mode sees; it may answer with memory of its own."""

    def __init__(self, *, answers: bool = False) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.answers = answers

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.namespace == "identity":
            self.seen.append(function)
            if self.answers and isinstance(found, Tensor):
                return found + 1
        return found


@pytest.mark.parametrize("region", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_a_mode_sees_one_name(name: str, region: Any) -> None:
    case = CASES[name]
    for _ in range(3):
        gradient(case)
    x = torch.linspace(0.1, 1.0, 5).requires_grad_(region is torch.enable_grad)
    with region(), Log() as log:
        y = x * 2
        found = case.after(y, case.operator(y))
    assert log.seen == [case.operator.torch_operator]
    z = torch.linspace(0.1, 1.0, 5) * 2
    assert torch.equal(found, case.after(z, case.operator(z)))


def test_an_answer_of_a_mode_is_what_callers_get() -> None:
    for name in ("plain", "hidden", "in-place"):
        y = torch.linspace(0.1, 1.0, 5, requires_grad=True) * 2
        right = y.detach().sin() + (0 if name == "in-place" else 1)
        with Log(answers=True):
            found = CASES[name].operator(y)
        assert torch.equal(found, right), name


def test_a_gradient_under_a_mode_keeps_no_hidden_result_alive() -> None:
    """Hidden results live with the result that callers see, and with the node."""
    import gc
    import weakref

    kept: list[Any] = []
    operator = opsmith.operator("identity::kept", hidden=("k",))(sine_and_slope)
    operator.gradients(x=lambda grad, k: grad * k)

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        slope = x.cos()
        kept.append(weakref.ref(slope))
        return x.sin(), slope

    operator.kernel("cpu", kernel)
    with Log():
        result = operator(torch.ones(3, requires_grad=True))
        result.sum().backward()
    assert kept[-1]() is not None
    del result
    gc.collect()
    assert kept[-1]() is None


@pytest.mark.parametrize("name", ["plain", "hidden", "in-place", "void"])
def test_flops_are_counted_by_the_names(name: str) -> None:
    operator = CASES[name].operator
    operator.flops(lambda x: 7 * x.numel())
    with FlopCounterMode(display=False) as counter:
        gradient(CASES[name])
    counts = counter.get_flop_counts()["Global"]
    packets = {each.overloadpacket for each in operator.torch_operators}
    assert sum(count for packet, count in counts.items() if packet in packets) == 35


def test_names_are_listed_the_public_one_first() -> None:
    def names(case: str) -> list[str]:
        operator = CASES[case].operator
        assert operator.torch_operators[0] is operator.torch_operator
        return [str(each) for each in operator.torch_operators]

    assert names("plain") == ["identity.plain.default"]
    assert names("hidden") == ["identity.hidden.default", "identity.hidden_and_hidden.default"]
    assert names("in-place") == [f"identity.sine_{suffix}.default" for suffix in ("", "_void", "_functional")]


def test_a_reference_that_autograd_records_has_no_operator_below_it() -> None:
    operator = opsmith.operator("identity::recorded")(sine)
    with Log() as log:
        operator(torch.ones(2, requires_grad=True))
    assert log.seen == []


@pytest.mark.xdist_group("identity")
@pytest.mark.parametrize("name", ["hidden", "in-place"])
def test_compiled_checkpoints_know_the_names(name: str) -> None:
    """A graph contains the operator that also returns hidden results, or computes new values."""
    case = CASES[name]
    asked: list[Any] = []

    def policy(_: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(function)
        return saved(function in case.operator.torch_operators)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    right = gradient(case)
    RUNS.clear()
    compiled = torch.compile(
        lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=contexts), backend="aot_eager"
    )
    torch.testing.assert_close(gradient(case, compiled), right)
    assert set(asked) & set(case.operator.torch_operators)
