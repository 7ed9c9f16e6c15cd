"""Several tensors of a list as one row of numbers, so that they are moved together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Some values of a list in one row; complex numbers are pairs of real ones.

    Args:
        values: The values.
        places: Which of them lie in the row.
    """

    values: Sequence[Any]
    places: tuple[int, ...]

    @cached_property
    def row(self) -> Tensor:
        """The row."""
        return torch.cat([coordinates(self.values[place]) for place in self.places])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many numbers each place has in it."""
        return tuple(coordinates(self.values[place]).numel() for place in self.places)

    def unpacked(self, row: Tensor) -> list[Any]:
        """The values, those of the places from a row."""
        values = list(self.values)
        for place, piece in zip(self.places, row.split(self.sizes), strict=True):
            like = values[place]
            own = piece.clone()  # a part of a row begins inside of its memory, and layouts are another matter
            shaped = torch.view_as_complex(own.view(-1, 2)) if like.is_complex() else own
            values[place] = shaped.view(like.shape)
        return values

    def place_of(self, position: int) -> tuple[int, int]:
        """The place that a number of the row belongs to, and where it stands there."""
        for place, size in zip(self.places, self.sizes, strict=True):
            if position < size:
                return place, position
            position -= size
        raise ValueError("a position beyond the end of the row")


def coordinates(tensor: Tensor) -> Tensor:
    """A tensor's numbers in a row, complex ones as pairs."""
    plain = tensor.detach()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)
