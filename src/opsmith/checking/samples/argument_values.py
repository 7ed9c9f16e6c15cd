"""Other values of arguments: those that types list or code knows, and integers that tensors index by.

Code knows what it compares an argument with: `mode == "reflect"`, `k > 3`, `weight is None`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import count, zip_longest
from typing import Any

from torch import Tensor

from opsmith.checking.report import Given
from opsmith.checking.samples.index_values import index_values, mask_values
from opsmith.checking.samples.linked_sizes import Sizes, sizes_of
from opsmith.checking.samples.variation_kinds import Variation, is_number, may_change, varied
from opsmith.checking.subject import Subject
from opsmith.core.argument_types import FLOAT, INT, NUMBER, OBJECT
from opsmith.core.formula import Formula
from opsmith.core.reachable import is_library
from opsmith.core.reading import Comparison, Reading, is_single
from opsmith.core.schema import REQUIRED, Argument

LARGEST = 10_000
"""Largest whole number that is tried: a size or a count takes time and memory."""

NUMBERS = {FLOAT: 0.625, NUMBER: 0.625, INT: 2}
"""A number of each type, for an argument that is None in every sample; the root of no size is 0.625."""


def argument_values(subject: Subject) -> Iterator[Sequence[Variation]]:
    """Yield each value that types or code know and no sample shows, of each argument in turn.

    Types know None, numbers where every sample has None, flags, and the members of an enum or a `Literal`.
    Code knows what it compares with.
    Tensors of integers may index. Each value comes with a variation for each sample in which it may stand.
    """
    known, every = compared_values(subject), [sizes_of(subject, sample) for sample in subject.samples]
    columns = [
        [
            *_values_of(subject, every, argument, known.get(argument.name, ())),
            *index_values(subject, argument),
            *mask_values(subject, argument),
        ]
        for argument in subject.specification.schema.arguments
    ]
    for turn in zip_longest(*columns):
        # None, a name or a flag chooses what runs; so a number comes after them.
        found = sorted((each for each in turn if each is not None), key=lambda each: is_number(each[0]))
        yield from (several for _, several in found)


def _values_of(
    subject: Subject, every: Sequence[Sizes], argument: Argument, comparisons: Sequence[Comparison]
) -> Iterator[tuple[Any, Sequence[Variation]]]:
    """Yield each value, with its variations."""
    places = [
        (sizes, sizes.sample.names.index(argument.name))
        for sizes in every
        if argument.name in sizes.sample.names
    ]
    given_values = [sizes.sample.flat[argnum] for sizes, argnum in places]
    values_shown = [value for value in given_values if is_single(value)]
    shown = {repr(value) for value in values_shown}
    tried: dict[str, tuple[Any, list[Variation]]] = {}
    for (sizes, argnum), value in zip(places, given_values, strict=True):
        if not may_change(sizes, argnum):
            continue
        named = {repr(_like(value, each)) for each in _compared(comparisons, value)}
        for other in _others(subject, argument, comparisons, value, values_shown):
            if repr(other) not in (shown if not subject.effort.exhaustive else {repr(value)}):
                words = f"`{argument.name}={other!r}`"
                words += "" if isinstance(value, Tensor) else f" where it had {value!r}"
                silent = not isinstance(value, bool | Enum)
                given: Given = "usual" if _is_meant(subject, argument, other) else "undeclared"
                if repr(other) not in named and is_number(other):
                    given = "strained"
                change = {argnum: other}
                made = varied(subject, sizes.sample, words, change, silent=silent, given=given)
                tried.setdefault(repr(other), (other, []))[1].extend(made)
    yield from tried.values()


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


def is_float(number: Any) -> bool:
    """Return True for a number that a float can be: whole numbers of Python may be larger."""
    return isinstance(number, float) or abs(number) <= sys.float_info.max


def others(comparison: Comparison, value: Any) -> list[Any]:
    """Return the values of a comparison; where it is more than equality, the nearest on its other side first.

    Args:
        comparison: The comparison.
        value: Value of the argument in a sample.

    Example:
        >>> more_than_3 = Comparison((3,), holds=lambda k: k > 3)
        >>> others(more_than_3, 2), others(more_than_3, 5)
        ([4, 3], [3])
    """
    if comparison.holds is None or not isinstance(value, int | float):
        return [*comparison.values]
    holds, step = comparison.holds, step_beside if isinstance(value, float) else lambda number: 1
    numbers = [each for each in (*comparison.values, value) if is_float(each)]
    near = [each + sign * step(each) for each in numbers for sign in (1, 0, -1)]
    beyond = [other for other in near if {holds(value), holds(other)} == {True, False}]
    nearest = sorted(beyond, key=lambda other: (abs(other - value), -other))[:1]
    return [*dict.fromkeys((*nearest, *comparison.values))]


def step_beside(number: float) -> float:
    """Return a distance at which another number is unlike this one."""
    return 0.5 * max(1.0, abs(number))


def unnamed_value(comparisons: Iterable[Comparison], value: Any, known: Collection[Any]) -> Any:
    """Return a value that no comparison names, for the branch of all others; None if a known value takes it.

    The function that comes first decides, which is the forward or the reference if they compare it: a known
    value that it does not name takes its branch for others.

    Args:
        comparisons: Those of an argument.
        value: Value of the argument in a sample: a text or a number.
        known: Values that samples show, or that are tried anyway.

    Example:
        >>> doubled = Comparison(("double",))
        >>> unnamed_value([doubled], "double", ["double"])
        'other'
        >>> unnamed_value([doubled], "double", ["double", "triple"])
    """
    equalities = [each for each in comparisons if each.holds is None]
    first = [other for each in equalities if each.code is equalities[0].code for other in each.values]
    if any(one not in first for one in (value, *known)):
        return None
    every = [other for each in equalities for other in each.values]
    if isinstance(value, str):
        return next(text for length in count() if (text := "other" + "_" * length) not in every)
    numbers = [other for other in every if isinstance(other, int | float) and is_float(other)]
    step = step_beside(max(numbers, default=0)) if isinstance(value, float) else 1
    return max(numbers, default=value) + step


def compared_values(subject: Subject) -> Mapping[str, Sequence[Comparison]]:
    """Return the comparisons of each argument in the code of an operator, by the argument's name.

    Example:
        >>> import torch, opsmith
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> subject = subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])
        >>> compared_values(subject)
        {}
    """
    reading = Reading()
    specification = subject.specification
    names = specification.schema.names
    methods, parameters = specification.origin.methods(names)
    reading.read_methods(methods, parameters, with_context="setup_context" not in methods)
    if subject.kind.has_reference:
        rules = specification.gradients.rules.values()
        formulas = [rule.function for rule in rules if isinstance(rule, Formula)]
        kernels = [kernel.given for kernel in specification.kernels]
        for function in (specification.reference, *formulas, *kernels):
            if not is_library(getattr(function, "__module__", None)):
                reading.read(function, {name: name for name in names})
    return dict(reading.compared)
