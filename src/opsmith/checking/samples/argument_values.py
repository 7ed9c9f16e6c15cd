"""Further values of arguments: values that types list or code compares with, and index and mask tensors.

Code shows the values with which it compares an argument: `mode == "reflect"`, `k > 3`, `weight is None`.

Selecting tensors are masks, and indices, which are tried in every structure and negative. The samples show
the values that they may have. A permutation stays a permutation. A sorted tensor that begins with 0, such as
offsets, stays sorted. Lengths are not changed. The reference shows if an index may be negative.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count, zip_longest
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.report import Given
from opsmith.checking.run import Run
from opsmith.checking.samples.domain import Sizes, are_same, asked, rules_of, sizes_of
from opsmith.checking.samples.sample import Variation, places_of
from opsmith.checking.samples.variation_kinds import is_number, may_change, varied
from opsmith.checking.subject import Subject
from opsmith.core.argument_types import FLOAT, INT, NUMBER, OBJECT
from opsmith.core.cached_property import cached_property
from opsmith.core.formula import Formula
from opsmith.core.generate_like import WHOLE
from opsmith.core.reachable import is_library
from opsmith.core.reading import Comparison, Reading, is_single
from opsmith.core.schema import REQUIRED, Argument

LARGEST = 10_000
"""Maximum integer that is tried: a large size or count takes time and memory."""

NUMBERS = {FLOAT: 0.625, NUMBER: 0.625, INT: 2}
"""A number of each type, for an argument that is None in every sample; no size has the root 0.625."""


def argument_values(subject: Subject) -> Iterator[Sequence[Variation]]:
    """Yield each value of each argument that types or code show, but no sample.

    Types show None, numbers if every sample has None, flags, and the members of an enum or a `Literal`. Code
    shows the values with which it compares. Tensors of integers may be indices. Each value comes with a
    variation for each sample in which it may be used.
    """
    known, every = compared_values(subject), [sizes_of(subject, sample) for sample in subject.samples]
    columns = [
        [
            *_values_of(subject, every, argument, known.get(argument.name, ())),
            *_choices(subject, argument),
        ]
        for argument in subject.specification.schema.arguments
    ]
    for turn in zip_longest(*columns):
        # None, a name or a flag selects a branch, so numbers come after these.
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
    states_none = _states_none(subject, argument)
    for (sizes, argnum), value in zip(places, given_values, strict=True):
        if not may_change(sizes, argnum):
            continue
        compared = [other for comparison in comparisons for other in others(comparison, value)]
        named = {repr(_like(value, each)) for each in compared}
        for other in _others(subject, argument, comparisons, compared, value, values_shown):
            if repr(other) not in (shown if not subject.effort.exhaustive else {repr(value)}):
                words = f"`{argument.name}={other!r}`"
                words += "" if isinstance(value, Tensor) else f" instead of {value!r}"
                silent = not isinstance(value, bool | Enum)
                # The type lists it, or the author writes it as the default.
                listed = bool(argument.kind.base.values) or isinstance(other, bool)
                meant = listed or (other is None and states_none) or repr(other) == repr(argument.default)
                given: Given = "usual" if meant else "undeclared"
                if repr(other) not in named and is_number(other) and value is not None:
                    given = "strained"
                change = {argnum: other}
                made = varied(subject, sizes.sample, words, change, silent=silent, given=given)
                tried.setdefault(repr(other), (other, []))[1].extend(made)
    yield from tried.values()
    numbers = [*values_shown, *(other for other, _ in tried.values())]
    if len(shown) == 1 and all(map(is_number, numbers)) and len(set(numbers)) == 1:
        yield numbers[0], list(_beside(subject, argument, places))


def _beside(subject: Subject, argument: Argument, places: Sequence[tuple[Sizes, int]]) -> Iterator[Variation]:
    """Yield the samples with a second number if only one number is known, which a kernel may have fixed."""
    # A class returns a gradient for each passed argument, and may not support further arguments.
    position = subject.specification.schema.names.index(argument.name)
    passed = subject.passed is None or position < subject.passed
    for sizes, argnum in places:
        value = sizes.sample.flat[argnum]
        for other in numbers_beside(value) if may_change(sizes, argnum) else ():
            if passed or _is_differentiated(Run(subject, sizes.sample), argnum, other):
                words = f"`{argument.name}={other!r}` instead of {value!r}"
                yield from varied(
                    subject, sizes.sample, words, {argnum: other}, silent=True, given="undeclared"
                )


def _is_differentiated(run: Run, argnum: int, value: Any) -> bool:
    """Return True if the backward of a call with an additional argument raises no exception."""
    with Overlooking():
        flat = run.flat()
        flat[argnum] = value
        run.call(flat).backward()
        return True
    return False


def numbers_beside(value: int | float) -> tuple[int | float, ...]:
    """Return similar numbers to replace a number: of its sign, and hardly larger; the likelier comes first.

    There are none for nan and infinities.

    Example:
        >>> numbers_beside(1.0), numbers_beside(-2.0), numbers_beside(0.0)
        ((0.75, 1.25), (-1.5, -2.5), (0.25, -0.25))
        >>> numbers_beside(3), numbers_beside(1), numbers_beside(-1)
        ((2, 4), (2, 0), (-2, 0))
        >>> numbers_beside(float("inf"))
        ()
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return ()
        return (0.75 * value, 1.25 * value) if value else (0.25, -0.25)
    step = -1 if value < 0 else 1
    return (value - step, value + step) if abs(value) > 1 else (value + step, value - step)


