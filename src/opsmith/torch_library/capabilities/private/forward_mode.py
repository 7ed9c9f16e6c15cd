"""Dual tensors at the current level of forward mode, and the propagation of tangents."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_C: Any = torch._C


def forward_mode_active() -> bool:
    """Return True if a forward-mode level is open, so that arguments may carry tangents."""
    return forward_ad._current_level >= 0 and forward_mode_allowed()


def forward_mode_allowed() -> bool:
    """Return True if tangents propagate; inside the `forward` of a node they do not."""
    return bool(_C._is_fwd_grad_enabled())


def forward_mode_on() -> AbstractContextManager[None]:
    """Context in which tangents propagate, even inside a `jvp` staticmethod, where torch turns them off."""
    return forward_ad._set_fwd_grad_enabled(True)


def primal_of(tensor: Tensor) -> Tensor:
    """A tensor without its tangent."""
    primal: Tensor = torch._unpack_dual(tensor, level=0)[0]
    return primal


def outside_graph(tensor: Tensor) -> Tensor:
    """A tensor that requires no gradient, but keeps its tangent, which `detach` would drop."""
    if not forward_mode_active():
        return tensor.detach()
    primal, tangent = unpack_dual(tensor)
    return primal.detach() if tangent is None else make_dual(primal.detach(), tangent.detach())


def unpack_dual(value: Any) -> tuple[Any, Tensor | None]:
    """A value and its tangent at the current forward-mode level, if it has one."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value, None
    primal, tangent = torch._unpack_dual(value, level=0)
    return primal, tangent


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """A tensor with a tangent, at the current forward-mode level."""
    dual: Tensor = torch._make_dual(primal, tangent, level=0)
    return dual


def self_test() -> None:
    """A tangent is attached, passes through an operation, leaves the graph, and is returned unchanged."""
    x, t = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert not forward_mode_active()
    assert unpack_dual(3) == (3, None)
    with forward_ad.dual_level():
        assert forward_mode_active()
        with forward_ad._set_fwd_grad_enabled(False):
            assert not forward_mode_active()
            with forward_mode_on():
                assert forward_mode_active()
                primal, tangent = unpack_dual(make_dual(x, t) * 2)
        assert tangent is not None, "an operation lost the tangent"
        assert (primal.tolist(), tangent.tolist()) == ([2.0, 4.0], [6.0, 10.0])
        assert unpack_dual(primal_of(make_dual(x, t)))[1] is None, "a primal kept its tangent"
        cut = outside_graph(make_dual(x.clone().requires_grad_(), t) * 2)
        kept = unpack_dual(cut)[1]
        assert kept is not None, "a tangent did not leave the graph with its tensor"
        assert kept.tolist() == [6.0, 10.0]
        assert not cut.requires_grad
    assert not forward_mode_active()
