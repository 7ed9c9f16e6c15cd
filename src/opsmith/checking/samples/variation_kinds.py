"""Kinds of variations of a sample, as far as the samples show that they are valid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from opsmith.checking.report import Given
from opsmith.checking.samples.linked_sizes import (
    SizeLocation,
    Sizes,
    Symbol,
    broadcast_shapes,
    is_batch_like,
    number_locations,
    sizes_of,
)
from opsmith.checking.samples.pointed_sizes import emptied_with
from opsmith.checking.samples.sample import Sample, places_of
from opsmith.checking.subject import Subject
from opsmith.core.generate_like import (
    LARGER,
    SMALLER,
    generate_like,
    is_invented,
    is_symmetric,
    scale_factors,
)
from opsmith.core.schema import Argument


@dataclass(frozen=True)
class Variation:
    """A sample with one thing changed.

    Args:
        of: Original sample.
        what: Description of the change, which follows `sample 0 with`.
        flat: Changed flat arguments.
        fresh_numbers: True if it is a new input although its shapes are known.
        silent: True if its rejection need not be reported.
        without: The size that is 0 in it, where only that is changed, and the number of indices into it.
        given: Circumstance: `undeclared` where no sample and no type shows that a value is meant beside the
            others, `strained` where its number is nobody's.
        uneven: True if a number that divides a size in every sample does not divide it here.
        rescaled: True if its numbers have another size than those of the sample.
        repeats: True if it repeats an index that no sample repeats.
    """

    of: Sample
    what: str
    flat: tuple[Any, ...]
    fresh_numbers: bool = False
    silent: bool = False
    without: Symbol | None = None
    given: Given = "usual"
    uneven: bool = False
    rescaled: bool = False
    repeats: bool = False

    @property
    def origin(self) -> str:
        """Description of its origin."""
        return f"sample {self.of.position} with {self.what}"

    def sample(self, position: int) -> Sample:
        """Return the changed sample."""
        made = replace(self.of, position=position, flat=self.flat, origin=self.origin)
        return replace(made, repeats=self.repeats, change=self)


T = TypeVar("T")
VariationKind = Callable[[Subject, Sample, torch.Generator], Iterator[Variation]]

PRIMES = (5, 7, 3, 11, 13)
LARGE_SIZES = (33, 129, 65)
"""Odd, and one more than usual block sizes of kernels."""


def _sizes(subject: Subject, sample: Sample, generator: torch.Generator) -> Iterator[Variation]:
    """Change all sizes that may vary at once, to different ones; then one alone."""
    sizes = sizes_of(subject, sample)
    varied = [symbol for symbol in sizes.symbols if may_vary(subject, sizes, symbol)]
    several = {symbol.name: PRIMES[at % len(PRIMES)] for at, symbol in enumerate(varied)}
    if len(varied) > 1:
        yield from resized(sizes, several, generator, silent=True)
    for symbol in varied:
        yield from resized(sizes, {symbol.name: 7}, generator, silent=len(varied) > 1)


def _one_size(
    subject: Subject, sample: Sample, generator: torch.Generator, to: Sequence[int]
) -> Iterator[Variation]:
    """Set one size that may vary to each of some numbers."""
    sizes = sizes_of(subject, sample)
    for symbol in _from_another(sizes.symbols, sample):
        if may_vary(subject, sizes, symbol):
            for size in _from_another(to, sample):
                yield from resized(sizes, {symbol.name: size}, generator, silent=True)


def empties(subject: Subject, sample: Sample, generator: torch.Generator) -> Iterator[Variation]:
    """Set each size alone to 0, and with it the number of indices into that dimension."""
    sizes = sizes_of(subject, sample)
    for symbol in _from_another(sizes.symbols, sample):
        to = emptied_with(subject, sizes, symbol)
        for change in () if to is None else resized(sizes, to, generator):
            yield replace(change, without=symbol)


def _from_another(some: Sequence[T], sample: Sample) -> Sequence[T]:
    """Return them from another one on for each sample: few variations reach every dimension then."""
    first = sample.position % max(len(some), 1)
    return (*some[first:], *some[:first])


def may_vary(subject: Subject, sizes: Sizes, symbol: Symbol) -> bool:
    """Return True if a size may change: the samples or the author show it, or it is batch-like."""
    return symbol.varies or is_batch_like(subject, sizes, symbol)


def resized(
    sizes: Sizes,
    to: Mapping[str, int],
    generator: torch.Generator,
    *,
    silent: bool = False,
    most: float = math.inf,
) -> Iterator[Variation]:
    """Yield the sample at other sizes; indices into a dimension stay valid, and distinct ones distinct.

    Args:
        sizes: Sizes of the sample.
        to: New sizes, by the names of the symbols.
        generator: Source of new numbers.
        silent: As in `Variation`.
        most: Largest number of elements: many large sizes at once may exceed the memory.
    """
    sample = sizes.sample
    if all(sizes.by_name[name] == size for name, size in to.items()):
        return
    changed = sizes.changed(to)
    if changed is None:
        return
    shapes, numbers = changed
    if sum(math.prod(shapes[at]) for at, value in enumerate(sample.flat) if isinstance(value, Tensor)) > most:
        return
    flat = list(sample.flat)
    for argnum, value in enumerate(flat):
        if not isinstance(value, Tensor):
            flat[argnum] = numbers.get(argnum, value)
            continue
        kept = shapes[argnum] == list(value.shape)
        made = value if kept else generate_like(value, shapes[argnum], generator)
        for name, size in to.items():
            made = _pointing(value, made, sizes.by_name[name], size)
        if is_invented(value, made):
            return
        flat[argnum] = made
    words = ", ".join(f"`{name}` at {size} where it had {sizes.by_name[name]}" for name, size in to.items())
    uneven = any(size % sizes.divisors.get(name, 1) for name, size in to.items())
    yield Variation(sample, words, tuple(flat), silent=silent, uneven=uneven)


def _pointing(given: Tensor, made: Tensor, had: int, size: int) -> Tensor:
    """Keep indices below a reduced size, and offsets ending at a changed one."""
    whole = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    if not whole or not given.numel() or not made.numel() or int(given.min()) < 0:
        return made
    ends = given.dim() == 1 and len(given) > 1 and int(given[-1]) == had and bool((given.diff() >= 0).all())
    if ends:
        made = made.clamp(max=size).clone()
        made[-1] = size
        return made
    if not size:
        return made
    return made % size if int(given.max()) < had and size < had else made


def _values(subject: Subject, sample: Sample, generator: torch.Generator) -> Iterator[Variation]:
    """Draw other numbers like the given ones."""
    if not any(isinstance(value, Tensor) and value.numel() for value in sample.flat):
        return
    for _ in range(2):
        flat = [
            generate_like(value, value.shape, generator) if isinstance(value, Tensor) else value
            for value in sample.flat
        ]
        yield Variation(sample, "other numbers", tuple(_ordered(sample, flat)), fresh_numbers=True)


def _ordered(sample: Sample, flat: list[Any]) -> list[Any]:
    """Keep the order of tensors where one is below another everywhere, as bounds are."""
    real = [
        argnum
        for argnum in sample.inexact
        if not sample.flat[argnum].is_complex() and sample.flat[argnum].numel() > 2
    ]
    for low in real:
        for high in real:
            below, above = sample.flat[low], sample.flat[high]
            if low != high and below.shape == above.shape and bool((below < above).all()):
                flat[low], flat[high] = (
                    torch.minimum(flat[low], flat[high]),
                    torch.maximum(flat[low], flat[high]),
                )
    return flat


def _magnitudes(subject: Subject, sample: Sample, generator: torch.Generator) -> Iterator[Variation]:
    """Enlarge all tensors, then shrink them, where their structure allows it."""
    for factor in (LARGER, SMALLER):
        loose = [argnum for argnum in sample.inexact if factor in scale_factors(sample.flat[argnum])]
        if not loose:
            continue
        flat = [value * factor if argnum in loose else value for argnum, value in enumerate(sample.flat)]
        names = " and ".join(f"`{sample.labels[argnum]}`" for argnum in loose)
        yield Variation(sample, f"{names} times {factor:g}", tuple(flat), fresh_numbers=True, rescaled=True)


def _numbers(subject: Subject, sample: Sample, generator: torch.Generator) -> Iterator[Variation]:
    """Change other arguments to values of other samples."""
    schema = sample.flattening.schema
    tied = {
        location.argnum
        for symbol in sizes_of(subject, sample).symbols
        for location in symbol.locations
        if location.number
    }
    for argnum, (name, value) in enumerate(zip(sample.names, sample.flat, strict=True)):
        argument = schema.by_name[name]
        if argument.kind.is_tensor or argnum in tied or isinstance(value, torch.Generator):
            continue
        for other in _shown(subject, argument, value):
            flat = sample.with_value(argnum, other)
            few = isinstance(value, bool | Enum)
            words = f"`{name}={other!r}` where it had {value!r}"
            # A forward that does not use a number, such as a dimension, takes one that does not fit, too.
            given: Given = "undeclared" if not few and is_number(other) else "usual"
            yield Variation(sample, words, flat, silent=not few, given=given)


def is_number(value: Any) -> bool:
    """Return True for a plain number, or several: a flag is none."""
    several = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in several)


def _shown(subject: Subject, argument: Argument, value: Any) -> list[Any]:
    found: dict[str, Any] = {}
    for sample, argnum in places_of(subject.samples, argument.name):
        found.setdefault(repr(sample.flat[argnum]), sample.flat[argnum])
    return [other for text, other in found.items() if text != repr(value)]


def _optional(subject: Subject, sample: Sample, generator: torch.Generator) -> Iterator[Variation]:
    """Give optional tensors that a sample leaves out, with the shape that another sample shows."""
    schema = sample.flattening.schema
    sizes = sizes_of(subject, sample)
    for argnum, (name, value) in enumerate(zip(sample.names, sample.flat, strict=True)):
        kind = schema.by_name[name].kind
        if value is not None or not kind.is_tensor or kind.sequence:
            continue
        for other, place in places_of(subject.samples, name):
            if not isinstance(other.flat[place], Tensor):
                continue
            shape = _shape_here(subject, sizes, other, place)
            if shape is not None:
                flat = sample.with_value(argnum, generate_like(other.flat[place], shape, generator))
                yield Variation(sample, f"`{name}` as sample {other.position} has it", flat)
                break


def _shape_here(subject: Subject, sizes: Sizes, other: Sample, argnum: int) -> list[int] | None:
    """Return the shape of another sample's argument at the sizes of this one; None where one is unknown."""
    sizes_there = sizes_of(subject, other)
    here = {
        (sizes.sample.labels[location.argnum], location.index, location.number): symbol.size
        for symbol in sizes.symbols
        for location in symbol.locations
    }
    shape: list[int] = []
    for index in range(other.flat[argnum].dim()):
        place = SizeLocation(argnum, index)
        symbol = next((each for each in sizes_there.symbols if place in each.locations), None)
        known = [
            here[label]
            for location in (symbol.locations if symbol else ())
            if (label := (other.labels[location.argnum], location.index, location.number)) in here
        ]
        if not known:
            return None
        shape.append(known[0])
    return shape


