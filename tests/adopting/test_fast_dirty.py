"""Known calls of adopted classes that mark an argument as dirty: as `apply`, with a graph, in eager code."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

import opsmith
from opsmith import errors


class Decayed(Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(s)
        return s.mul_(0.5).add_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 0.5, grad


class ScaledBesides(Function):
    @staticmethod
    def forward(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return s.mul_(x), x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], other * 3


class Exponential(Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(s)
        s.mul_(x.detach()).exp_()
        ctx.save_for_backward(s, x)
        return s

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        s, x = ctx.saved_tensors
        return grad * s * x, None


class Flagged(Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, x: Tensor, in_place: bool = True) -> Tensor:
        if in_place:
            ctx.mark_dirty(s)
            return s.mul_(2).add_(x)
        return s * 2 + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, grad, None


class KeepsWhatItWas(Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, x: Tensor) -> Tensor:
        kept = s.clone()
        ctx.mark_dirty(s)
        ctx.save_for_backward(kept, x)
        return s.mul_(s).mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, x = ctx.saved_tensors
        return 2 * grad * kept * x, grad * kept * kept


class WrittenLast(Function):
    @staticmethod
    def forward(ctx: Any, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(s)
        return x * 2, s.add_(x)

    @staticmethod
    def backward(ctx: Any, other: Tensor, grad: Tensor) -> Any:
        return grad, other * 2 + grad


class InATuple(Decayed):
    @staticmethod
    def forward(ctx: Any, s: Tensor, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        ctx.mark_dirty(s)
        return (s.mul_(0.5).add_(x),)


CLASSES = {
    each.__name__: each
    for each in (Decayed, ScaledBesides, Exponential, Flagged, KeepsWhatItWas, WrittenLast, InATuple)
}

GIVEN: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor, list[Tensor]]]] = {
    "a constant": lambda s, x: (s, x.requires_grad_(), [x]),
    "a value": lambda s, x: (s.requires_grad_() * 1, x, [s]),
    "both": lambda s, x: (s.requires_grad_() * 1, x.requires_grad_(), [s, x]),
    "columns": lambda s, x: ((s.requires_grad_() * 1).T.clone(memory_format=torch.preserve_format), x, [s]),
    "an empty one": lambda s, x: (s[:0].clone(), x[:0].clone().requires_grad_(), []),
    "a number": lambda s, x: (s.sum(), x[0, 0].clone().requires_grad_(), []),
    "doubles": lambda s, x: (s.double(), y := x.double().requires_grad_(), [y]),
}


def shown(function: Callable[..., Any], how: str) -> Any:
    """Whatever a caller sees of one call: results, identity, versions, names of nodes, and gradients."""
    torch.manual_seed(0)
    s, x, leaves = GIVEN[how](torch.rand(3, 3), torch.rand(3, 3))
    returned = function(s, x)
    results = returned if isinstance(returned, tuple) else (returned,)
    total = sum((each * each).sum() for each in results)
    found = (
        [
            None if each is None else each.tolist()
            for each in torch.autograd.grad(total, leaves, allow_unused=True)
        ]
        if leaves
        else []
    )
    return (
        type(returned),
        [(each.tolist(), each is s, each.requires_grad, each._version) for each in results],
        found,
    )


@pytest.mark.parametrize("how", GIVEN)
@pytest.mark.parametrize("name", CLASSES)
def test_as_apply(name: str, how: str) -> None:
    operator = opsmith.adopt(CLASSES[name], f"fast_dirty::{name}_{list(GIVEN).index(how)}")
    for _ in range(5):
        assert shown(operator, how) == shown(CLASSES[name].apply, how)


def test_nothing_of_a_call_is_kept() -> None:
    operator = opsmith.adopt(Exponential, "fast_dirty::kept")
    for _ in range(3):
        x = torch.ones(2, requires_grad=True)
        s = torch.ones(2) * x
        watched = weakref.ref(operator(s, x))
        del s
        gc.collect()
        assert watched() is None


class Changing(Function):
    how = ""

    @staticmethod
    def forward(ctx: Any, s: Tensor, x: Tensor) -> Any:
        if Changing.how == "marks nothing":
            return s.mul_(2)
        ctx.mark_dirty(s)
        s.mul_(2)
        if Changing.how == "writes the other":
            x.mul_(2)
        if Changing.how == "a constant":
            ctx.mark_non_differentiable(s)
        return (s, x * 2) if Changing.how == "one result more" else s

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("marks nothing", "`s`"),
        ("writes the other", "wrote into an input, but earlier runs did not write into this input"),
        ("one result more", "wrote into `s` and then returned results"),
        ("a constant", "marks `s` as dirty and as non-differentiable"),
    ],
)
def test_a_call_that_does_otherwise_is_refused(how: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = opsmith.adopt(Changing, f"fast_dirty::{how.replace(' ', '_')}")
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        operator(x * 1, torch.ones(2))
    monkeypatch.setattr(Changing, "how", how)
    with pytest.raises(errors.MutationError, match=words):
        operator(x * 1, torch.ones(2))


def test_leaves_views_and_shared_elements_are_no_usual_writes() -> None:
    operator = opsmith.adopt(Decayed, "fast_dirty::unusual")
    x = torch.ones(2, 2, requires_grad=True)
    for _ in range(3):
        operator(torch.ones(2, 2), x)
    with pytest.raises(errors.MutationError, match="a leaf that requires a gradient"):
        operator(torch.ones(2, 2, requires_grad=True), x)
    with pytest.raises(errors.MutationError, match="shares elements with `x`"):
        operator(x.detach(), x)
    base = torch.zeros(2, 2, 2)
    operator(base[1], x)
    (gradient,) = torch.autograd.grad((base * torch.arange(8.0).reshape(2, 2, 2)).sum(), x)
    assert gradient.tolist() == [[4.0, 5.0], [6.0, 7.0]]
