"""What the right gradient of a broadcast input is summed from.

Where the input lies along the last dimensions of a result, it is the right gradient by the same numbers
written out to the shape of that result. Else it is put together from what each element of it contributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from opsmith.checking.diagnosis.observation import Observation
from opsmith.checking.numerics.compare import peak, wide

CLOSE = 1e-12
MOST = 96
"""Elements of a result that are looked at one by one."""


@dataclass(frozen=True)
class Terms:
    """A sum over some dimensions.

    Args:
        values: The terms, in the shape of the result.
        dims: The dimensions that are summed over.
        shape: The shape of the sum.
    """

    values: Tensor
    dims: tuple[int, ...]
    shape: torch.Size

    def part(self, dim: int, kept: slice) -> Tensor:
        """The sum of some of the terms along one dimension, and of all along the others."""
        index = [slice(None)] * self.values.dim()
        index[dim] = kept
        return self.values[tuple(index)].sum(self.dims).reshape(self.shape)

    def by_torch(self) -> Tensor | None:
        """The sum that autograd makes of a gradient of that shape, from what comes last; None if none."""
        try:
            return self.values.sum_to_size(self.shape)
        except RuntimeError:  # the shape is none that broadcasts to it
            return None

    def count(self, dim: int | None) -> float:
        """How many terms there are along a dimension, or in all."""
        if dim is not None:
            return self.values.shape[dim]
        return self.values.numel() / max(self.shape.numel(), 1)


def terms_of(seen: Observation, right: Tensor) -> Terms | None:
    """The terms of a right gradient; None where its input was not broadcast."""
    own = seen.inputs.get(seen.about or "")
    if not isinstance(own, Tensor) or seen.about is None or not own.numel():
        return None
    for name, result in seen.results.items():
        if result.numel() <= own.numel() or result.dim() < own.dim():
            continue
        found = _written_out(seen, own, result, right) or _put_together(seen, name, result, right)
        if found is not None:
            return found
    return None


def _written_out(seen: Observation, own: Tensor, result: Tensor, right: Tensor) -> Terms | None:
    sizes = zip(reversed(own.shape), reversed(result.shape), strict=False)
    if seen.right_at is None or not all(mine in (1, theirs) for mine, theirs in sizes):
        return None
    found = seen.right_at({str(seen.about): own.detach().expand(result.shape).contiguous()})
    if found is None or found.shape != result.shape:
        return None
    ahead = result.dim() - own.dim()
    dims = [dim for dim in range(result.dim()) if dim < ahead or own.shape[dim - ahead] == 1]
    return _borne_out(wide(found), tuple(dims), right)


def _put_together(seen: Observation, name: str, result: Tensor, right: Tensor) -> Terms | None:
    grad = seen.grads.get(name)
    if seen.right is None or grad is None or grad.numel() > MOST or grad.is_complex() or right.is_complex():
        return None
    values = torch.zeros(grad.numel(), dtype=torch.float64)
    for at in range(grad.numel()):
        alone = torch.zeros_like(grad).flatten()
        alone[at] = grad.flatten()[at]
        only = alone.reshape(grad.shape)
        given = {each: only if each == name else _nothing(other) for each, other in seen.grads.items()}
        share = wide(seen.right(list(given.values())))
        if int(share.count_nonzero()) > 1:
            return None  # one element of the result depends on several of the input: that is no broadcasting
        values[at] = share.sum()
    dims = range(grad.dim())
    for count in range(1, grad.dim() + 1):
        for some in combinations(dims, count):
            found = _borne_out(values.reshape(grad.shape), some, right)
            if found is not None:
                return found
    return None


def _borne_out(values: Tensor, dims: tuple[int, ...], right: Tensor) -> Terms | None:
    """The terms, if they add up to the right gradient."""
    if not dims:
        return None
    total = values.sum(dims)
    if total.numel() != right.numel():
        return None
    off = peak(total.reshape(right.shape) - right)
    return Terms(values, dims, right.shape) if off <= CLOSE * peak(values) * values.numel() else None


def _nothing(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else torch.zeros_like(grad)
