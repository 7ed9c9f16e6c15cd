"""Kinds of variations of a sample that, according to the samples, are valid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from opsmith.checking.report import Given
from opsmith.checking.samples.domain import (
    Sizes,
    are_same,
    asked,
    broadcast_shapes,
    emptied_with,
    restored,
    rules_of,
    sizes_at,
    sizes_of,
)
from opsmith.checking.samples.sample import Sample, SizeLocation, Symbol, Variation, places_of
from opsmith.checking.subject import Subject
from opsmith.core.generate_like import (
    LARGER,
    SMALLER,
    WHOLE,
    generate_like,
    is_invented,
    is_symmetric,
    scale_factors,
)


def varied(
    subject: Subject, sample: Sample, what: str, changed: Mapping[int, Any], **options: Any
) -> Iterator[Variation]:
    """Yield a sample with some arguments changed and each rule restored, unless this makes new integers.

    Args:
        what: As for `Variation`.
        changed: Other values, by position.
        options: The other fields of `Variation`.
    """
    flat = restored(subject, sample, [changed.get(at, value) for at, value in enumerate(sample.flat)])
    derived = {rule.target for rule in rules_of(subject) if rule.relation.follows}
    for argnum, (had, now) in enumerate(zip(sample.flat, flat, strict=True)):
        if not isinstance(had, Tensor) or not isinstance(now, Tensor) or sample.labels[argnum] in derived:
            continue
        meant = now is had or (argnum in changed and now.shape == had.shape)
        if not meant and is_invented(had, now):
            return
    yield Variation(sample, what, tuple(flat), **options)


T = TypeVar("T")
VariationKind = Callable[[Sizes, torch.Generator], Iterator[Variation]]

PRIMES = (5, 7, 3, 11, 13)
MORE = 2
"""Size of a dimension that no sample has."""

LARGE_SIZES = (33, 129, 65)
"""Odd sizes, each one more than a usual block size of kernels."""


def _sizes(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Change all sizes that may vary at once, to different sizes; then change one size alone."""
    names = sizes.varying
    several = {name: PRIMES[at % len(PRIMES)] for at, name in enumerate(names)}
    for to in ([several] if len(names) > 1 else []) + [{name: 7} for name in names]:
        yield from resized(sizes, to, generator, silent=len(names) > 1)


def _one_size(sizes: Sizes, generator: torch.Generator, to: Sequence[int]) -> Iterator[Variation]:
    """Set one size that may vary to each of some numbers."""
    for symbol in _from_another(sizes.symbols, sizes.sample):
        if symbol.name in sizes.varying:
            for size in _from_another(to, sizes.sample):
                yield from resized(sizes, {symbol.name: size}, generator, silent=True)


