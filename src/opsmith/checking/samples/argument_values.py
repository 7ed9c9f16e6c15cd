"""Other values of arguments: those that types list or code knows, and integers that tensors index by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.report import Given
from opsmith.checking.samples.compared_values import compared_values, is_float, others, unnamed_value
from opsmith.checking.samples.index_values import index_values
from opsmith.checking.samples.linked_sizes import sizes_of
from opsmith.checking.samples.sample import Sample, places_of
from opsmith.checking.samples.variation_kinds import Variation
from opsmith.checking.subject import Subject
from opsmith.core.argument_types import FLOAT, INT, NUMBER, OBJECT
from opsmith.core.reading import Comparison, is_single
from opsmith.core.schema import REQUIRED, Argument

LARGEST = 10_000
"""Largest whole number that is tried: a size or a count takes time and memory."""

NUMBERS = {FLOAT: 0.625, NUMBER: 0.625, INT: 2}
"""A number of each type, for an argument that is None in every sample; the root of no size is 0.625."""


def argument_values(subject: Subject) -> Iterator[tuple[Variation, ...]]:
    """Yield each value that types or code know and no sample shows, of each argument in turn.

    Types know None, numbers where every sample has None, flags, and the members of an enum or a `Literal`.
    Code knows what it compares with.
    Tensors of integers may index. Each value comes with a variation for each sample in which it may stand.
    """
    known = compared_values(subject)
    columns = [
        [*_values_of(subject, argument, known.get(argument.name, ())), *index_values(subject, argument)]
        for argument in subject.specification.schema.arguments
    ]
    for turn in zip_longest(*columns):
        # None, a name or a flag chooses what runs; so a number comes after them.
        found = sorted((each for each in turn if each is not None), key=lambda each: _is_number(each[0]))
        yield from (several for _, several in found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values_of(
    subject: Subject, argument: Argument, comparisons: Sequence[Comparison]
) -> Iterator[tuple[Any, tuple[Variation, ...]]]:
    """Yield each value, with its variations."""
    places = places_of(subject.samples, argument.name)
    values_shown = [sample.flat[argnum] for sample, argnum in places if is_single(sample.flat[argnum])]
    shown = {repr(value) for value in values_shown}
    values: dict[str, Any] = {}
    tried: dict[str, list[Variation]] = {}
    for sample, argnum in places:
        value = sample.flat[argnum]
        if not _may_change(subject, argument, sample, argnum):
            continue
        named = {repr(_like(value, each)) for each in _compared(comparisons, value)}
        for other in _others(subject, argument, comparisons, value, values_shown):
            if repr(other) not in (shown if not subject.effort.exhaustive else {repr(value)}):
                words = f"`{argument.name}={other!r}`"
                words += "" if isinstance(value, Tensor) else f" where it had {value!r}"
                silent = not isinstance(value, bool | Enum)
                given: Given = "usual" if _is_meant(subject, argument, other) else "undeclared"
                if repr(other) not in named and _is_number(other):
                    given = "strained"
                flat = sample.with_value(argnum, other)
                change = Variation(sample, words, flat, silent=silent, given=given)
                values[repr(other)] = other
                tried.setdefault(repr(other), []).append(change)
    yield from ((values[text], tuple(several)) for text, several in tried.items())


def _may_change(subject: Subject, argument: Argument, sample: Sample, argnum: int) -> bool:
    """Return True for an argument that is no list of tensors, no generator, and no size of a tensor."""
    if argument.kind.is_tensor:
        return not argument.kind.sequence and isinstance(sample.flat[argnum], Tensor)
    return not isinstance(sample.flat[argnum], torch.Generator) and not any(
        location.number and location.argnum == argnum
        for symbol in sizes_of(subject, sample).symbols
        for location in symbol.locations
    )


def _is_meant(subject: Subject, argument: Argument, other: Any) -> bool:
    """Return True for the default, and for a value that the type lists: None, a flag, a member of an enum."""
    return (
        bool(argument.kind.base.values)
        or isinstance(other, bool)
        or (other is None and _states_none(subject, argument))
        or repr(other) == repr(argument.default)
    )


def _states_none(subject: Subject, argument: Argument) -> bool:
    """Return True if the author says that None is a value; a type that takes any object does not say so."""
    optional = argument.kind.optional and argument.kind.base is not OBJECT
    return optional and subject.specification.origin.states_type(argument.name)


def _compared(comparisons: Sequence[Comparison], value: Any) -> list[Any]:
    """The values that code compares an argument with."""
    return [other for comparison in comparisons for other in others(comparison, value)]


def _others(
    subject: Subject,
    argument: Argument,
    comparisons: Sequence[Comparison],
    value: Any,
    values_shown: Sequence[Any],
) -> Iterator[Any]:
    """Yield values of the type of the given one, the most revealing first."""
    compared = _compared(comparisons, value)
    # A class has no types but those that its samples show.
    if _states_none(subject, argument) or (subject.kind.applied and None in compared):
        yield None
    if isinstance(value, Tensor):
        return
    if argument.default is not REQUIRED:
        yield argument.kind.restore(argument.default) if argument.kind.sequence else argument.default
    if isinstance(value, bool):
        yield not value
    yield from argument.kind.base.values
    if isinstance(value, str | int | float) and not isinstance(value, bool | Enum):
        compared.append(unnamed_value(comparisons, value, [*values_shown, *compared]))
    for other in compared:
        found = _like(value, other)
        if found is not None and argument.kind.accepts(found):
            yield found
    if all(each is None for each in (value, *values_shown)) and not argument.kind.sequence:
        yield from (number for base, number in NUMBERS.items() if argument.kind.base is base)


def _like(value: Any, other: Any) -> Any:
    """Return a value that code compares with in the type of the given one; None if it is of another type."""
    if isinstance(value, bool | Enum) or isinstance(other, bool | Enum):
        return None
    if isinstance(value, int) and isinstance(other, int | float):
        return int(other) if abs(other) <= LARGEST and float(other).is_integer() else None
    if isinstance(value, float) and isinstance(other, int | float):
        return float(other) if is_float(other) else None
    return other if value is None or type(other) is type(value) else None
