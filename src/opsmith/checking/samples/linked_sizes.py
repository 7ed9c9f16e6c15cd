"""Sizes of a sample that belong together, as `shapes=` declares or as the samples show.

Sizes that are equal in every sample form a symbol. They are changed together, and with them the integer
arguments that equal them. Too few symbols make less varied inputs; too many would make invalid ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.compare import all_close
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject
from opsmith.core.cached_property import cached_property
from opsmith.core.call_arguments import tensors_in
from opsmith.core.expression import Expression, ExpressionError
from opsmith.core.shapes import ANY, Shapes
from opsmith.core.tensors import sequence_like


@dataclass(frozen=True, order=True)
class SizeLocation:
    """Location of a size: a dimension of a tensor, or an integer argument.

    Args:
        argnum: Position of the flat argument.
        index: Dimension of the tensor, or index in a list of integers; 0 for an integer.
        number: True for an integer argument.
    """

    argnum: int
    index: int
    number: bool = False


@dataclass(frozen=True)
class Symbol:
    """Sizes of a sample that are changed together.

    Args:
        name: Name in messages: `x.shape[0]`, or the author's letter.
        size: Value in the sample.
        locations: Locations of the size.
        varies: True if the samples, or the author, show that it may change.
    """

    name: str
    size: int
    locations: tuple[SizeLocation, ...]
    varies: bool

    @property
    def doubled(self) -> bool:
        """True if a tensor has the size twice, as a square matrix has."""
        argnums = [location.argnum for location in self.locations if not location.number]
        return len(argnums) > len(set(argnums))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a sample.

    Args:
        sample: The sample.
        symbols: Sizes that can be changed.
        formulas: Sizes computed from symbols, where the author declared expressions.
        divisors: Number that divides a symbol's size in every sample, where samples have several sizes.
    """

    sample: Sample
    symbols: tuple[Symbol, ...]
    formulas: Mapping[SizeLocation, Callable[[Mapping[str, int]], int | None]]
    divisors: Mapping[str, int]

    @cached_property
    def by_name(self) -> dict[str, int]:
        """Value of each symbol in the sample."""
        return {symbol.name: symbol.size for symbol in self.symbols}

    def changed(self, to: Mapping[str, int]) -> tuple[dict[int, list[int]], dict[int, Any]] | None:
        """Compute the new shapes and integers, by position; None where an expression has no value.

        Args:
            to: New sizes of some symbols, by name.
        """
        shapes = {
            argnum: list(value.shape)
            for argnum, value in enumerate(self.sample.flat)
            if isinstance(value, Tensor)
        }
        numbers: dict[int, Any] = {}
        for symbol in self.symbols:
            if symbol.name not in to:
                continue
            for location in symbol.locations:
                if not location.number:
                    shapes[location.argnum][location.index] = to[symbol.name]
                    continue
                value = numbers.get(location.argnum, self.sample.flat[location.argnum])
                numbers[location.argnum] = _with_item(value, location.index, to[symbol.name])
        letters = {**self.by_name, **to}
        for location, formula in self.formulas.items():
            size = formula(letters)
            if size is None:
                return None
            shapes[location.argnum][location.index] = size
        return shapes, numbers


def sizes_of(subject: Subject, sample: Sample) -> Sizes:
    """Return the sizes of a sample, as declared or else as the samples show them."""
    shapes = subject.specification.shapes
    if shapes is None:
        symbols = _shown(subject, sample)
        divisors = {symbol.name: _divisor(subject, sample, symbol) for symbol in symbols}
        return Sizes(sample, symbols, {}, divisors)
    return _declared(shapes, sample)


def _divisor(subject: Subject, sample: Sample, symbol: Symbol) -> int:
    """The number that divides a size in every sample of the author, as 2 where halves are split; else 1."""
    shown = {
        each.flat[place.argnum].shape[place.index]
        for place in symbol.locations
        if not place.number
        for each in subject.samples
        if not each.origin and len(each.flat) == len(sample.flat)
        if each.ranks[place.argnum] == sample.ranks[place.argnum]
    }
    return math.gcd(*shown) or 1 if len(shown) > 1 else 1


def _with_item(value: Any, index: int, size: int) -> Any:
    if not isinstance(value, list | tuple):
        return size
    return sequence_like(value, (size if at == index else item for at, item in enumerate(value)))


