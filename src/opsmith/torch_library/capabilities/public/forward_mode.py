"""Dual tensors by `torch.autograd.forward_ad`: a level is found by trying to use it, which takes longer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PROBE = torch.zeros(())


def forward_mode_active() -> bool:
    """Whether a forward-mode level is open, so that arguments may carry tangents."""
    try:
        forward_ad.make_dual(_PROBE, _PROBE)
    except Exception as error:  # whatever else torch says, it got further than to look for a level
        return "no level exists" not in str(error)
    return True


def forward_mode_allowed() -> bool:
    """Whether tangents propagate: where a level is open it is taken for granted."""
    return True


def forward_mode_on() -> AbstractContextManager[None]:
    """No region: what runs inside a `jvp` staticmethod has no tangents left to propagate."""
    return nullcontext()


def primal_of(tensor: Tensor) -> Tensor:
    """A tensor without its tangent."""
    primal: Tensor = forward_ad.unpack_dual(tensor).primal
    return primal


def outside_graph(tensor: Tensor) -> Tensor:
    """A tensor that requires no gradient, with its tangent, which `detach` would drop."""
    if not forward_mode_active():
        return tensor.detach()
    primal, tangent = unpack_dual(tensor)
    return primal.detach() if tangent is None else make_dual(primal.detach(), tangent.detach())


def unpack_dual(value: Any) -> tuple[Any, Tensor | None]:
    """A value and its tangent at the forward-mode level in force, if it has one."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value, None
    dual: Any = forward_ad.unpack_dual(value)
    return dual.primal, dual.tangent


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """A tensor with a tangent, at the forward-mode level in force."""
    dual: Tensor = forward_ad.make_dual(primal, tangent)
    return dual
