"""The memory layouts in which the same numbers reach an operator, as input and as incoming gradient.

`.sum()` hands back an expanded gradient (all strides 0), `.mT` and `cat` hand back strided ones, and users
slice what they pass on. An operator that counts on contiguous memory is wrong for them, and gradcheck, which
only makes contiguous tensors, does not see it.

Each layout is an expression of `x`, as a person would write it, which is run here and shown in scripts: both
are the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

PLAIN = "contiguous"
CHUNK = "a chunk of a larger tensor"

PAIRS = 3
"""Of so many pairs of dimensions, beside the last two, the order is swapped."""


@dataclass(frozen=True)
class Layout:
    """A way for a tensor's numbers to lie in memory.

    Args:
        name: What such a tensor is, in words.
        code: An expression of the contiguous tensor `x`, of the same shape.
        handed_back_by: An operation of torch whose backward makes such a gradient.
        repeats: Whether some of the numbers are repeated, in the place of others.
        undone: What makes such a tensor contiguous again.
    """

    name: str
    code: str
    handed_back_by: str
    repeats: bool = False
    undone: str = ".contiguous()"

    def of(self, x: Tensor) -> Tensor:
        """A tensor in this layout, in memory of its own.

        Args:
            x: A contiguous tensor; any shape that this layout is for.
        """
        made: Tensor = eval(self.code, {"torch": torch, "x": x.clone()})  # the code that scripts show
        return made


def plain(x: Tensor) -> Tensor:
    """The same numbers, contiguous, in memory of their own.

    Example:
        >>> import torch
        >>> plain(torch.ones(2, 3).mT).stride()
        (2, 1)
    """
    return x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def layouts_for(x: Tensor) -> tuple[Layout, ...]:
    """The layouts that a tensor can have, the most telling first.

    Args:
        x: A contiguous tensor.

    Example:
        >>> import torch
        >>> [layout.name for layout in layouts_for(torch.ones(()))]
        ['expanded from one number', 'one element into its memory', 'sliced with a step', 'a negated view']
    """
    return tuple(_layouts(x))


def _layouts(x: Tensor) -> Iterator[Layout]:
    shape, rank = tuple(x.shape), x.dim()
    long = [at for at, size in enumerate(shape) if size > 1]
    guard = _guard(x)
    if x.numel():
        yield Layout("expanded from one number", f"x.flatten()[0].expand({shape})", "`.sum()`", repeats=True)
    if rank in (4, 5) and len(long) > 1:
        form = "torch.channels_last" if rank == 4 else "torch.channels_last_3d"
        yield Layout(
            "channels last", f"x.contiguous(memory_format={form})", "a convolution with channels last"
        )
    if rank >= 2 and {rank - 2, rank - 1} <= set(long):
        yield Layout("transposed", "x.mT.contiguous().mT", "`.mT`")
    if x.numel():
        code = f"torch.cat([{guard}.flatten()[:1], x.flatten()])[1:].view({shape})"
        yield Layout("one element into its memory", code, "`torch.cat`", undone=".clone()")
    yield Layout("sliced with a step", f"torch.stack([{guard}, x], -1)[..., 1]", "`torch.stack`")
    if rank >= 2 and x.numel():
        yield Layout(
            "expanded along the first dimension", f"x[:1].expand({shape})", "`.sum(0)`", repeats=True
        )
        yield Layout(
            "expanded along the last dimension", f"x[..., :1].expand({shape})", "`.sum(-1)`", repeats=True
        )
        yield Layout("every other row", f"torch.stack([{guard}, x], 1)[:, 1]", "`torch.stack`")
    if rank:
        yield Layout(CHUNK, f"torch.cat([{guard}, x], -1).chunk(2, -1)[1]", "`torch.cat`")
    if rank >= 3 and len(long) > 2:
        turned = tuple(reversed(range(rank)))
        yield Layout(
            "with its dimensions in reverse", f"x.permute{turned}.contiguous().permute{turned}", "`.permute`"
        )
    pairs = [pair for pair in combinations(long, 2) if pair != (rank - 2, rank - 1)]
    for first, second in pairs if len(pairs) <= PAIRS else (pairs[0], pairs[len(pairs) // 2], pairs[-1]):
        swap = f"transpose({first}, {second})"
        yield Layout(
            f"transposed in dimensions {first} and {second}", f"x.{swap}.contiguous().{swap}", f"`.{swap}`"
        )
    if x.is_complex():
        yield Layout(
            "a conjugate view", "x.conj().resolve_conj().conj()", "`.conj()`", undone=".resolve_conj()"
        )
    elif x.dtype in (torch.float32, torch.float64):
        code = "torch.complex(torch.zeros_like(x), -x).conj().imag"
        yield Layout(
            "a negated view", code, "`.conj()` on complex numbers", undone=".resolve_neg().contiguous()"
        )
    if 1 in shape and x.numel():
        strides = tuple(
            x.numel() + 3 if size == 1 else step for size, step in zip(shape, x.stride(), strict=True)
        )
        code = f"x.as_strided({shape}, {strides})"
        yield Layout(
            "with an odd stride where it has one element",
            code,
            "a slice",
            undone=".clone(memory_format=torch.contiguous_format)",
        )


def _guard(x: Tensor) -> str:
    """Numbers to lie between those of `x`, by which it shows that they were read."""
    if x.is_floating_point() or x.is_complex():
        return "torch.full_like(x, torch.nan)"
    return "~x" if x.dtype == torch.bool else "x.roll(1)"  # an index stays one


def incoming(like: Tensor, generator: torch.Generator) -> Tensor:
    """A random gradient for a result, contiguous; its dtype and device are the result's.

    Example:
        >>> import torch
        >>> incoming(torch.ones(2, 3), torch.Generator()).stride()
        (3, 1)
    """
    wide = torch.complex128 if like.is_complex() else torch.float64
    shape: Sequence[int] = like.shape
    return torch.randn(tuple(shape), generator=generator, dtype=wide).to(like.device, like.dtype)
