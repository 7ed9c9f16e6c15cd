"""What can be known of running `torch.func` transforms by public means: whether there is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PROBE = torch.empty(0)


class SingleLevelFunction:
    """No node of one layer: what is derived from this can be imported, and is not used."""


def innermost_layer() -> str | None:
    """A word for the innermost `torch.func` transform that is running; None outside."""
    try:
        _PROBE.requires_grad_()
    except RuntimeError:  # torch forbids it under a transform, and nowhere else
        return "some"
    return None


def is_gradient_batch(tensor: Tensor) -> bool:
    """Whether a tensor is a batch of gradients, by `is_grads_batched=True`: torch detaches any other."""
    try:
        tensor.detach()
    except RuntimeError:
        return True
    return False


def unwrap_dead(value: Any) -> Any:
    """A tensor, or a view of it: any operation gives a plain one where its transform is gone."""
    return value.view_as(value) if isinstance(value, Tensor) else value
