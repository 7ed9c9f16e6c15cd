"""A function of one of its arguments: the change of its weighted results when that argument moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.numerics.autodiff import Results
from opsmith.core.cached_property import cached_property
from opsmith.judging.tensors import is_inexact


@dataclass(frozen=True)
class PackedTensors:
    """The values of a list at `argnums` packed into one row of numbers; complex numbers are pairs of them."""

    values: Sequence[Any]
    argnums: tuple[int, ...]

    @cached_property
    def row(self) -> Tensor:
        """The packed numbers."""
        return torch.cat([coordinates(self.values[argnum]) for argnum in self.argnums])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Count of numbers of each packed value."""
        return tuple(coordinates(self.values[argnum]).numel() for argnum in self.argnums)

    def unpacked(self, row: Tensor) -> list[Any]:
        """Return the values, with the packed ones taken from a row."""
        values = list(self.values)
        for argnum, piece in zip(self.argnums, row.split(self.sizes), strict=True):
            like = values[argnum]
            own = piece.clone()  # a slice of a row would have an offset into its memory
            shaped = torch.view_as_complex(own.view(-1, 2)) if like.is_complex() else own
            values[argnum] = shaped.view(like.shape)
        return values

    def locate(self, position: int) -> tuple[int, int]:
        """Return the position of the value that a number of the row belongs to, and its index there."""
        for argnum, size in zip(self.argnums, self.sizes, strict=True):
            if position < size:
                return argnum, position
            position -= size
        raise ValueError("a position beyond the end of the row")


class DirectionalFunction:
    """Results of a function times their grad_outputs, element by element, as one argument moves.

    Complex numbers are pairs of real ones here, so that a *coordinate* is an element, or one part of it. The
    sum of the weighted results is the loss whose gradient torch's backward gives. Results are subtracted
    before they are summed: those that do not depend on a coordinate cancel exactly.

    Args:
        function: Function of flat arguments.
        flat: Arguments.
        argnum: Position of the argument that moves.
        grads: grad_output of each result; None where there is none.
    """

    def __init__(
        self, function: Results, flat: Sequence[Any], argnum: int, grads: Sequence[Tensor | None]
    ) -> None:
        self._function, self._packed, self._grads = function, PackedTensors(list(flat), (argnum,)), grads
        self._numbers = self._packed.row
        self.coordinates = self._numbers.double()
        compared = [
            (
                position,
                coordinates(result).double(),
                coordinates(grad.to(result.device, wide(result))),
                result.dtype,
            )
            for position, (grad, result) in enumerate(zip(grads, self._results(self._numbers), strict=True))
            if grad is not None and result is not None and is_inexact(result)
        ]
        self._compared = [position for position, *_ in compared]
        self._counts = [value.numel() for _, value, _, _ in compared]
        self._values = _joined([value for _, value, _, _ in compared])
        self._weights = _joined([weight for _, _, weight, _ in compared])
        self._steady = bool(self._values.isfinite().all())
        self.has_nan = bool(self._values.isnan().any())
        """True if a result is nan at the point itself: then nan flows into gradients."""
        self.weighed = (self._values * self._weights).nan_to_num(0.0, 0.0, 0.0)
        """Weighted results at the point itself; 0 where they are not finite."""
        self.rounding = _joined(
            [torch.full_like(v, torch.finfo(dtype).eps / 2) for _, v, _, dtype in compared]
        )
        """Half of the eps of each weighted result's dtype."""
        self.unit = float(torch.finfo(self._numbers.dtype).eps) / 2
        sizes = flat[argnum].detach().abs().double().reshape(-1).nan_to_num(0.0, 0.0, 0.0)
        self.sizes = sizes.repeat_interleave(2) if flat[argnum].is_complex() else sizes
        """Absolute value of the element that each coordinate belongs to; 0 where it is not finite."""

    @cached_property
    def usual(self) -> float:
        """Typical size of the argument's elements: the median of those that are not tiny; 1 where all are."""
        present = self.sizes[self.sizes > torch.finfo(self._numbers.dtype).tiny ** 0.5]
        return float(present.median()) if present.numel() else 1.0

    def direction(self, generator: torch.Generator) -> Tensor:
        """Draw a move of every coordinate by its element's size, or by the usual one where that is 0."""
        sizes = torch.where(self.sizes > 0, self.sizes, self.usual)
        return sizes * (torch.randint(0, 2, sizes.shape, generator=generator, dtype=torch.float64) * 2 - 1)

    def along(self, direction: Tensor, step: float) -> Tensor:
        """Compute the change of each weighted result when every coordinate makes its own step."""
        return self._moved((self.coordinates + step * direction).to(self._numbers.dtype))

    def at(self, coordinate: int, step: float) -> tuple[float, Tensor]:
        """Move a coordinate: the distance after rounding, and the change of each weighted result."""
        moved = self._numbers.clone()
        moved[coordinate] += step
        return float(moved[coordinate].double() - self.coordinates[coordinate]), self._moved(moved)

    def shifted(self, by: Tensor) -> DirectionalFunction:
        """Return the same function at another point."""
        flat = self._packed.unpacked((self.coordinates + by).to(self._numbers.dtype))
        (argnum,) = self._packed.argnums
        return DirectionalFunction(self._function, flat, argnum, self._grads)

    def _moved(self, moved: Tensor) -> Tensor:
        try:
            results = self._results(moved)
        except Exception:  # outside of its domain
            return torch.full_like(self._values, torch.nan)
        numbers = [coordinates(results[position]).double() for position in self._compared]
        if [each.numel() for each in numbers] != self._counts:  # as of `x[x > 0]`: a jump
            return torch.full_like(self._values, torch.nan)
        after = _joined(numbers)
        moves = after - self._values
        if not self._steady:  # an unchanged inf or nan does not move
            moves[(after == self._values) | (after.isnan() & self._values.isnan())] = 0.0
        return moves * self._weights

    def _results(self, row: Tensor) -> Sequence[Any]:
        with torch.no_grad():
            return self._function(self._packed.unpacked(row))


def wide(tensor: Tensor) -> torch.dtype:
    """Return complex128 for a complex tensor, and float64 for another."""
    return torch.complex128 if tensor.is_complex() else torch.float64


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(list(tensors)) if tensors else torch.zeros(0, dtype=torch.float64)


def coordinates(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in a row, complex ones as pairs."""
    plain = tensor.detach()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)
