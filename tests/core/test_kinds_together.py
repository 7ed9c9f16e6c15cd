"""Lists of every kind and keyword-only tensors in one operator: under autocast, transforms, compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import opsmith

make = opsmith.Make()
SETTINGS: dict[str, Any] = {
    "flags": [True, False],
    "words": ["a", "b"],
    "factors": [1j, 2.0],
    "dtypes": [torch.float64],
    "devices": [torch.device("cpu")],
    "sizes": (3, 4),
}


def everything(
    items: list[Tensor | None],
    flags: list[bool],
    *,
    weight: Tensor,
    words: list[str] | None = None,
    factors: list[complex] | None = None,
    dtypes: list[torch.dtype] | None = None,
    devices: list[torch.device] | None = None,
    sizes: Sequence[int] = (1,),
    bias: Tensor | None = None,
) -> Tensor:
    """Σᵢ (i + 1) itemsᵢ² weight sizes₀, negated without a first flag, and the bias."""
    for values in (flags, words, factors, dtypes, devices, sizes):
        assert values is None or type(values) is list
    if words is not None:
        assert (flags, words, factors, sizes) == ([True, False], ["a", "b"], [1j, 2 + 0j], [3, 4])
        assert (dtypes, devices) == (SETTINGS["dtypes"], SETTINGS["devices"])
    parts = [(i + 1) * item**2 for i, item in enumerate(items) if item is not None]
    total = sum(parts, torch.zeros_like(weight)) * weight * sizes[0] * (1 if flags[0] else -1)
    return total if bias is None else total + bias


def of_items(
    grad: Tensor, items: list[Tensor | None], weight: Tensor, flags: list[bool], sizes: list[int]
) -> list[Any]:
    scale = 2 * grad * weight * sizes[0] * (1 if flags[0] else -1)
    return [opsmith.zero if item is None else (i + 1) * item * scale for i, item in enumerate(items)]


def of_weight(grad: Tensor, items: list[Tensor | None], flags: list[bool], sizes: list[int]) -> Tensor:
    squares = [(i + 1) * item**2 for i, item in enumerate(items) if item is not None]
    return grad * sum(squares, torch.zeros_like(grad)) * sizes[0] * (1 if flags[0] else -1)


@pytest.fixture(params=["ordinary", "derived", "formulas"])
def operator(request: pytest.FixtureRequest, name: str) -> opsmith.Operator[..., Any]:
    return declared(name, request.param)


def declared(name: str, way: str) -> opsmith.Operator[..., Any]:
    operator = opsmith.operator(name)(everything)
    if way == "derived":
        operator.kernel("cpu", everything)
    if way == "formulas":
        operator.gradients(items=of_items, weight=of_weight, bias=lambda grad: grad)
    return operator


def call(function: Any) -> Callable[..., Tensor]:
    return lambda x, y, weight, bias: function([x, None, y], **SETTINGS, weight=weight, bias=bias)


def inputs() -> list[Tensor]:
    return [make(3) for _ in range(4)]


def test_derivatives(operator: Any) -> None:
    leaves = [each.requires_grad_() for each in inputs()]
    assert_close(call(operator)(*leaves), call(everything_of(operator))(*leaves))
    assert gradcheck(call(operator), leaves, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call(operator), leaves)
    no_bias = lambda x, weight: operator([x, None], [False], weight=weight)
    assert gradcheck(no_bias, leaves[:2])


def everything_of(operator: Any) -> Any:
    """The reference, given what the dispatcher makes of a call."""

    def converted(items: Any, flags: Any, **rest: Any) -> Tensor:
        rest["factors"] = [complex(each) for each in rest["factors"]]
        rest["sizes"] = list(rest["sizes"])
        return operator.reference(items, flags, **rest)  # type: ignore[no-any-return]

    return converted


def test_transforms(operator: Any) -> None:
    batch = [make(4, 3) for _ in range(4)]
    right = call(everything_of(operator))
    assert_close(torch.vmap(call(operator))(*batch), right(*batch))
    each = torch.vmap(torch.func.grad(lambda *x: call(operator)(*x).sum(), argnums=(0, 1, 2, 3)))(*batch)
    assert_close(each, torch.func.grad(lambda *x: right(*x).sum(), argnums=(0, 1, 2, 3))(*batch))
    assert_close(
        torch.func.jvp(call(operator), tuple(batch), tuple(batch))[1],
        torch.func.jvp(right, tuple(batch), tuple(batch))[1],
    )


def test_autocast(operator: Any) -> None:
    leaves = [each.float().requires_grad_() for each in inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        result = call(operator)(*leaves)
    result.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype is torch.float32 for leaf in leaves)


@pytest.mark.slow
@pytest.mark.compile
def test_compiled(name: str) -> None:
    operator = declared(name, "formulas")
    compiled = torch.compile(call(operator), backend="aot_eager", fullgraph=True)
    leaves = [each.requires_grad_() for each in inputs()]
    result, expected = compiled(*leaves), call(operator)(*leaves)
    assert_close(result, expected)
    assert_close(torch.autograd.grad(result.sum(), leaves), torch.autograd.grad(expected.sum(), leaves))