def _declared(shapes: Shapes, sample: Sample) -> Sizes:
    locations: dict[str, list[SizeLocation]] = {}
    formulas: dict[SizeLocation, Any] = {}
    sizes, _ = shapes.bind(sample.flattening.schema, sample.flattening.pack(sample.flat))
    for argnum, (name, value) in enumerate(zip(sample.names, sample.flat, strict=True)):
        if name in shapes.integers and isinstance(value, int):
            locations.setdefault(name, []).append(SizeLocation(argnum, 0, number=True))
        dims = shapes.arguments.get(name)
        if dims is None or not isinstance(value, Tensor):
            continue
        start = value.dim() - len(dims.sizes)
        for lead in range(start):
            locations.setdefault(f"...[{lead - start}]", []).append(SizeLocation(argnum, lead))
        for index, (size, expression) in enumerate(zip(dims.sizes, dims.expressions, strict=True)):
            if expression is not None:
                formulas[SizeLocation(argnum, start + index)] = _formula(expression)
            elif size != ANY:
                locations.setdefault(size, []).append(SizeLocation(argnum, start + index))
    symbols = tuple(
        Symbol(name, _size_at(sample, where[0]), tuple(where), True)
        for name, where in locations.items()
        if name in sizes or name.startswith("...")
    )
    return Sizes(sample, symbols, formulas, {})


def _formula(expression: Expression) -> Callable[[Mapping[str, int]], int | None]:
    def size(letters: Mapping[str, int]) -> int | None:
        try:
            value = expression.value(letters)
        except (ExpressionError, KeyError):  # KeyError: a letter that no argument of this sample has
            return None
        return value if isinstance(value, int) and value >= 0 else None

    return size


def _shown(subject: Subject, sample: Sample) -> tuple[Symbol, ...]:
    """Build symbols from sizes that are equal in this sample and in every other with the same tensors."""
    sizes = _locations(sample)
    others = [_by_label(each) for each in subject.samples if each.position != sample.position]
    ranks = sample.ranks
    known = {location: [each.get(_label(sample, location, ranks)) for each in others] for location in sizes}
    parents = {location: location for location in sizes}

    def root(location: SizeLocation) -> SizeLocation:
        return location if parents[location] == location else root(parents[location])

    for first, second in combinations(sorted(sizes), 2):
        if sizes[first] == sizes[second] and _together(sizes[first], known, first, second):
            parents[root(second)] = root(first)
    groups: dict[SizeLocation, list[SizeLocation]] = {}
    for location in sorted(sizes):
        groups.setdefault(root(location), []).append(location)
    found: list[Symbol] = []
    for locations in groups.values():
        tensors = [location for location in locations if not location.number]
        if not tensors:
            continue
        size = sizes[tensors[0]]
        varies = any(other not in (None, size) for location in tensors for other in known[location])
        name = f"{sample.labels[tensors[0].argnum]}.shape[{tensors[0].index}]"
        found.append(Symbol(name, size, tuple(locations), varies))
    return tuple(found)


def _together(
    size: int, known: Mapping[SizeLocation, Sequence[int | None]], first: SizeLocation, second: SizeLocation
) -> bool:
    """Return True if two equal sizes are equal in every other sample that has both."""
    pairs = [(a, b) for a, b in zip(known[first], known[second], strict=True) if None not in (a, b)]
    if any(a != b for a, b in pairs):
        return False
    # A small integer may equal a size by chance; one that changes with it does not.
    return not (first.number or second.number) or len({size, *(a for a, _ in pairs)}) > 1


def _locations(sample: Sample) -> dict[SizeLocation, int]:
    """Return every size and every integer of a sample."""
    found: dict[SizeLocation, int] = {}
    for argnum, value in enumerate(sample.flat):
        if isinstance(value, Tensor):
            found.update({SizeLocation(argnum, index): size for index, size in enumerate(value.shape)})
        elif isinstance(value, int) and not isinstance(value, bool):
            found[SizeLocation(argnum, 0, number=True)] = value
        elif isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
            found.update({SizeLocation(argnum, index, number=True): item for index, item in enumerate(value)})
    return found


def number_locations(sample: Sample) -> dict[SizeLocation, int]:
    """Return the integers among the arguments of a sample, by location."""
    return {location: size for location, size in _locations(sample).items() if location.number}


def _size_at(sample: Sample, location: SizeLocation) -> int:
    value = sample.flat[location.argnum]
    return int(value if location.number else value.shape[location.index])


def _label(sample: Sample, location: SizeLocation, ranks: Sequence[int | None]) -> tuple[Any, ...]:
    return sample.labels[location.argnum], ranks[location.argnum], location.index, location.number


def _by_label(sample: Sample) -> dict[tuple[Any, ...], int]:
    ranks = sample.ranks
    return {_label(sample, location, ranks): size for location, size in _locations(sample).items()}


