"""Values moved by a small part of themselves, so that what is computed from them rounds in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.samples.generate_like import is_symmetric
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.side_effects.canaries import guarded
from opsmith.checking.subject import Subject


def nudged(value: Any, step: float, generator: torch.Generator) -> Any:
    """A tensor of which each number is moved up or down by a part of itself; any other value as it is.

    It is moved in float64 and rounded once, so that a step below the eps of the dtype moves no more than it
    should, and one above it moves every number.

    Args:
        value: A floating or complex tensor, of any dtype, or anything else.
        step: That part.
        generator: Source of the signs.

    Example:
        >>> moved = nudged(torch.tensor([1.0, 4.0]), 0.25, torch.Generator().manual_seed(0))
        >>> (moved / torch.tensor([1.0, 4.0])).sub(1).abs()
        tensor([0.2500, 0.2500])
    """
    if not is_inexact(value):
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (value * (1 + step * signs.to(value.device))).to(value.dtype)


FACTOR = 1.25


def turned(flat: list[Any]) -> list[Any]:
    """The same numbers in the opposite order, a quarter larger: so they lie where the operator is defined.

    Plain ones are a quarter smaller, so that fractions stay fractions. Whole numbers stay as they are: they
    may be indices, or offsets in order.

    Example:
        >>> turned([torch.tensor([1.0, 2.0]), 3, 0.5])
        [tensor([2.5000, 1.2500]), 3, 0.375]
    """
    return [_turned(value) for value in flat]


def _turned(value: Any) -> Any:
    if is_inexact(value):
        return _like(value, value.flip(tuple(range(value.dim()))))
    return 0.75 * value if isinstance(value, float) else value


def scaled(flat: list[Any]) -> list[Any]:
    """The same numbers, a quarter larger."""
    return [_like(v, v) if is_inexact(v) else v for v in flat]


def _like(value: Tensor, numbers: Tensor) -> Tensor:
    return torch.empty_like(value).copy_(numbers * FACTOR)


def other_forms(sample: Sample, device: torch.device) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    """The sample's numbers in another dtype and another layout."""
    wide = any(sample.flat[place].dtype in (torch.float64, torch.complex128) for place in sample.inexact)
    dtype = torch.float32 if wide else torch.float64
    if sample.inexact:
        yield f"of the same numbers in {str(dtype).removeprefix('torch.')}", lambda: sample.at(dtype, device)
        yield (
            "of the same numbers in another layout",
            lambda: guarded(sample.at(device=device), sliced=True)[0],
        )


DERIVATIVES = frozenset({"gradient", "values", "forward_mode", "second_order"})
"""Properties that compare derivatives with differences."""


def among_symmetric(subject: Subject) -> Subject:
    """The same, with those of its inputs made symmetric of which one triangle is read.

    Args:
        subject: What is under check.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> among_symmetric(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])).symmetric
        frozenset()
    """
    labels = set[str]()
    if not subject.draws:
        every = [_of_one_triangle(subject, sample) for sample in subject.samples]
        labels = set.intersection(*every)
    return replace(subject, symmetric=frozenset(labels)) if labels else subject


def remark(subject: Subject) -> tuple[str, ...]:
    """What a report has to say of it."""
    if not subject.symmetric:
        return ()
    names = ", ".join(f"`{label}`" for label in sorted(subject.symmetric))
    return (
        f"derivatives by {names} are those among symmetric matrices: every sample has one there, of which "
        "one triangle alone is read",
    )


def _of_one_triangle(subject: Subject, sample: Sample) -> set[str]:
    """Labels of a sample's symmetric matrices of which one triangle is read."""
    return {
        sample.labels[place]
        for place in sample.inexact
        if is_symmetric(sample.flat[place]) and _reads_one(subject, sample, place)
    }


def _reads_one(subject: Subject, sample: Sample, place: int) -> bool:
    wide = sample.at(torch.float64)

    def results(value: Tensor) -> list[Any]:
        flat = [value if at == place else each for at, each in enumerate(wide)]
        return subject.reference(sample, flat)

    # Suppressed, since what it raises for a matrix that is not symmetric says that it reads all of it.
    with Overlooking(), torch.no_grad():
        matrix = wide[place]
        whole = results(matrix)
        return _same(whole, results(matrix + matrix.triu(1))) or _same(
            whole, results(matrix + matrix.tril(-1))
        )
    return False


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is other
        for one, other in zip(some, others, strict=True)
    )
