"""How a tensor has to lie for a Triton kernel: in how many dimensions, and in which layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.build.form import Form
from opsmith.kernels.choosing import MEMORY_FORMATS


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor has to lie for a kernel.

    Attributes:
        dim: How many dimensions; None for any number.
        layout: `any` strides, `contiguous` or `channels-last`.
    """

    dim: int | None
    layout: str

    def dim_fault(self, name: str, value: Any) -> str | None:
        """Why a kernel does not take a tensor of so many dimensions; None where it does."""
        if not isinstance(value, Tensor):
            return None
        dim = value.dim()
        if self.dim is not None and dim != self.dim:
            return f"`{name}` has {dim} dimensions, and it takes {self.dim}"
        if self.layout == "channels-last" and dim not in MEMORY_FORMATS:
            return f"`{name}` has {dim} dimensions, and channels-last is for 4 or 5"
        return None

    def lies_right(self, value: Any) -> bool:
        """Whether a value is no tensor, or one in this layout."""
        if not isinstance(value, Tensor) or self.layout == "any":
            return True
        return value.is_contiguous(memory_format=self._memory_format(value.dim()))

    def laid_out(self, value: Tensor) -> Tensor:
        """A copy of a tensor in this layout."""
        return value.clone(memory_format=self._memory_format(value.dim()))

    def room_for(self, form: Form, device: torch.device) -> Tensor:
        """Memory for a result of this form, as the kernel writes it."""
        if self.layout == "any":
            return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=device)
        layout = self._memory_format(len(form.shape))
        return torch.empty(form.shape, dtype=form.dtype, device=device, memory_format=layout)

    def reach(self, value: Tensor) -> int:
        """How many elements lie between the first and the last of a tensor, both counted.

        Example:
            >>> TensorLayout(None, "any").reach(torch.ones(10)[::3])
            10
        """
        if self.layout != "any" or not value.numel():
            return value.numel()
        return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))

    def _memory_format(self, dim: int) -> torch.memory_format:
        return MEMORY_FORMATS[dim] if self.layout == "channels-last" else torch.contiguous_format
