"""Which instance of a kernel takes a call, by dtypes and dimensions; and which layout it takes them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.build.parameter import Parameter
from opsmith.core.calls import tensors_in

MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def choose_candidate(
    names: Sequence[str], values: Sequence[Any], candidates: Sequence[Sequence[Parameter]]
) -> int | str:
    """The number of the first candidate that takes these values, or why none does.

    Args:
        names: The arguments' names.
        values: Their values.
        candidates: The parameters of each instance: arguments, and then results.
    """
    misfits = []
    for number, parameters in enumerate(candidates):
        misfit = _misfit(names, values, parameters)
        if misfit is None:
            return number
        misfits.append(misfit)
    _, what = max(misfits)[:2]  # of the instance that takes the most of them
    return f"{what}, and it takes {' or '.join(takes for _, same, takes in misfits if same == what)}"


def _misfit(
    names: Sequence[str], values: Sequence[Any], parameters: Sequence[Parameter]
) -> tuple[int, str, str] | None:
    """The first value that a candidate does not take: its position, what it is, and what would be taken."""
    for at, (name, value, parameter) in enumerate(zip(names, values, parameters, strict=False)):
        for tensor in tensors_in([value]):
            if tensor.dtype != parameter.dtype:
                return at, f"`{name}` is {plain(tensor.dtype)}", plain(parameter.dtype)
            if parameter.dim is not None and tensor.dim() != parameter.dim:
                return at, f"`{name}` has {tensor.dim()} dimensions", str(parameter.dim)
    return None


def of_other_dtypes(names: Sequence[str], values: Sequence[Any], dtypes: Sequence[torch.dtype]) -> str | None:
    """Why a template for these dtypes takes none of these values; None where it may: one has such a dtype."""
    found = {
        name: tensor.dtype
        for name, value in zip(names, values, strict=False)
        for tensor in tensors_in([value])
    }
    if not dtypes or not found or any(dtype in dtypes for dtype in found.values()):
        return None
    what = " and ".join(f"`{name}` is {plain(dtype)}" for name, dtype in found.items())
    return f"{what}, and it takes {' or '.join(map(plain, dtypes))}"


def scattered(values: Sequence[Any]) -> str | None:
    """Why a kernel that runs on one GPU does not take these values; None where all tensors are on one."""
    devices = {str(tensor.device) for tensor in tensors_in(list(values))}
    return None if len(devices) == 1 else f"its tensors are on {', '.join(sorted(devices)) or 'no device'}"


def memory_format(parameter: Parameter, dim: int) -> torch.memory_format:
    """What torch calls the layout of a parameter, for a tensor of so many dimensions."""
    return torch.contiguous_format if parameter.layout == "contiguous" else MEMORY_FORMATS[dim]


def lies_right(tensor: Tensor, parameter: Parameter) -> bool:
    """Whether a tensor has the layout that a parameter takes."""
    if parameter.layout == "any":
        return True
    return tensor.is_contiguous(memory_format=memory_format(parameter, tensor.dim()))


def plain(dtype: torch.dtype | None) -> str:
    """A dtype's name without its module.

    Example:
        >>> plain(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")