def is_batch_like(subject: Subject, sizes: Sizes, symbol: Symbol) -> bool:
    """Return True if a slice of a dimension gives a slice of the results, so that its size is arbitrary."""
    if (
        symbol.size < 2
        or symbol.doubled
        or any(location.number for location in symbol.locations)
        or subject.draws
    ):
        return False
    dimensions = {location.argnum: location.index for location in symbol.locations}
    # Suppressed: if it raises for a slice, the size has a meaning.
    with Overlooking(), torch.no_grad():
        whole = subject.reference(sizes.sample, sizes.sample.in_double())
        for start, length in ((0, symbol.size - 1), (symbol.size - 1, 1)):
            flat = _part(sizes.sample.in_double(), dimensions, start, length)
            part = subject.reference(sizes.sample, flat)
            is_part = partial(_is_part, size=symbol.size, start=start, length=length)
            if len(whole) != len(part) or not all(map(is_part, whole, part)):
                return False
        return True
    return False


def _part(flat: list[object], dimensions: dict[int, int], start: int, length: int) -> list[object]:
    return [
        value.narrow(dimensions[argnum], start, length).clone()
        if isinstance(value, Tensor) and argnum in dimensions
        else value
        for argnum, value in enumerate(flat)
    ]


def _is_part(whole: Tensor | None, part: Tensor | None, size: int, start: int, length: int) -> bool:
    if whole is None or part is None:
        return whole is part
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return False
    changed = [at for at, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if len(changed) != 1 or whole.shape[changed[0]] != size:
        return False
    expected = whole.narrow(changed[0], start, length)
    if not is_inexact(whole):
        return torch.equal(expected, part)
    return all_close(part, expected, 1e-12 + 1e-9 * part.abs())


def broadcast_shapes(subject: Subject, sample: Sample) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield positions of arguments, each with a shape that broadcasts to its own.

    Only for an operator whose results have the broadcast shape of its arguments in every sample, since others
    may accept a size of 1 with another meaning; and only for broadcasts that a sample shows: a dimension of 1
    beside a larger one, which also grows to it, fewer dimensions than the result, or none.
    """
    if not all(_pointwise(subject, each) for each in subject.samples):
        return
    for argnum, (label, value) in enumerate(zip(sample.labels, sample.flat, strict=True)):
        if not isinstance(value, Tensor) or not value.numel():
            continue
        shown = [(own.shape, whole) for own, whole in _forms(subject.samples, label)]
        ranks = {len(own) for own, _ in shown}
        if any(len(own) < len(whole) for own, whole in shown) and len(ranks) > 1:
            for dropped in range(1, value.dim() + 1):
                yield argnum, tuple(value.shape[dropped:])
        if any(_stretched(own, whole) for own, whole in shown):
            for at, size in enumerate(value.shape):
                if size > 1:
                    yield argnum, (*value.shape[:at], 1, *value.shape[at + 1 :])
        for at, full in enumerate(_whole(sample)[-value.dim() :] if value.dim() else ()):
            if value.shape[at] == 1 < full:
                yield argnum, (*value.shape[:at], full, *value.shape[at + 1 :])
    tensors = [argnum for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)]
    if len(tensors) == 1:
        (argnum,) = tensors
        ranks = {own.dim() for own, _ in _forms(subject.samples, sample.labels[argnum])}
        if len(ranks) > 1 and sample.flat[argnum].dim():
            yield argnum, ()


def _forms(samples: Sequence[Sample], label: str) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Return an argument of each sample that has it, with the broadcast shape of all arguments."""
    return [
        (value, _whole(sample))
        for sample in samples
        for name, value in zip(sample.labels, sample.flat, strict=True)
        if name == label and isinstance(value, Tensor)
    ]


def _stretched(own: Sequence[int], whole: Sequence[int]) -> bool:
    return any(mine == 1 and full > 1 for mine, full in zip(reversed(own), reversed(whole), strict=False))


def _whole(sample: Sample) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(value.shape for value in tensors_in(list(sample.flat)))))


def _pointwise(subject: Subject, sample: Sample) -> bool:
    """Return True if every result has the broadcast shape of all arguments."""
    try:
        whole = _whole(sample)
    except RuntimeError:  # not broadcastable
        return False
    # Suppressed, since the properties report errors on the author's own sample.
    with Overlooking(), torch.no_grad():
        results = subject.reference(sample, sample.at())
        return all(tuple(result.shape) == whole for result in tensors_in(list(results)))
    return False
