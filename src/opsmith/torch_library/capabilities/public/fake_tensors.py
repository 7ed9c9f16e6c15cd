"""Tensors of the device `meta` in place of stand-ins: they have a form, and say nothing about devices."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor


class _Meta:
    def __enter__(self) -> _Meta:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def from_tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of the same form, without data."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def fake_mode() -> _Meta:
    """A region whose tensors have a form and no data; its `from_tensor` makes one of a real tensor."""
    return _Meta()


def symbolic_mode() -> None:
    """Nothing: tensors of the device `meta` have sizes, and no symbols."""
    return