def _broadcasts(subject: Subject, sample: Sample, generator: torch.Generator) -> Iterator[Variation]:
    for argnum, shape in broadcast_shapes(subject, sample):
        value = sample.flat[argnum]
        flat = sample.with_value(argnum, generate_like(value, shape, generator))
        words = f"`{sample.labels[argnum]}` of the shape {list(shape)} where it had {list(value.shape)}"
        yield Variation(sample, words, flat, silent=True)


def _is_symmetric(sample: Sample, argnum: int) -> bool:
    return argnum in sample.inexact and is_symmetric(sample.flat[argnum])


def _unequal(subject: Subject, sample: Sample, generator: torch.Generator) -> Iterator[Variation]:
    """Change one of several sizes that are equal by chance: the reference takes it, or refuses it.

    One of two equal sizes of a tensor changes alone, or with those of other tensors; a size that an integer
    argument equals changes with that.
    """
    sizes = sizes_of(subject, sample)
    if subject.specification.shapes is not None:  # the author says which sizes belong together
        return
    numbers = number_locations(sample)
    for symbol in sizes.symbols:
        if symbol.size < 2:
            continue
        argnums = [location.argnum for location in symbol.locations if not location.number]
        single = [each for each in symbol.locations if argnums.count(each.argnum) < 2]
        double = [
            each
            for each in symbol.locations
            if argnums.count(each.argnum) > 1 and not _is_symmetric(sample, each.argnum)
        ]
        alike = [each for each, value in numbers.items() if value == symbol.size and each not in single]
        groups = [[each, *others] for each in reversed(double) for others in ([], single)]
        groups += [[*symbol.locations, each] for each in reversed(alike)]
        for group in groups:
            part = replace(symbol, locations=tuple(group))
            others = tuple(each for each in sizes.symbols if each is not symbol)
            changed = replace(sizes, symbols=(*others, part))
            for change in resized(changed, {part.name: part.size + 1}, generator, silent=True):
                yield replace(change, given="undeclared")


KINDS: tuple[VariationKind, ...] = (
    _sizes,
    empties,
    _values,
    _numbers,
    _optional,
    partial(_one_size, to=(1,)),
    _broadcasts,
    _unequal,
    _magnitudes,
    partial(_one_size, to=LARGE_SIZES),
)
"""Every kind of variation, the most revealing first."""
