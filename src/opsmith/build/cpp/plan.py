"""How calls of one form are run by a C++ kernel: by which instance, what is copied, what results are like."""

from __future__ import annotations

from dataclasses import dataclass

from opsmith.build.form import Form
from opsmith.core.bases import NUMBERED

_DTYPES = {dtype: number for number, dtype in enumerate(NUMBERED["ScalarType"])}


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor that is copied into another layout before the kernel runs.

    Attributes:
        tensor: Which of all tensors of the call, in order.
        argument: Position of the argument that it is of.
        strides: Those of the copy.
    """

    tensor: int
    argument: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How calls of one form are run.

    Attributes:
        candidate: Number of the instance.
        copies: What is copied before.
        results: The form of each result, and the strides in which the kernel writes it, where others.
    """

    candidate: int
    copies: tuple[Copy, ...]
    results: tuple[tuple[Form, tuple[int, ...] | None], ...]

    def numbers(self) -> list[int]:
        """The form in which the runtime reads it."""
        numbers = [self.candidate, len(self.copies)]
        for copy in self.copies:
            numbers += [copy.tensor, copy.argument, len(copy.strides), *copy.strides]
        numbers.append(len(self.results))
        for form, written in self.results:
            numbers += [_DTYPES[form.dtype], len(form.shape), written is not None]
            numbers += [*form.shape, *form.stride, *(written or ())]
        return numbers
