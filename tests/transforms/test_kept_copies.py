"""Copies of what is written stay in compiled code, of an operator that is inlined and of one that is called.

Inductor drops operations that change no number, also where what they have copied is written later. Plain code
meets the same fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults_of_torch import marked
from torch import Tensor
from torch.utils._pytree import tree_leaves

import opsmith

pytestmark = [pytest.mark.compile, pytest.mark.xdist_group("kept-copies")]


@opsmith.operator("kept_copies::swap_", mutates=["a", "b"])
def swap_(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


@opsmith.operator("kept_copies::cycle_", mutates=["xs"])
def cycle_(xs: list[Tensor]) -> None:
    kept = torch.empty_like(xs[0]).copy_(xs[0])
    xs[0].copy_(xs[1])
    xs[1].copy_(xs[2])
    xs[2].copy_(kept)


@opsmith.operator("kept_copies::swap_a_row_", mutates=["a", "b"])
def swap_a_row_(a: Tensor, b: Tensor) -> None:
    kept = torch.cat([a])
    a[0] = b[0]
    b.copy_(kept)


@opsmith.operator("kept_copies::put_", mutates=["a"], returns="a")
def put_(a: Tensor, b: Tensor) -> Tensor:
    return a.copy_(b)


@opsmith.operator("kept_copies::exchange_", mutates=["a"])
def exchange_(a: Tensor, b: Tensor) -> Tensor:
    kept = a.repeat(1, 1)
    a.copy_(b)
    return kept


def by_two(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    put_(a, b)
    put_(b, kept)


def by_a_result(a: Tensor, b: Tensor) -> None:
    b.copy_(exchange_(a, b))


def by_intermediates(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = a * 2, b * 3
    swap_(a, b)
    return a, b


INLINED: dict[str, tuple[Callable[..., Any], int]] = {
    "swap": (swap_, 2),
    "cycle of a list": (lambda *xs: cycle_(list(xs)), 3),
    "swap of a row": (swap_a_row_, 2),
    "two operators": (by_two, 2),
    "a result": (by_a_result, 2),
    "intermediates": (by_intermediates, 2),
}


@opsmith.operator("kept_copies::add_into", mutates=["dst"])
def add_into(src: Tensor, dst: Tensor) -> None:
    dst.add_(2 * src)


@add_into.kernel("cpu")
def _(src: Tensor, dst: Tensor) -> None:
    for column in range(dst.shape[1]):
        dst[:, column] += 2 * src[:, column]


@opsmith.operator("kept_copies::swap_whole_", mutates=["a", "b"])
def swap_whole_(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept + 1)


swap_whole_.kernel("cpu", swap_whole_.reference)


def columns(x: Tensor) -> Tensor:
    kept = x.clone()
    add_into(kept[:, :-1], x[:, 1:])
    return x


def rows(x: Tensor) -> Tensor:
    kept = x.clone()
    add_into(kept[:-1], x[1:])
    return x


def reshaped(x: Tensor) -> Tensor:
    kept = x.to(x.dtype, copy=True).reshape(-1)[: x.numel()].reshape(x.shape)
    add_into(kept[:, :-1], x[:, 1:])
    return x


def used_later(x: Tensor) -> Tensor:
    kept = x.clone()
    add_into(kept[:, :-1], x[:, 1:])
    add_into(kept[:, 1:], x[:, :-1])
    return kept - x


def written_both(x: Tensor) -> Tensor:
    kept = x.clone()
    swap_whole_(kept[:, 1:], x[:, :-1])
    return kept


def copy_is_written(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 2
    kept = x.clone()
    add_into(x[:, :-1], kept[:, 1:])
    return x, kept


CALLED = {
    each.__name__: each for each in (columns, rows, reshaped, used_later, written_both, copy_is_written)
}


def is_eager(function: Callable[..., Any], given: list[Tensor], *, dynamic: bool) -> None:
    """Hold the compiled function to the function itself: what it returns, and what it writes."""
    torch.compiler.reset()  # the cases share the code that is compiled
    eager, compiled = ([each.clone() for each in given] for _ in range(2))
    right = function(*eager)
    found = torch.compile(function, fullgraph=True, dynamic=dynamic)(*compiled)
    assert [each.tolist() for each in tree_leaves([found, compiled]) if each is not None] == [
        each.tolist() for each in tree_leaves([right, eager]) if each is not None
    ]


def chosen(cases: dict[str, Any], count: int) -> list[Any]:
    """All cases, of which the first ones are not slow."""
    return [
        pytest.param(each, dynamic, id=f"{each}-{'dynamic' if dynamic else 'static'}", marks=slow)
        for dynamic in (False, True)
        for at, each in enumerate(cases)
        for slow in [[pytest.mark.slow] * (dynamic or at >= count)]
    ]


@pytest.mark.parametrize(("case", "dynamic"), chosen(INLINED, 1))
def test_an_inlined_reference_keeps_an_old_value(case: str, dynamic: bool) -> None:
    function, count = INLINED[case]
    is_eager(lambda *given: function(*given), [torch.randn(4, 3) for _ in range(count)], dynamic=dynamic)


@pytest.mark.parametrize(("case", "dynamic"), marked(chosen(CALLED, 1)))
def test_a_caller_keeps_an_old_value(case: str, dynamic: bool) -> None:
    is_eager(CALLED[case], [torch.randn(3, 4)], dynamic=dynamic)


@pytest.mark.slow
def test_the_gradient_of_a_kept_value() -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 1.5
        return (columns(y) * torch.arange(8.0).reshape(2, 4)).sum()

    eager, compiled = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
    loss(eager).backward()
    torch.compile(loss)(compiled).backward()
    assert eager.grad is not None
    assert compiled.grad is not None
    assert torch.equal(eager.grad, compiled.grad)
