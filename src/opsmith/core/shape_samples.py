"""Samples made from `shapes=` for an operator without samples: each letter gets a different size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from opsmith.core.argument_types import BOOL
from opsmith.core.call_arguments import CallArguments, tensors_in
from opsmith.core.samples import LocatedSamples, Make, Samples
from opsmith.core.schema import REQUIRED, Argument
from opsmith.core.shapes import LEADING, NO_SIZE, Shapes, Sizes
from opsmith.core.specification import Specification

ROUNDS: tuple[tuple[int, ...], ...] = (
    (3, 5, 4, 6, 7, 2),
    (2, 3, 6, 4, 5, 8),
    (6, 4, 2, 8, 3, 5),
    (4, 8, 12, 6, 2, 10),
    (12, 6, 4, 2, 8, 10),
)
"""Sizes of the letters in each call, all different: first small and odd, then with common divisors."""

MOST = 3
"""Maximum number of samples."""

RANGES = ((-2.0, 2.0), (0.5, 2.0))
"""Ranges of numbers: with negative numbers; else only positive ones, if the results are not finite."""

UNKNOWN = object()


def samples_for(specification: Specification) -> Samples | None:
    """Return the samples of an operator: the author's, or samples made from its shapes and types.

    They can be made if every tensor has dimensions, every other argument is a size, a flag, optional, or has
    a default or a list of values, and the reference has finite results.

    Example:
        >>> import torch, opsmith
        >>> @opsmith.operator("demo::scaled", shapes="x: B N, scale: N -> B N")
        ... def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ...     return x * scale
        >>> [[list(each.shape) for each in call.args] for call in samples_for(scaled.specification)(Make())]
        [[[3, 5], [5]], [[2, 3], [3]], [[6, 4], [4]]]
    """
    if specification.samples is not None or specification.shapes is None:
        return specification.samples
    for low, high in RANGES:
        made = partial(_call, specification, specification.shapes, low, high)
        rounds = [number for number in range(len(ROUNDS)) if _runs(specification, made(Make(), number))]
        if rounds:
            return LocatedSamples(partial(_calls, made, rounds[:MOST]), specification.where)
    return None


def missing_words(specification: Specification) -> str:
    """Return text on why `shapes=` is not enough for samples; empty if it is enough or missing."""
    shapes = specification.shapes
    if shapes is None or samples_for(specification) is not None:
        return ""
    sizes = _sizes(specification, shapes, 0)
    unknown = [
        f"`{each.name}`"
        for each in specification.schema.arguments
        if _value(each, shapes, sizes, Make(), *RANGES[0]) is UNKNOWN
    ]
    if unknown:
        return f", and the possible values of {' and '.join(unknown)} are not known"
    return ", and on samples made from `shapes=` the reference raises an error, or has no finite results"


def _calls(made: Callable[[Make, int], CallArguments | None], rounds: Sequence[int], make: Make) -> list[Any]:
    return [made(make, number) for number in rounds]


def _runs(specification: Specification, call: CallArguments | None) -> bool:
    """Return True if the reference has finite results for a call."""
    if call is None:
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():  # the samples are on the CPU
            results = specification.reference(*call.args, **call.kwargs)
    except Exception:  # the author's code does not take this guessed call
        return False
    found = tensors_in([*results] if isinstance(results, tuple) else [results])
    return all(bool(each.isfinite().all()) for each in found if each.is_floating_point() or each.is_complex())


def _call(
    specification: Specification, shapes: Shapes, low: float, high: float, make: Make, number: int
) -> CallArguments | None:
    """Return the call with the sizes of one round; None if the value of an argument is not known."""
    sizes = _sizes(specification, shapes, number)
    values = [_value(each, shapes, sizes, make, low, high) for each in specification.schema.arguments]
    if any(value is UNKNOWN for value in values):
        return None
    args, kwargs = specification.schema.split(values)
    return CallArguments(tuple(args), kwargs)


def _sizes(specification: Specification, shapes: Shapes, number: int) -> Sizes:
    """Return the sizes of the letters in one round; an integer argument keeps its default."""
    given = {letter for dims in shapes.arguments.values() for letter in dims.letters} | shapes.integers
    numbers = ROUNDS[number]
    sizes: Sizes = {letter: numbers[at % len(numbers)] for at, letter in enumerate(sorted(given))}
    for each in specification.schema.arguments:
        if each.name in shapes.integers and type(each.default) is int:
            sizes[each.name] = each.default
    return {**sizes, LEADING: (2,) if number == 0 else ()}


def _value(argument: Argument, shapes: Shapes, sizes: Sizes, make: Make, low: float, high: float) -> Any:
    """Return a value for an argument; UNKNOWN if no possible value is known."""
    kind, dims = argument.kind, shapes.arguments.get(argument.name)
    if kind.is_tensor and dims is not None:
        evaluated = dims.evaluate(sizes)
        if any(size is NO_SIZE for size in evaluated):
            return UNKNOWN
        known: Sequence[int] = [2 if size is None else size for size in evaluated]
        if kind.sequence:
            return [make(*known, low=low, high=high) for _ in range(kind.length or 2)]
        return make(*known, low=low, high=high)
    if argument.name in shapes.integers:
        return sizes[argument.name]
    if argument.default is not REQUIRED:
        return argument.default
    if kind.optional:
        return None
    if kind.base is BOOL and not kind.sequence:
        return False
    return kind.base.values[0] if kind.base.values and not kind.sequence else UNKNOWN
