"""Tensors with a form and no data, by which a check calls fake kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_mode() -> Any:
    """A region whose tensors have a form and no data; its `from_tensor` makes one of a real tensor."""
    return FakeTensorMode()


def self_test() -> None:
    """Operations on stand-ins give the form of what they would give, and the device."""
    mode = fake_mode()
    x = mode.from_tensor(torch.ones(3, 2).mT)
    with mode:
        product = x @ torch.ones(3, 4)
    assert (product.shape, product.device.type, product.dtype) == ((2, 4), "cpu", torch.float32)
    assert x.stride() == (1, 2)
    assert type(product) is not torch.Tensor