def _ones(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Set all sizes that may vary to 1 at once, so that tensors have one element."""
    if len(sizes.varying) > 1:
        yield from resized(sizes, dict.fromkeys(sizes.varying, 1), generator, silent=True)


def _ranks(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Add a leading dimension to the tensors of largest rank, then to all tensors, or remove it.

    This is not done if `shapes=` declares the number of dimensions, for a class, whose forward may accept
    other ranks by accident, or if a rule of the samples depends on ranks.
    """
    subject, sample = sizes.subject, sizes.sample
    ruled = {label for rule in rules_of(subject) for label in (rule.source, rule.target)}
    inexact = [argnum for argnum in sample.inexact if may_change(sizes, argnum)]
    known = subject.specification.shapes is not None or not subject.kind.has_reference
    if not inexact or known or not sample.elements or ruled & {sample.labels[at] for at in inexact}:
        return
    most = max(sample.flat[argnum].dim() for argnum in inexact)
    largest = [argnum for argnum in inexact if sample.flat[argnum].dim() == most]
    ranks = {value.dim() for each in subject.samples for value in each.flat if isinstance(value, Tensor)}
    choices = [(argnums, most + 1) for argnums in (largest, inexact)] + [(largest, most - 1)]
    for argnums, rank in choices:
        if rank in ranks or not rank:
            continue
        shapes = {at: [*sample.flat[at].shape] for at in argnums}
        shapes = {at: [MORE, *shape] if rank > most else shape[1:] for at, shape in shapes.items()}
        made = {at: generate_like(sample.flat[at], shape, generator) for at, shape in shapes.items()}
        words = ", ".join(f"`{sample.labels[at]}` of the shape {shape}" for at, shape in shapes.items())
        yield from varied(subject, sample, words, made, silent=True, given="undeclared")


def empties(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Set each size alone to 0, and with it the number of indices into that dimension."""
    for symbol in _from_another(sizes.symbols, sizes.sample):
        to = emptied_with(sizes, symbol)
        yield from () if to is None else resized(sizes, to, generator, without=symbol)


def _from_another(some: Sequence[T], sample: Sample) -> Sequence[T]:
    """Return them rotated by the sample's position, so that few variations reach every dimension."""
    first = sample.position % max(len(some), 1)
    return (*some[first:], *some[:first])


def resized(
    sizes: Sizes,
    to: Mapping[str, int],
    generator: torch.Generator,
    *,
    most: float = math.inf,
    **options: Any,
) -> Iterator[Variation]:
    """Yield the sample at other sizes; indices into a dimension stay valid, distinct indices stay distinct.

    Args:
        to: New sizes, by the names of the symbols.
        most: Maximum number of elements, since many large sizes at once may exceed the memory.
        options: The other fields of `Variation`.
    """
    had, sample = {name: sizes.by_name[name] for name in to}, sizes.sample
    forms = sizes.changed(to)
    if forms is None or all(had[name].size == size for name, size in to.items()):
        return
    tensors = {argnum: value for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)}
    if sum(math.prod(forms.get(argnum, value.shape)) for argnum, value in tensors.items()) > most:
        return
    changed = {
        argnum: generate_like(tensors[argnum], form, generator) if argnum in tensors else form
        for argnum, form in sorted(forms.items())
        if argnum not in tensors or form != tensors[argnum].shape
    }
    words = ", ".join(f"`{name}` = {size} instead of {had[name].size}" for name, size in to.items())
    uneven = any(size % had[name].divisor for name, size in to.items())
    yield from varied(sizes.subject, sample, words, changed, uneven=uneven, **options)


def _values(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Draw new numbers similar to the given numbers."""
    sample = sizes.sample
    tensors = {argnum: value for argnum, value in enumerate(sample.flat) if isinstance(value, Tensor)}
    for _ in range(2 if any(value.numel() for value in tensors.values()) else 0):
        drawn = {argnum: generate_like(value, value.shape, generator) for argnum, value in tensors.items()}
        yield from varied(sizes.subject, sample, "other numbers", drawn, fresh_numbers=True)


def _magnitudes(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Enlarge all tensors, then shrink them, if their structure allows it."""
    sample = sizes.sample
    for factor in (LARGER, SMALLER):
        loose = [argnum for argnum in sample.inexact if factor in scale_factors(sample.flat[argnum])]
        if loose:
            words = " and ".join(f"`{sample.labels[argnum]}`" for argnum in loose) + f" times {factor:g}"
            scaled = {argnum: sample.flat[argnum] * factor for argnum in loose}
            yield from varied(sizes.subject, sample, words, scaled, fresh_numbers=True, rescaled=True)


def may_change(sizes: Sizes, argnum: int) -> bool:
    """Return True for an argument that is not a list of tensors, a generator or a size of a tensor.

    An object that contains other arguments may not change either.
    """
    sample = sizes.sample
    if sample.objects.holds(argnum):
        return False
    kind = sample.flattening.schema.by_name[sample.names[argnum]].kind
    if kind.is_tensor:
        return not kind.sequence and isinstance(sample.flat[argnum], Tensor)
    return not isinstance(sample.flat[argnum], torch.Generator) and not any(
        place.number and place.argnum == argnum for symbol in sizes.symbols for place in symbol.locations
    )


def _numbers(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Change arguments that are not tensors to values of other samples."""
    sample, subject = sizes.sample, sizes.subject
    for argnum, (name, value) in enumerate(zip(sample.names, sample.flat, strict=True)):
        if sample.flattening.schema.by_name[name].kind.is_tensor or not may_change(sizes, argnum):
            continue
        shown = [each.flat[place] for each, place in places_of(subject.samples, name)]
        for text, other in {repr(each): each for each in shown}.items():
            if text != repr(value):
                few = isinstance(value, bool | Enum)
                several = other if isinstance(other, list | tuple) else [other]
                words = f"`{name}={other!r}` instead of {value!r}"
                # A forward that does not use a number, such as a dimension, also takes an invalid number.
                given: Given = "undeclared" if not few and all(map(is_number, several)) else "usual"
                yield from varied(subject, sample, words, {argnum: other}, silent=not few, given=given)


def is_number(value: Any) -> bool:
    """Return True for a plain number; a flag is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _optional(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Add optional tensors that a sample leaves out, with the shape that another sample shows."""
    sample = sizes.sample
    for argnum, (name, value) in enumerate(zip(sample.names, sample.flat, strict=True)):
        kind = sample.flattening.schema.by_name[name].kind
        if value is not None or not kind.is_tensor or kind.sequence:
            continue
        for other, place in places_of(sizes.subject.samples, name):
            shape = _shape_here(sizes, other, place) if isinstance(other.flat[place], Tensor) else None
            if shape is not None:
                made = {argnum: generate_like(other.flat[place], shape, generator)}
                words = f"`{name}` as in sample {other.position}"
                yield from varied(sizes.subject, sample, words, made)
                break


def _shape_here(sizes: Sizes, other: Sample, argnum: int) -> list[int] | None:
    """Return the shape of another sample's argument at this sample's sizes; None if a size is unknown."""

    def names(sample: Sample, symbol: Symbol) -> set[tuple[str, int, bool]]:
        return {(sample.labels[place.argnum], place.index, place.number) for place in symbol.locations}

    there = {place: each for each in sizes_of(sizes.subject, other).symbols for place in each.locations}
    symbols = [there.get(SizeLocation(argnum, index)) for index in range(other.flat[argnum].dim())]
    called = [set() if symbol is None else names(other, symbol) for symbol in symbols]
    known = [[each.size for each in sizes.symbols if names(sizes.sample, each) & own] for own in called]
    return [found[0] for found in known] if all(known) else None


def _broadcasts(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    sample = sizes.sample
    for argnum, shape in broadcast_shapes(sizes.subject, sample):
        value = sample.flat[argnum]
        words = f"`{sample.labels[argnum]}` of the shape {list(shape)} instead of {list(value.shape)}"
        made = {argnum: generate_like(value, shape, generator)}
        yield from varied(sizes.subject, sample, words, made, silent=True)


def _unequal(sizes: Sizes, generator: torch.Generator) -> Iterator[Variation]:
    """Change one of several sizes that are equal by chance, which the reference accepts or refuses.

    One of two equal sizes of a tensor changes alone, or with sizes of other tensors. A size that equals an
    integer argument changes with it.
    """
    sample = sizes.sample
    if sizes.subject.specification.shapes is not None:  # the author says which sizes belong together
        return
    numbers = {place: size for place, size in sizes_at(sample).items() if place.number}
    for symbol in sizes.symbols:
        argnums = [location.argnum for location in symbol.locations if not location.number]
        single = [each for each in symbol.locations if argnums.count(each.argnum) < 2]
        double = [
            each
            for each in symbol.locations
            if argnums.count(each.argnum) > 1
            and not (each.argnum in sample.inexact and is_symmetric(sample.flat[each.argnum]))
        ]
        alike = [each for each, value in numbers.items() if value == symbol.size and each not in single]
        groups = [[each, *others] for each in reversed(double) for others in ([], single)]
        groups += [[*symbol.locations, each] for each in reversed(alike)]
        for group in groups if symbol.size > 1 else ():
            part = replace(symbol, locations=tuple(group))
            changed = replace(sizes, symbols=(*(each for each in sizes.symbols if each is not symbol), part))
            to = {part.name: part.size + 1}
            for made in resized(changed, to, generator, silent=True, given="undeclared"):
                if _reads_last(sizes.subject, made.sample(sample.position), group):
                    yield made


def _reads_last(subject: Subject, sample: Sample, places: Sequence[SizeLocation]) -> bool:
    """False if a forward ignores the last element of a dimension, although no indices select elements."""
    changed: dict[int, Tensor] = {}
    for place in places:
        if place.argnum in sample.inexact:
            value = changed.setdefault(place.argnum, sample.flat[place.argnum].clone())
            value.select(place.index, -1).fill_(torch.nan)
    if not changed or any(isinstance(value, Tensor) and value.dtype in WHOLE for value in sample.flat):
        return True
    return not are_same(asked(subject, sample, {}), asked(subject, sample, changed))


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
    _ones,
    _ranks,
    partial(_one_size, to=LARGE_SIZES),
)
"""Every kind of variation; the most revealing come first."""
