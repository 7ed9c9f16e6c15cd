"""dtypes in which samples are checked, and tensors that samples must not contain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.samples.domain import asked
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.judging.constants import FEW_DIGITS
from opsmith.torch_library.arguments import unsupported_kind
from opsmith.torch_library.torch_messages import NO_DTYPE_KERNEL, has_message

ALWAYS_CHECKED = (torch.float64, torch.float32)
"""dtypes in which every operator is checked; other dtypes only if its reference runs in them."""

LOW_PRECISION = FEW_DIGITS
"""Low-precision dtypes in which an operator is checked if its reference runs in them."""


def case_name(sample: Sample, dtype: torch.dtype, device: torch.device) -> str:
    """Name a sample, dtype and device in a message."""
    dtype_words = f" in {dtype_name(dtype)}" if sample.inexact else ""
    return f"{sample}{dtype_words} on {device.type}"


def lacks_dtype(error: Exception) -> bool:
    """True if an error of torch means that a kernel lacks code for a dtype, not that its code failed."""
    if isinstance(error, errors.OpsmithError):
        return False
    return isinstance(error, NotImplementedError) or has_message(error, NO_DTYPE_KERNEL)


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype in a message."""
    return str(dtype).removeprefix("torch.")


COMPUTED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)
"""dtypes in which torch computes. It can do little with floats of 8 bits and complex numbers of 32."""

COMPARED = COMPUTED | {torch.uint16, torch.uint32, torch.uint64}
"""dtypes that torch can compare, as integer results require."""


def refuse_unfit(
    position: int, labels: Sequence[str], values: Sequence[Any], operator: str, location: str
) -> None:
    """Refuse a sample that cannot be checked.

    Raises:
        SampleError: If a tensor has no numbers, or is not strided and dense.
    """
    for label, value in zip(labels, values, strict=True):
        problem = f"`{label}` of sample {position} cannot be checked on"
        _refuse(value, COMPUTED, problem, label, operator=operator, argument=label, where=location)


def refuse_unfit_results(subject: Subject) -> None:
    """Refuse an operator if results of a sample cannot be checked; properties report its exceptions.

    Raises:
        SampleError: If a result has no numbers, or is not a strided dense tensor.
    """
    for sample in subject.samples:
        problem = f"a result for {sample.brief} cannot be checked"
        for value in asked(subject, sample, {}) or ():
            where = subject.specification.where
            _refuse(value, COMPARED, problem, "result", operator=subject.name, where=where)


def _refuse(value: Any, dtypes: frozenset[torch.dtype], problem: str, name: str, **place: str) -> None:
    """Refuse a tensor that cannot be checked."""
    foreign = unsupported_kind(value) if isinstance(value, Tensor) else None
    if foreign is not None:
        got, hint = foreign.name, f"give `{foreign.hint}`"
    elif not isinstance(value, Tensor) or (value.dtype in dtypes and not value.is_meta):
        return
    elif value.is_meta:
        got, hint = "a tensor on the device `meta`, which holds no numbers", "make `{}` on the CPU"
    else:
        wide = "complex64" if value.is_complex() else "float32" if value.is_floating_point() else "int64"
        got = f"a tensor of {value.dtype}, a dtype that few operations of torch support"
        hint = f"give `{{}}.to(torch.{wide})`"
    expected = "a strided dense tensor that holds numbers"
    raise errors.SampleError(problem, expected=expected, got=got, hint=hint.format(name), **place)
