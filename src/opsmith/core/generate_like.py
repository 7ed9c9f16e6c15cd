"""Generate tensors like a given tensor: new numbers, maybe a new shape, the same structure.

The domain of an operator is known only from its samples. So numbers stay in the range of the given numbers;
positive numbers stay positive, and whole numbers whole. Sorted tensors stay sorted, and so do distinct
values, booleans and permutations. Matrices stay orthogonal, symmetric, positive definite, triangular or
diagonally dominant; rows that sum to one, or have length one, still do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opsmith.core.tensors import tiled

Shape = Sequence[int]
Structure = Callable[[Tensor, Shape, torch.Generator], Tensor | None]
"""Function that makes a tensor of a shape if the given tensor has the structure; else returns None."""

INEXACT = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""dtypes of whole numbers."""

LARGER, SMALLER = 4.0, 1 / 16

FEW = 3
"""Maximum number of distinct values of a tensor that is a choice among few values."""


def generate_like(tensor: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """Generate a tensor of this shape, with numbers and structure like the given tensor's.

    Args:
        tensor: The given tensor, of any dtype.
        shape: Shape of the new tensor.
        generator: Source of random numbers.

    Example:
        >>> import torch
        >>> generate_like(torch.tensor([2, 0, 1]), (4,), torch.Generator().manual_seed(0)).sort().values
        tensor([0, 1, 2, 3])
    """
    given = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not given.numel():
        return _of_nothing(given, shape, generator)
    for structure in _structures(given):
        made = structure(given, tuple(shape), generator)
        if made is not None:
            return made.to(tensor.device, given.dtype).contiguous()
    raise AssertionError("the last structure fits every tensor")


def repeated(tensor: Tensor, shape: Shape) -> Tensor:
    """Return a tensor of this shape, with the given tensor's numbers repeated along each dimension.

    Args:
        tensor: The given tensor, of any dtype.
        shape: Shape of the new tensor, with the same number of dimensions.

    Example:
        >>> import torch
        >>> repeated(torch.tensor([2, 0, 1]), (4,))
        tensor([2, 0, 1, 2])
    """
    given = tensor.detach().cpu()
    if not given.numel():
        return _of_nothing(given, shape, torch.Generator().manual_seed(0)).to(tensor.device)
    return _tiled(given, shape, torch.Generator()).to(tensor.device)


def is_invented(tensor: Tensor, made: Tensor) -> bool:
    """Return True if there are no whole numbers like the given ones for the new shape.

    An empty tensor shows no numbers, and a range may have too few numbers to keep them distinct.

    Args:
        tensor: The given tensor, of any dtype.
        made: The tensor that was generated like it.

    Example:
        >>> import torch
        >>> given = torch.tensor([7, 5, 6])
        >>> is_invented(given, torch.tensor([5, 7])), is_invented(given, torch.tensor([7, 5, 6, 7]))
        (False, True)
    """
    if tensor.dtype not in WHOLE or not made.numel():
        return False
    given = tensor.detach().cpu()
    return not given.numel() or (_structure_of(given) is _distinct and not _is_distinct(made))


def _is_distinct(tensor: Tensor) -> bool:
    return not bool((tensor.sort(-1).values.diff(dim=-1) == 0).any())


def _structure_of(given: Tensor) -> Structure:
    """Return the structure of a tensor with elements, on the CPU."""
    probe = torch.Generator().manual_seed(0)
    return next(each for each in _structures(given) if each(given, given.shape, probe) is not None)


def scale_factors(tensor: Tensor) -> tuple[float, ...]:
    """Return factors by which a tensor may be multiplied and stay in its domain.

    Only a tensor without structure has factors. Tensors within [-1, 1] are not made larger: they may be
    arguments of an arcsine, or probabilities. Tensors without numbers near zero are not made smaller.
    """
    given = tensor.detach().cpu()
    if not given.is_floating_point() or given.numel() < FEW:
        return ()
    if _structure_of(given) not in (_between, _increasing):
        return ()
    larger = (LARGER,) if float(given.abs().max()) > 1 else ()
    around_zero = bool((given > 0).any()) and bool((given < 0).any())
    return (*larger, SMALLER) if around_zero else larger


def _structures(given: Tensor) -> Sequence[Structure]:
    if given.dtype == torch.bool:
        return (_constant, _truths)
    if not (given.is_floating_point() or given.is_complex()):
        if given.dtype not in WHOLE:
            return (_tiled,)
        return (_permutation, _constant, _increasing_whole, _distinct, _whole)
    if given.dtype not in INEXACT or not bool(given.isfinite().all()):
        return (_tiled,)
    if given.is_complex():
        return (_constant, _orthogonal, _symmetric, _complex)
    return (
        _single,
        _constant,
        _orthogonal,
        _triangular,
        _symmetric,
        _dominated,
        _normalised,
        _log_normalised,
        _unit_rows,
        _chosen,
        _distinct_whole_numbers,
        _increasing,
        _between,
    )


def _uniform(low: float, high: float, shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * (high - low) + low


def _of_nothing(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    if given.is_floating_point() or given.is_complex():
        return _uniform(-2, 2, shape, generator).to(given.device, given.dtype)
    return torch.zeros(tuple(shape), dtype=given.dtype, device=given.device)


def _tiled(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """Repeat the given numbers along each dimension."""
    found = given if given.dim() == len(shape) else given.flatten()[:1].reshape((1,) * len(shape))
    return tiled(found, dict(enumerate(shape)))


def _constant(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    first = given.flatten()[0]
    return first.expand(tuple(shape)).clone() if bool((given == first).all()) else None


def _truths(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    share = float(given.to(torch.float64).mean())
    return torch.rand(tuple(shape), generator=generator) < share


def _permutation(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    if given.dim() != 1 or len(shape) != 1 or len(given) < 2:
        return None
    if not torch.equal(given.sort().values, torch.arange(len(given), dtype=given.dtype)):
        return None
    if torch.equal(given, given.sort().values):  # positions in order
        return torch.arange(shape[0])
    return torch.randperm(shape[0], generator=generator)


def _increasing_whole(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    """Draw sorted whole numbers with the given first and last number, such as offsets."""
    if given.dim() == 0 or given.shape[-1] < 3 or not bool((given.diff(dim=-1) >= 0).all()):
        return None
    low, high = int(given.min()), int(given.max())
    made = torch.randint(low, high + 1, tuple(shape), generator=generator).sort(-1).values
    if shape and shape[-1] > 1:
        made[..., 0], made[..., -1] = low, high
    return made


def _distinct(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    """Draw distinct numbers along the last dimension, so that scattered elements never collide."""
    if given.dim() == 0 or given.shape[-1] < 3 or not shape:
        return None
    if not _is_distinct(given):
        return None
    low, high = int(given.min()), int(given.max())
    if high - low > 4096:
        return None
    if shape[-1] > high - low + 1:
        return _tiled(given, shape, generator)
    rows = torch.empty(tuple(shape), dtype=torch.int64)
    for row in rows.view(-1, shape[-1]) if rows.numel() else ():
        row.copy_(torch.randperm(high - low + 1, generator=generator)[: shape[-1]] + low)
    return rows


def _whole(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    low, high = int(given.min()), int(given.max())
    if high >= 2**62 or low <= -(2**62):
        return _tiled(given, shape, generator)
    return torch.randint(low, high + 1, tuple(shape), generator=generator)


def _square(given: Tensor, shape: Shape) -> bool:
    return given.dim() >= 2 and given.shape[-1] == given.shape[-2] >= 2 and len(shape) >= 2


def _close(first: Tensor, second: Tensor) -> bool:
    half = torch.finfo(first.dtype).eps ** 0.5
    return bool(_apart(first, second) <= half * max(1.0, float(second.abs().max())))


def _apart(first: Tensor, second: Tensor) -> float:
    """Return the largest distance between elements of two non-empty tensors of the same shape."""
    return float((first - second).abs().max())


def _noise(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """Draw numbers within the given magnitude, complex if the given numbers are."""
    size = float(given.abs().max())
    real = _uniform(-size, size, shape, generator)
    return torch.complex(real, _uniform(-size, size, shape, generator)) if given.is_complex() else real


def _orthogonal(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    if not _square(given, shape) or shape[-1] != shape[-2]:
        return None
    if not _close(given @ given.mH, torch.eye(given.shape[-1], dtype=given.dtype).expand(given.shape)):
        return None
    made: Tensor = torch.linalg.qr(_noise(given, shape, generator))[0]
    return made


def is_symmetric(tensor: Tensor) -> bool:
    """Return True if a tensor consists of symmetric or Hermitian matrices of more than one element.

    Example:
        >>> is_symmetric(torch.eye(2)), is_symmetric(torch.ones(2, 3)), is_symmetric(torch.ones(2).diag(1))
        (True, False, False)
    """
    given = tensor.detach()
    return _square(given, given.shape) and given.numel() > 0 and _close(given, given.mH)


def _symmetric(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    if not _square(given, shape) or shape[-1] != shape[-2] or not _close(given, given.mH):
        return None
    wide = given.to(torch.complex128 if given.is_complex() else torch.float64)
    noise = _noise(given, shape, generator)
    made = (noise + noise.mH) / 2
    lowest = float(torch.linalg.eigvalsh(wide).min())
    if lowest > 0 and made.numel():
        least = torch.linalg.eigvalsh(made).min(-1).values[..., None, None].clamp(max=0)
        made = made + (lowest - least) * torch.eye(shape[-1], dtype=made.dtype)
    return made


def _triangular(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    if not _square(given, shape) or not given.any():
        return None
    lower, upper = not given.triu(1).any(), not given.tril(-1).any()
    if not (lower or upper):
        return None
    made = _between(given, shape, generator)
    made = made.tril() if lower else made
    made = made.triu() if upper else made
    diagonal = given.diagonal(dim1=-2, dim2=-1)
    on = made.diagonal(dim1=-2, dim2=-1)
    on.copy_(_between(diagonal, on.shape, generator))  # its sign and distance from zero matter most
    return made


def _dominated(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    """Draw an invertible matrix whose diagonal outweighs the rest of each row."""
    if not _square(given, shape) or shape[-1] != shape[-2]:
        return None
    diagonal = given.diagonal(dim1=-2, dim2=-1).abs()
    if not bool((2 * diagonal > given.abs().sum(-1)).all()):
        return None
    off = given - torch.diag_embed(given.diagonal(dim1=-2, dim2=-1))
    made = _between(off, shape, generator) * (given.shape[-1] / max(1, shape[-1]))
    on = made.diagonal(dim1=-2, dim2=-1)
    on.copy_(_between(given.diagonal(dim1=-2, dim2=-1), on.shape, generator))
    return made


def _normalised(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    dimension = _sums_to_one(given, given)
    if dimension is None or not shape:
        return None
    if bool(((given == 0) | (given == 1)).all()):  # one-hot
        hot = torch.randint(0, max(1, shape[dimension]), tuple(shape), generator=generator)
        first = hot.narrow(dimension, 0, min(1, shape[dimension]))
        return torch.zeros(tuple(shape), dtype=torch.float64).scatter(dimension, first, 1.0)
    made = _uniform(0.1, 1, shape, generator)
    return made / made.sum(dimension, keepdim=True)


def _log_normalised(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    if bool((given > 0).any()):
        return None
    dimension = _sums_to_one(given, given.exp())
    if dimension is None or not shape:
        return None
    return _uniform(0.1, 1, shape, generator).log().log_softmax(dimension)


def _sums_to_one(given: Tensor, shares: Tensor) -> int | None:
    """Return the dimension along which shares sum to one."""
    if bool((shares < 0).any()):
        return None
    for dimension in reversed(range(given.dim())):
        if given.shape[dimension] > 1 and _ones(shares.sum(dimension)):
            return dimension - given.dim()
    return None


def _ones(sums: Tensor) -> bool:
    return bool(_apart(sums, torch.ones_like(sums)) <= 16 * torch.finfo(sums.dtype).eps)


def _unit_rows(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    if not given.dim() or given.shape[-1] < 2 or not shape or not _ones(given.square().sum(-1)):
        return None
    made = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return made / made.square().sum(-1, keepdim=True).sqrt()


def _single(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    """Scale one number down by up to a half; keep a whole number, since no range is known."""
    if given.numel() != 1:
        return None
    value = float(given)
    if value.is_integer():
        return torch.full(tuple(shape), value)
    return value * _uniform(0.5, 1, shape, generator)


def _chosen(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    """Draw among few values, as in a mask; or among whole numbers with repetitions."""
    values = given.unique()
    whole = bool((given == given.round()).all()) and len(values) < given.numel()
    if not whole and not (len(values) <= FEW and given.numel() >= 2 * len(values)):
        return None
    indices = torch.randint(0, given.numel(), tuple(shape), generator=generator)
    return given.flatten()[indices]


def _distinct_whole_numbers(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    """Draw distinct whole numbers, as in `torch.arange(12.0)`, so that a maximum stays unique."""
    if not bool((given == given.round()).all()):
        return None
    count = int(torch.tensor(list(shape)).prod()) if shape else 1
    if count == given.numel():
        every = given.flatten()
    else:
        every = torch.linspace(float(given.min()), float(given.max()), max(1, count), dtype=torch.float64)
    order = torch.arange(count) if bool((given.flatten().diff() > 0).all()) else None
    if order is None:
        order = torch.randperm(count, generator=generator)
    return every[order].reshape(tuple(shape))


def _increasing(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor | None:
    if not given.dim() or given.shape[-1] < 3 or not shape:
        return None
    steps = given.diff(dim=-1)
    if bool((steps >= 0).all()):
        return _between(given, shape, generator).sort(-1).values
    return (
        _between(given, shape, generator).sort(-1, descending=True).values
        if bool((steps <= 0).all())
        else None
    )


def _between(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    low, high = float(given.min()), float(given.max())
    if low > 0 and high > 1000 * low:  # several orders of magnitude: uniform in the logarithm
        ends = torch.tensor([low, high], dtype=torch.float64).log()
        return _uniform(float(ends[0]), float(ends[1]), shape, generator).exp().clamp(low, high)
    return _uniform(low, high, shape, generator)


def _complex(given: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.complex(_between(given.real, shape, generator), _between(given.imag, shape, generator))
