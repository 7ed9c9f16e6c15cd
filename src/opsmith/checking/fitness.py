"""What no sample may hold or give: tensors that cannot be copied, compared, or differentiated by numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.mistakes import Overlooking
from opsmith.checking.subject import Subject
from opsmith.torch_library.effects import foreign_kind

COMPUTED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)
"""Dtypes that torch computes in. Floats of 8 bits, and complex numbers of 32, it does little but store."""

COMPARED = COMPUTED | {torch.uint16, torch.uint32, torch.uint64}
"""Those that it can tell to be equal or not, which is all that is asked of whole numbers in results."""


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
        found = _unfit(value, COMPUTED) if isinstance(value, Tensor) else None
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


def refuse_unfit_results(subject: Subject) -> None:
    """Refuse an operator of which a sample's results cannot be checked.

    Raises:
        SampleError: If a result holds no numbers, or is no strided dense tensor.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subjects import subject_of
        >>> refuse_unfit_results(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"]))
    """
    for sample in subject.samples:
        results: Sequence[Any] = ()
        with Overlooking(), torch.no_grad():  # the properties report what it raises
            results = subject.reference(sample, sample.at())
        for value in results:
            found = _unfit(value, COMPARED) if isinstance(value, Tensor) else None
            if found is not None:
                got, mend = found
                raise errors.SampleError(
                    f"a result for {sample.brief} is no tensor to check",
                    operator=subject.name,
                    expected="a strided dense tensor that holds numbers",
                    got=got,
                    where=subject.specification.where,
                    mend=mend.format("result"),
                )


def _unfit(value: Tensor, dtypes: frozenset[torch.dtype]) -> tuple[str, str] | None:
    """What a tensor is that check cannot take, and what to give instead; None for one that it takes."""
    foreign = foreign_kind(value)
    if foreign is not None:
        return foreign.name, f"give `{foreign.mend}`"
    if value.is_meta:
        return "a tensor on the device `meta`, which holds no numbers", "make `{}` on the CPU"
    if value.dtype not in dtypes:
        wide = "complex64" if value.is_complex() else "float32" if value.is_floating_point() else "int64"
        return f"a tensor of {value.dtype}, in which torch computes little", f"give `{{}}.to(torch.{wide})`"
    return None
