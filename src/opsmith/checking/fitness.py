"""What no sample may hold: tensors that cannot be copied, compared, or differentiated by numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opsmith import errors
from opsmith.torch_library.effects import foreign_kind


def refuse_unfit(
    position: int, labels: Sequence[str], values: Sequence[Any], operator: str, place: str
) -> None:
    """Refuse a sample that cannot be checked on.

    Args:
        position: Which of the samples it is.
        labels: Names of its arguments.
        values: The arguments.
        operator: What messages call the operator.
        place: Where the samples were given.

    Raises:
        SampleError: If a tensor holds no numbers, or is no strided dense one.

    Example:
        >>> import torch
        >>> refuse_unfit(0, ["x"], [torch.ones(2)], "demo::twice", "")
    """
    for label, value in zip(labels, values, strict=True):
        found = _unfit(value) if isinstance(value, Tensor) else None
        if found is not None:
            got, mend = found
            raise errors.SampleError(
                f"`{label}` of sample {position} is no tensor to check on",
                operator=operator,
                argument=label,
                expected="a strided dense tensor that holds numbers",
                got=got,
                where=place,
                mend=mend.format(label),
            )


def _unfit(value: Tensor) -> tuple[str, str] | None:
    """What a tensor is that check cannot take, and what to give instead; None for one that it takes."""
    foreign = foreign_kind(value)
    if foreign is not None:
        return foreign.name, f"give `{foreign.mend}`"
    if value.is_meta:
        return "a tensor on the device `meta`, which holds no numbers", "make `{}` on the CPU"
    return None
