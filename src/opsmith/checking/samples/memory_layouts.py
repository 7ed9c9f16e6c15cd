"""Memory layouts in which inputs and grad_outputs with the same numbers may reach an operator.

The backward of `.sum()` returns an expanded gradient (all strides 0), those of `.mT` and `cat` return strided
ones, and users pass slices. An operator that assumes contiguous memory is wrong for them; gradcheck, which
makes only contiguous tensors, does not detect it.

Each layout is an expression of `x`, which this module runs and scripts show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from types import CodeType
from typing import Any

import torch
from torch import Tensor

PLAIN = "contiguous"
CHUNK = "a chunk of a larger tensor"
COPIED = ".clone(memory_format=torch.contiguous_format)"

PAIRS = 3
"""Maximum number of pairs of dimensions that are swapped, in addition to the last two."""


@dataclass(frozen=True)
class Layout:
    """A memory layout of a tensor.

    Args:
        name: Description of such a tensor.
        code: Expression of the contiguous tensor `x`, of the same shape.
        handed_back_by: Operation of torch whose backward makes such a gradient.
        repeats: True if some numbers are replaced by repeated numbers, as in an expanded tensor.
        undone: Expression that makes such a tensor contiguous again.
    """

    name: str
    code: str
    handed_back_by: str
    repeats: bool = False
    undone: str = ".contiguous()"

    def of(self, x: Tensor) -> Tensor:
        """Return a tensor in this layout, in memory of its own.

        Args:
            x: Contiguous tensor of a shape that this layout supports.
        """
        made: Tensor = eval(_compiled(self.code), {"torch": torch, "x": x.clone()})  # as scripts show it
        return made


@cache
def _compiled(code: str) -> CodeType:
    return compile(code, "<layout>", "eval")


def plain(x: Any) -> Any:
    """Copy the numbers into contiguous memory.

    Example:
        >>> import torch
        >>> plain(torch.ones(2, 3).mT).stride()
        (2, 1)
    """
    if not isinstance(x, Tensor):
        return x
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def layouts_of(flat: Sequence[Any]) -> Iterator[tuple[int, Layout]]:
    """Yield the position of each tensor with each layout that it can have."""
    for argnum, value in enumerate(flat):
        if isinstance(value, Tensor):
            yield from ((argnum, layout) for layout in layouts_for(value))


def layouts_for(x: Tensor) -> tuple[Layout, ...]:
    """Return the layouts that a tensor can have; the most revealing come first.

    Args:
        x: Contiguous tensor.

    Example:
        >>> import torch
        >>> [layout.name for layout in layouts_for(torch.ones(()))][:2]
        ['expanded from one number', 'at an offset of one element in its memory']
    """
    return tuple(_layouts(x))


def _layouts(x: Tensor) -> Iterator[Layout]:
    shape, rank, full = tuple(x.shape), x.dim(), bool(x.numel())
    long = [at for at, size in enumerate(shape) if size > 1]
    guard = _guard(x)
    if full:
        yield Layout("expanded from one number", f"x.flatten()[0].expand({shape})", "`.sum()`", repeats=True)
    if rank in (4, 5) and len(long) > 1:
        form = "torch.channels_last" if rank == 4 else "torch.channels_last_3d"
        code = f"x.contiguous(memory_format={form})"
        yield Layout("channels last", code, "a convolution with channels last")
    if rank >= 2 and {rank - 2, rank - 1} <= set(long):
        yield Layout("transposed", "x.mT.contiguous().mT", "`.mT`")
    if full:
        code = f"torch.cat([{guard}.flatten()[:1], x.flatten()])[1:].view({shape})"
        yield Layout("at an offset of one element in its memory", code, "`torch.cat`", undone=COPIED)
    yield Layout("sliced with a step", f"torch.stack([{guard}, x], -1)[..., 1]", "`torch.stack`")
    if rank >= 2 and full:
        for which, code, sums in ("first", "x[:1]", "0"), ("last", "x[..., :1]", "-1"):
            name = f"expanded along the {which} dimension"
            yield Layout(name, f"{code}.expand({shape})", f"`.sum({sums})`", repeats=True)
        yield Layout("every other row", f"torch.stack([{guard}, x], 1)[:, 1]", "`torch.stack`")
    if rank:
        yield Layout(CHUNK, f"torch.cat([{guard}, x], -1).chunk(2, -1)[1]", "`torch.cat`")
    turns = [("with reversed dimensions", f"permute{tuple(reversed(range(rank)))}", "permute")]
    pairs = [pair for pair in combinations(long, 2) if pair != (rank - 2, rank - 1)]
    for pair in pairs if len(pairs) <= PAIRS else (pairs[0], pairs[len(pairs) // 2], pairs[-1]):
        swap = f"transpose{pair}"
        turns.append((f"transposed in dimensions {pair[0]} and {pair[1]}", swap, swap))
    for name, turn, by in turns if rank >= 3 and len(long) > 2 else turns[1:]:
        yield Layout(name, f"x.{turn}.contiguous().{turn}", f"`.{by}`")
    if x.is_complex():
        code, undone = "x.conj().resolve_conj().conj()", ".resolve_conj()"
        yield Layout("a conjugate view", code, "`.conj()`", undone=undone)
    elif x.dtype in (torch.float32, torch.float64):
        code, undone = "torch.complex(torch.zeros_like(x), -x).conj().imag", ".resolve_neg().contiguous()"
        yield Layout("a negated view", code, "`.conj()` on complex numbers", undone=undone)
    if 1 in shape and full:
        steps = zip(shape, x.stride(), strict=True)
        strides = tuple(x.numel() + 3 if size == 1 else step for size, step in steps)
        code = f"x.as_strided({shape}, {strides})"
        yield Layout("with an odd stride in a dimension of size 1", code, "a slice", undone=COPIED)


def _guard(x: Tensor) -> str:
    """Return an expression of numbers to put between the numbers of `x`, so that reading them is noticed."""
    if x.is_floating_point() or x.is_complex():
        return "torch.full_like(x, torch.nan)"
    return "~x" if x.dtype == torch.bool else "x.roll(1)"  # an index stays valid
