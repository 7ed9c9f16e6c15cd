"""Calls with lists of tensors bypass the dispatcher where a reference in Python computes them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from slow_calls import record_slow_calls
from torch import Tensor
from torch.testing import assert_close

import opsmith
from opsmith.torch_library import capabilities
from opsmith.torch_library.calls import routes


def weighted(xs: list[Tensor], w: Tensor, by: float = 1.0) -> tuple[Tensor, Tensor]:
    """The weighted sum of some tensors, and the sum of the weights.  xs [N] each, w [K] -> [N], []."""
    return sum((x * each for x, each in zip(xs, w, strict=True)), torch.zeros(())) * by, w.sum() * 1


def declared(name: str, **options: Any) -> Any:
    made = opsmith.operator(f"fast_lists::{name}", hidden=("total",), **options)(weighted)
    return made.gradients(
        xs=lambda grad, w, by: [grad * each * by for each in w],
        w=lambda grad, xs, by: torch.stack([(grad * x).sum() * by for x in xs]),
    )


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators whose calls took the slow path."""
    return record_slow_calls(monkeypatch)


def tensors(count: int, size: int, needed: str) -> list[Tensor]:
    every = [torch.randn(size, dtype=torch.float64) for _ in range(count)]
    return [
        each.requires_grad_(needed == "all" or (needed == "last" and at == count - 1))
        for at, each in enumerate(every)
    ]


def compare(operator: Any, xs: Any, w: Tensor, **more: Any) -> None:
    found, (expected, _) = operator(xs, w, **more), weighted(xs, w, **more)
    assert_close(found, expected)
    inputs = [each for each in (*xs, w) if each.requires_grad]
    if inputs:
        grad = torch.randn_like(expected)
        assert_close(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad))


@pytest.mark.parametrize("needed", ["all", "last", "none"])
def test_known_calls(needed: str, slow: list[str]) -> None:
    operator = declared("known")
    compare(operator, tensors(2, 3, needed), torch.ones(2, dtype=torch.float64))
    for count in (1, 2, 3, 1, 2, 3):
        if count == 1:
            slow.clear()
        for weights in (True, False):
            w = torch.randn(count, dtype=torch.float64, requires_grad=weights)
            compare(operator, tensors(count, 4, needed), w)
            compare(operator, tuple(tensors(count, 4, needed)), w, by=2.0)
            compare(operator, [x[::2] for x in tensors(count, 4, needed)], w)
            with torch.no_grad():
                assert not operator(tensors(count, 4, needed), w).requires_grad
            with torch.inference_mode():
                assert_close(operator(tensors(count, 4, "none"), w).shape, torch.Size([4]))
    assert not slow


def test_one_tensor_twice() -> None:
    operator = declared("twice")
    x, w = torch.randn(3, dtype=torch.float64, requires_grad=True), torch.ones(2, dtype=torch.float64)
    for _ in range(3):
        compare(operator, [x, x], w)


def test_more_lengths_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_ROUTES", 4)
    operator = declared("lengths")
    for count in range(1, 12):
        compare(operator, tensors(count, 2, "all"), torch.ones(count, dtype=torch.float64))


def changing(xs: Any) -> Tensor:
    """The first tensor of a list, times 3 for a list and 5 for a tuple; a list is changed."""
    found = xs[0] * (5 if isinstance(xs, tuple) else 3)
    if not isinstance(xs, tuple):
        xs.pop()
    return found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("hint", "factor"), [(list[Tensor], 3), (tuple[Tensor, ...], 5)])
def test_each_call_gets_a_list_of_its_own_as_it_is_annotated(
    hint: Any, factor: int, kernel: bool, mode: Any, slow: list[str]
) -> None:
    changing.__annotations__["xs"] = hint
    operator = opsmith.operator(f"fast_lists::changing_{factor}_{kernel}_{mode.__name__}")(changing)
    operator.gradients(xs=lambda grad, xs: [grad * factor, *[None] * (len(xs) - 1)])
    if kernel:
        operator.kernel("cpu", changing)
    x = torch.ones(2, requires_grad=mode is torch.enable_grad)
    for given in ([x, torch.zeros(2)], (x, torch.zeros(2))):
        for repeated in range(3):
            slow.clear()
            with mode():
                found = operator(given)
            assert_close(found, torch.full((2,), float(factor)))
            assert len(given) == 2
            if x.requires_grad:
                assert_close(torch.autograd.grad(found.sum(), x)[0], torch.full((2,), float(factor)))
            assert not (repeated and slow)


def test_lists_of_an_optimizer_are_compared_by_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor with each other would take milliseconds."""

    @opsmith.operator("fast_lists::many_", mutates=["kept"])
    def many_(kept: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        for one, other in zip(kept, given, strict=True):
            one.add_(other)
        return [each * 2 for each in given]

    many_.kernel("cpu", many_.reference)
    asked: Counter[int] = Counter()
    storage_of = capabilities.storage_of
    monkeypatch.setattr(
        capabilities, "storage_of", lambda tensor: asked.update([id(tensor)]) or storage_of(tensor)
    )
    for _ in range(2):
        many_([torch.ones(2) for _ in range(50)], [torch.ones(2) for _ in range(50)])
    assert asked
    assert max(asked.values()) < 20
