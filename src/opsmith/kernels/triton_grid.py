"""How many programs of a Triton kernel run: one to three numbers, within what a GPU takes."""

from __future__ import annotations

from typing import Any

import torch

from opsmith import errors
from opsmith.core.calls import shown
from opsmith.kernels.launching import MOST_GRID


def shape_of(grid: Any) -> tuple[Any, ...]:
    """A grid as a tuple: a number alone is one of one dimension.

    Example:
        >>> shape_of(4), shape_of([2, 3])
        ((4,), (2, 3))
    """
    return tuple(grid) if isinstance(grid, list | tuple) else (grid,)


def check_grid(grid: tuple[Any, ...], operator: str, where: str) -> None:
    """Refuse what is no grid.

    Raises:
        LaunchError: If it is not one to three whole numbers, none of them negative.
    """
    sizes = all(isinstance(size, int | torch.SymInt) and not isinstance(size, bool) for size in grid)
    if not sizes or not 1 <= len(grid) <= 3 or any(size < 0 for size in grid):
        raise errors.LaunchError(
            "the grid of the Triton kernel is none",
            operator=operator,
            argument="grid",
            expected="one to three whole numbers, none of them negative",
            got=shown(grid),
            where=where,
            hint="write `grid=lambda result, BLOCK: (triton.cdiv(result.numel(), BLOCK),)`",
        )


def check_launchable(grid: tuple[int, ...], operator: str, where: str) -> None:
    """Refuse a grid that is larger than a GPU takes.

    Raises:
        LaunchError: Naming the dimension.
    """
    for dimension, (size, limit) in enumerate(zip(grid, MOST_GRID, strict=False)):
        if size > limit:
            raise errors.LaunchError(
                "the grid of the Triton kernel has more programs than a GPU takes",
                operator=operator,
                argument="grid",
                expected=f"at most {limit} in dimension {dimension}",
                got=f"{grid}",
                where=where,
                hint="put the larger number first, or let each program do more",
            )
