"""The bits of a tensor, kept to see whether anybody writes into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opsmith.checking.difference import Difference, unequal


@dataclass(frozen=True)
class Kept:
    """A tensor, and its bits as they were.

    Args:
        tensor: The tensor.
        before: A copy of it.
    """

    tensor: Tensor
    before: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Kept:
        """Keep the bits that a tensor has now."""
        return cls(tensor, tensor.detach().clone())

    def written(self) -> str | None:
        """What was written since, in words; None where every bit is as it was."""
        now = self.tensor.detach()
        if same_bits(now, self.before):
            return None
        return written_words(unequal(now, self.before))


def written_words(difference: Difference | None) -> str:
    """A difference in words; without one, the bits differ where the numbers are equal: -0.0, or a nan."""
    return str(difference) if difference is not None else "other bits for the same numbers (-0.0, or a nan)"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, bit for bit: nan equals nan, and -0.0 is not 0.0.

    Example:
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().flatten()
    # Even of what counts as contiguous, a single element can have any stride.
    return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)
