"""Numbers that a condition may be about: inputs, results and incoming gradients, beside each element."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from opsmith.checking.diagnosis.comparable import wide
from opsmith.checking.diagnosis.pair import Pair

Source = tuple[str, str]
"""What a message calls the numbers, and how they lie beside the elements."""


def sources(pair: Pair) -> dict[Source, Tensor]:
    """Tensors beside each element of a pair, by what they are; the input's own first.

    A tensor of fewer dimensions lies along the last ones, as broadcasting has it, or along the first ones. An
    integer tensor that may be of indices says of each of them how often it occurs.
    """
    seen, shape = pair.observation, pair.right.shape
    named: dict[str, Tensor] = {}
    own = seen.inputs.get(seen.about or "")
    if isinstance(own, Tensor):
        named[f"`{seen.about}`"] = own
    named |= {
        f"`{label}`": value
        for label, value in seen.inputs.items()
        if isinstance(value, Tensor) and label != seen.about
    }
    named |= {f"the result `{label}`": value for label, value in seen.results.items()}
    alone = len(seen.grads) == 1
    for label, value in seen.grads.items():
        if value is not None:
            named["what comes in" if alone else f"what comes in for `{label}`"] = value
    found: dict[Source, Tensor] = {}
    for name, value in named.items():
        for how, lying in _lying(value.detach().cpu(), shape):
            found[name, how] = lying
        for how, times in _times(value, shape):
            found[f"an index in {name}", how] = times
    return found


def _lying(value: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    plain = value if value.dtype == torch.bool else wide(value)
    if value.dim() <= len(shape):
        with suppress(RuntimeError):  # it lies otherwise
            yield "", plain.expand(shape)
    if 0 < value.dim() < len(shape) and value.shape == shape[: value.dim()]:
        yield "first", plain.reshape(*value.shape, *[1] * (len(shape) - value.dim())).expand(shape)


def _times(value: Tensor, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """How often each index of a dimension occurs in a tensor of indices."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or not value.numel():
        return
    for dim, size in enumerate(shape):
        low, high = int(value.min()), int(value.max())
        if low < -size or high >= size:
            continue
        counts = torch.bincount(value.detach().cpu().flatten().long() % size, minlength=size)
        lying = counts.to(torch.float64).reshape(-1, *[1] * (len(shape) - dim - 1))
        yield f"times along {dim}", lying.expand(shape)


def marks(pair: Pair) -> dict[str, Tensor]:
    """Truth values beside each element, which its own number does not tell: the largest of a row, ties."""
    found: dict[str, Tensor] = {}
    shape = pair.right.shape
    for (name, how), lying in sources(pair).items():
        if how or lying.dtype == torch.bool or lying.is_complex() or not lying.numel() or not shape:
            continue
        found[f"where {name} is largest"] = lying == lying.max()
        found[f"where {name} is smallest"] = lying == lying.min()
        found[f"where {name} occurs more than once"] = _repeated(lying.flatten()).reshape(shape)
        for dim in range(len(shape)) if len(shape) > 1 else ():
            found[f"where {name} is largest along dimension {dim}"] = lying == lying.amax(dim, keepdim=True)
            found[f"where {name} is smallest along dimension {dim}"] = lying == lying.amin(dim, keepdim=True)
            same = (lying.unsqueeze(dim) == lying.unsqueeze(dim + 1)).sum(dim + 1) if _small(lying) else None
            if same is not None:
                found[f"where {name} occurs more than once along dimension {dim}"] = same > 1
    return found


def _small(tensor: Tensor) -> bool:
    return tensor.numel() <= 4096 and max(tensor.shape) <= 128


def _repeated(values: Tensor) -> Tensor:
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    repeated: Tensor = counts[places] > 1
    return repeated


def numbers(pair: Pair) -> dict[Source, float]:
    """Plain numbers among the arguments."""
    return {
        (f"`{label}`", "number"): float(value)
        for label, value in pair.observation.inputs.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