def _states_none(subject: Subject, argument: Argument) -> bool:
    """Return True if the author declares None as a value; a type that takes any object does not."""
    optional = argument.kind.optional and argument.kind.base is not OBJECT
    return optional and subject.specification.origin.states_type(argument.name)


def _others(
    subject: Subject,
    argument: Argument,
    comparisons: Sequence[Comparison],
    compared: Sequence[Any],
    value: Any,
    values_shown: Sequence[Any],
) -> Iterator[Any]:
    """Yield further values of the type of the given value; the most revealing come first."""
    # A class has only the types that its samples show.
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
        compared = [*compared, unnamed_value(comparisons, value, [*values_shown, *compared])]
    for other in compared:
        found = _like(value, other)
        if found is not None and argument.kind.accepts(found):
            yield found
    if all(each is None for each in (value, *values_shown)) and not argument.kind.sequence:
        yield from (number for base, number in NUMBERS.items() if argument.kind.base is base)


def _like(value: Any, other: Any) -> Any:
    """Return a value that code compares with, in the given value's type; None if its type differs."""
    if isinstance(value, bool | Enum) or isinstance(other, bool | Enum):
        return None
    if isinstance(value, int) and isinstance(other, int | float):
        return int(other) if abs(other) <= LARGEST and float(other).is_integer() else None
    if isinstance(value, float) and isinstance(other, int | float):
        return float(other) if is_float(other) else None
    return other if value is None or type(other) is type(value) else None


def is_float(number: Any) -> bool:
    """Return True for a number that fits in a float: integers of Python may be larger."""
    return isinstance(number, float) or abs(number) <= sys.float_info.max


def others(comparison: Comparison, value: Any) -> list[Any]:
    """Return the values of a comparison; unless it is an equality, first the nearest value on its other side.

    Args:
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
    """Return a distance at which a number clearly differs from this number."""
    return 0.5 * max(1.0, abs(number))


def unnamed_value(comparisons: Iterable[Comparison], value: Any, known: Collection[Any]) -> Any:
    """Return a value that no comparison names, for the `else` branch; None if a known value takes it.

    The first function decides, which is the forward or the reference if they compare the argument: a known
    value that it does not name takes its `else` branch.

    Args:
        comparisons: The comparisons of an argument.
        value: Value of the argument in a sample: a string or a number.
        known: Values that samples show, or that are tried in any case.

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
    """Return the comparisons of each argument in the code of an operator, by the argument's name."""
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


