"""Values that code compares an argument with: `mode == "reflect"`, `k > 3`, `weight is None`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from opsmith.checking.subject import Subject
from opsmith.core.formula import Formula
from opsmith.core.reachable import is_library
from opsmith.core.reading import Comparison, Reading


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
