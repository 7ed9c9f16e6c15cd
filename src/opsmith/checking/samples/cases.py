"""Cases: a sample in one dtype on one device with its truth; and tensors that samples must not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import first_line, refuse_own
from opsmith.checking.property import Note
from opsmith.checking.samples.domain import asked
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.judging.answer import Answer, Computation
from opsmith.judging.constants import FEW_DIGITS
from opsmith.torch_library.arguments import unsupported_kind
from opsmith.torch_library.torch_messages import NO_DTYPE_KERNEL, has_message

ALWAYS_CHECKED = (torch.float64, torch.float32)
"""dtypes in which every operator is checked; others only where its reference runs in them."""

LOW_PRECISION = FEW_DIGITS
"""dtypes in which an operator is checked where its reference runs in them."""


@dataclass(frozen=True)
class Case:
    """A sample in one dtype on one device, with the right results."""

    subject: Subject
    sample: Sample
    dtype: torch.dtype
    device: torch.device
    answers: tuple[Answer, ...]

    def flat(self) -> list[Any]:
        """Return the flat arguments in fresh memory."""
        return self.sample.at(self.dtype, self.device)

    def __str__(self) -> str:
        return case_name(self.sample, self.dtype, self.device)


def case_name(sample: Sample, dtype: torch.dtype, device: torch.device) -> str:
    """Name a sample, dtype and device in a message."""
    dtype_words = f" in {dtype_name(dtype)}" if sample.inexact else ""
    return f"{sample}{dtype_words} on {device.type}"


def cases(
    subject: Subject,
    sample: Sample,
    right: Computation,
    dtypes: tuple[torch.dtype, ...],
    arguments: Callable[[torch.dtype, torch.device], list[Any]] | None = None,
) -> list[Case | Note]:
    """Make the cases of a sample, and a note for each that cannot be made.

    Args:
        right: Computation of the right results.
        dtypes: dtypes of floating tensors; a sample without any makes one case.
        arguments: Arguments of the computation; those of the sample by default.
    """
    if subject.single_precision:
        dtypes = (torch.float32,)
    found = [
        _case(subject, sample, right, dtype, device, arguments or sample.at)
        for dtype in (dtypes if sample.inexact else dtypes[:1])
        for device in subject.devices
    ]
    left = Note("dtypes other than float32 were left out: that is what it computes in")
    return [left, *found] if subject.single_precision else found


def _case(
    subject: Subject,
    sample: Sample,
    right: Computation,
    dtype: torch.dtype,
    device: torch.device,
    arguments: Callable[[torch.dtype, torch.device], list[Any]],
) -> Case | Note:
    left = f"{dtype_name(dtype)} was left out"
    if not sample.takes(dtype):
        return Note(f"{left} where a sample is complex: it has no complex form")
    try:
        flat = arguments(dtype, device)
    except (RuntimeError, TypeError) as error:
        return Note(f"{left} on {device.type}, which does not have it: {first_line(error)}")
    try:
        return Case(subject, sample, dtype, device, right.at(flat, dtype))
    except Exception as error:
        refuse_own(error)
        if dtype in ALWAYS_CHECKED:
            raise
        return Note(f"{left}: the reference does not run in it: {first_line(error)}")


def lacks_dtype(error: Exception) -> bool:
    """True if an error of torch means that a kernel has no code for a dtype, not that its code fails."""
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
"""dtypes that torch computes in. It does little but store floats of 8 bits and complex numbers of 32."""

COMPARED = COMPUTED | {torch.uint16, torch.uint32, torch.uint64}
"""dtypes that torch compares, which is all that integer results need."""


def refuse_unfit(
    position: int, labels: Sequence[str], values: Sequence[Any], operator: str, location: str
) -> None:
    """Refuse a sample that cannot be checked.

    Raises:
        SampleError: If a tensor holds no numbers, or is not strided and dense.
    """
    for label, value in zip(labels, values, strict=True):
        problem = f"`{label}` of sample {position} cannot be checked on"
        _refuse(value, COMPUTED, problem, label, operator=operator, argument=label, where=location)


def refuse_unfit_results(subject: Subject) -> None:
    """Refuse an operator if results of a sample cannot be checked; what it raises, the properties report.

    Raises:
        SampleError: If a result holds no numbers, or is not a strided dense tensor.
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
        got = f"a tensor of {value.dtype}, in which torch computes little"
        hint = f"give `{{}}.to(torch.{wide})`"
    expected = "a strided dense tensor that holds numbers"
    raise errors.SampleError(problem, expected=expected, got=got, hint=hint.format(name), **place)
