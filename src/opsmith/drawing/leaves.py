"""Leaves of autograd's graph, and the nodes that add up their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def leaf_of(node: Any) -> Tensor | None:
    """The leaf whose gradient a node of autograd adds up; None if it is another node.

    The name of its class tells, since any Function may keep a `variable` of its own on its context.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> made = x.exp().grad_fn
        >>> leaf_of(made), leaf_of(made.next_functions[0][0]) is x
        (None, True)
    """
    if type(node).__name__ != "AccumulateGrad":
        return None
    leaf: Tensor = node.variable
    return leaf