_Choice = tuple[str, Sequence["_Choosing"], Callable[["_Choosing"], Tensor], bool]
"""Description of a change, the tensors to change, the change, and True if only it repeats an index."""


def _choices(subject: Subject, argument: Argument) -> Iterator[tuple[str, Sequence[Variation]]]:
    """Yield further values of a selecting tensor: a description, with a variation for each sample."""
    places = places_of(subject.samples, argument.name)
    every = [_Choosing(subject, sample, argnum=argnum) for sample, argnum in places]
    masks = [each for each in every if each.is_of({torch.bool})]
    rows: list[_Choice] = [
        ("an empty row", masks, _Choosing.with_empty_row, False),
        ("nothing", masks, lambda each: torch.zeros_like(each.value), False),
        ("everything", masks, lambda each: torch.ones_like(each.value), False),
    ]
    rules = [rule for rule in rules_of(subject) if rule.relation.follows]
    linked = {label for rule in rules for label in (rule.source, rule.target)}
    given = [each for each in every if each.is_of({*WHOLE} - {torch.uint8})]
    if given and argument.name not in linked and not argument.kind.sequence:
        rows = [*_indices(given)]
    for words, some, change, repeats in rows:
        yield words, [made for each in some for made in each.varied(words, change(each), repeats=repeats)]


def _indices(given: Sequence[_Choosing]) -> Iterator[_Choice]:
    if all(each.is_permutation for each in given) or all(each.is_lengths for each in given):
        return
    reading, distinct = [each for each in given if each.reads_last()], not any(each.repeats for each in given)
    if distinct:
        yield "repeated indices", given, _Choosing.repeated, True
    rising = all(each.is_sorted for each in given)
    offsets = rising and any(each.value.dim() == 1 and int(each.value[0]) == 0 for each in given)
    if rising and not offsets and distinct:
        yield "the indices in another order", given, lambda each: each.value.flip(-1), False
    if not any(each.bound is None or each.largest == each.bound - 1 for each in given):
        yield "the last index", reading, lambda each: each.with_largest((each.bound or 0) - 1), False
    taken = [each for each in reading if each.takes_negative()]
    yield "a negative index", taken, lambda each: each.with_largest(-1), False
    counts = [each for each in given if each not in reading and int(each.value.min()) >= 0]
    if not any(int(each.value.min()) == 0 for each in given):
        yield "a zero", counts, lambda each: each.with_largest(0), False
    # A number that is a size is a length: an index is smaller.
    lengths = [each for each in counts if each.largest in each.sizes_beside and not offsets]
    yield "full lengths", lengths, lambda each: torch.full_like(each.value, each.largest), distinct
    # Changes of all indices at once come last, since a quick check tries few values.
    if distinct:
        yield "the last index everywhere", reading, _Choosing.everywhere, True
    if not any(each.is_sorted for each in given):
        yield "rising indices from 0 to the last", reading, _Choosing.rising, False
        yield "falling indices", reading, lambda each: each.rising().flip(-1), False
        yield "a permutation", reading, _Choosing.permutation, False


@dataclass(frozen=True)
class _Choosing(Run):
    """A run with a tensor that may select elements: integers that may be indices, or a mask.

    Args:
        argnum: Position of the tensor.
    """

    argnum: int = 0

    @cached_property
    def value(self) -> Tensor:
        """The tensor."""
        found: Tensor = self.sample.flat[self.argnum]
        return found

    def is_of(self, dtypes: Collection[torch.dtype]) -> bool:
        """Return True for a tensor of some dtypes that has a dimension with several elements."""
        value = self.sample.flat[self.argnum]
        several = isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 1
        return several and value.dtype in dtypes

    @property
    def is_sorted(self) -> bool:
        return bool((self.value.diff(dim=-1) >= 0).all())

    @property
    def repeats(self) -> bool:
        return len(self.value.unique()) < self.value.numel()

    @property
    def is_permutation(self) -> bool:
        counted = torch.arange(self.value.shape[-1], dtype=self.value.dtype)
        return len(counted) > 2 and bool((self.value.cpu().sort(-1).values == counted).all())

    @property
    def is_lengths(self) -> bool:
        return int(self.value.sum()) in self.sizes_beside

    @cached_property
    def sizes_beside(self) -> list[int]:
        """The sizes of the other tensors of the sample."""
        others = (each for at, each in enumerate(self.sample.flat) if at != self.argnum)
        return [size for each in others if isinstance(each, Tensor) for size in each.shape]

    @cached_property
    def largest(self) -> int:
        return int(self.value.max())

    @cached_property
    def bound(self) -> int | None:
        """The smallest size of other tensors above all its values, so that every index is valid."""
        above = [size for size in self.sizes_beside if size > self.largest]
        return min(above) if above and int(self.value.min()) >= 0 else None

    def varied(self, words: str, value: Tensor, *, repeats: bool) -> Iterator[Variation]:
        """Yield the sample with a changed value of the tensor."""
        what, change = f"{words} in `{self.sample.labels[self.argnum]}`", {self.argnum: value}
        options = {"fresh_numbers": True, "silent": True, "repeats": repeats}
        yield from varied(self.subject, self.sample, what, change, given="undeclared", **options)

    def with_empty_row(self) -> Tensor:
        """Clear the last row of a mask."""
        rows = self.value.clone(memory_format=torch.contiguous_format)
        rows.view(-1, rows.shape[-1])[-1] = False
        return rows

    def repeated(self) -> Tensor:
        """Repeat every second index; a sorted tensor stays sorted and keeps its first and last index."""
        made = self.value.clone(memory_format=torch.contiguous_format)
        flat = made.view(-1)
        step = slice(1, len(flat) - 1 if len(flat) > 2 and self.is_sorted else len(flat), 2)
        flat[step] = flat[0 : len(flat) - 1 : 2][: len(flat[step])]
        return made

    def everywhere(self) -> Tensor:
        """Set every element to the last index."""
        return torch.full_like(self.value, (self.bound or 1) - 1)

    def rising(self) -> Tensor:
        """Set sorted indices from 0 to the last, which repeat only if there are too few."""
        steps = torch.linspace(0, (self.bound or 1) - 1, self.value.shape[-1], dtype=torch.float64)
        return steps.floor().to(self.value.dtype).to(self.value.device).expand_as(self.value).clone()

    def permutation(self) -> Tensor:
        """Set a permutation of all indices, of which there may be more than elements."""
        each = torch.arange(self.bound or 1, dtype=self.value.dtype, device=self.value.device).roll(1)
        return each.expand(*self.value.shape[:-1], len(each)).clone()

    def with_largest(self, index: int) -> Tensor:
        """Replace the largest index by a given index."""
        return self.value.masked_fill(self.value == self.largest, index)

    def reads_last(self) -> bool:
        """Return True if the last index reads the last element of a tensor, but a lower index does not.

        Then the integers are indices: numbers in a computation, such as a mask, do not select elements.
        """
        if self.bound is None or self.bound < 2:
            return False
        lower = self.value.masked_fill(self.value == self.bound - 1, 0)
        last = self.with_largest(self.bound - 1)
        for read in self.sample.inexact:
            for dim, size in enumerate(self.sample.flat[read].shape):
                if size == self.bound:
                    changed = self.sample.flat[read].detach().clone()
                    changed.select(dim, size - 1).mul_(-0.75).add_(0.375)
                    alike = [
                        are_same(self._asked(each), self._asked(each, {read: changed}))
                        for each in (lower, last)
                    ]
                    if alike == [True, False]:
                        return True
        return False

    def _asked(self, value: Tensor, changed: dict[int, Tensor] | None = None) -> list[Tensor] | None:
        return asked(self.subject, self.sample, {self.argnum: value, **(changed or {})})

    def takes_negative(self) -> bool:
        """Return True if -1 means the last index in the reference and in the backward of a call."""
        negative, last = self.with_largest(-1), self.with_largest((self.bound or 0) - 1)
        same = are_same(self._asked(last), self._asked(negative))
        return same and _is_differentiated(self, self.argnum, negative)
