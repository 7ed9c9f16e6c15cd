"""Sizes to measure: calls from `samples=` and `sizes=`, or grown from the operator's samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.benchmarking.effort import BenchmarkEffort
from opsmith.benchmarking.templates import (
    Letters,
    RefusedSizesError,
    Template,
    elements,
    grow,
    no_such_size,
    shown_letters,
    usable,
)
from opsmith.checking.effort import EFFORTS as CHECKED
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject_kinds import ForwardRaisedError, subject_of
from opsmith.core.call_arguments import shown
from opsmith.core.formula import listed
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.samples import LocatedSamples, Make, samples_of
from opsmith.core.shape_samples import samples_for
from opsmith.judging.tensors import is_inexact, replica

Samples = Callable[..., Iterable[Any]] | Iterable[Any] | None
Sizes = Mapping[str, Any] | None

TINY = 4096
"""Maximum number of elements of the call that measures the overhead of a call."""


@dataclass(frozen=True)
class SizedCall:
    """One call to measure.

    Args:
        label: Its label.
        sizes: Its sizes by name.
        sample: The call, in the dtype of the samples, on the CPU.
        role: See `BenchmarkCase`.
        smaller: Function that returns this call with about a given number of elements, or None if that is not
            smaller. None if the user gave the size.
    """

    label: str
    sizes: Mapping[str, int]
    sample: Sample
    role: str = "size"
    smaller: Callable[[int], SizedCall | None] | None = field(default=None, compare=False)


def samples_of_operator(operator: Operator[..., Any], samples: Samples, seed: int) -> tuple[Sample, ...]:
    """Return the samples of an operator, validated as by a check.

    Raises:
        MissingSamplesError: If there are none.
        SampleError: If one does not fit.
        NotPassedError: If the forward of a class raises on its samples.
    """
    try:
        return subject_of(operator, samples, seed, CHECKED["quick"]).samples
    except ForwardRaisedError as error:
        (failure,) = error.outcome.failures
        raise errors.NotPassedError(
            "it does not run on its samples",
            got=failure.message,
            where=failure.where,
            hint="run `opsmith check`, fix the operator, then measure",
        ) from error
    except errors.MissingSamplesError as error:
        raise errors.MissingSamplesError(
            "there are no samples to measure it on",
            where=error.where,
            hint=f"write `@{operator.specification.variable}.samples` over a function of `make` that "
            "yields tuples of arguments, or call `benchmark(..., samples=[(x, weight)])`",
        ) from error


def sizes_of(
    operator: Operator[..., Any], samples: Samples, sizes: Sizes, seed: int, effort: BenchmarkEffort
) -> tuple[list[SizedCall], list[str]]:
    """Return the calls to measure, the tiny one first, and remarks on their origin.

    Args:
        operator: The operator.
        samples: See `benchmark`. sizes: See `benchmark`.
        seed: Seed of all numbers.
        effort: Number of sizes to find if none are given.

    Raises:
        MissingSamplesError: If there are no samples.
        SampleError: If one does not fit.
        UsageError: If `sizes` is invalid.
    """
    points = [] if sizes is None else _points(sizes)
    if points and callable(samples) and not points[0].keys().isdisjoint(_required(samples)):
        return _of_function(operator, samples, points, seed), []
    own = samples_of_operator(operator, samples, seed)
    if sizes is not None:
        return _given(operator, own, points, seed)
    if samples is not None:
        every = [SizedCall(_label({}, each), {}, each) for each in own if elements(each.flat)]
        return [*_tiny(_own(operator, seed) or own), *_numbered(every)], []
    return _found(operator, own, effort, seed)


def _required(samples: Callable[..., Any]) -> list[str]:
    """Return the parameters of a function of samples that have no default."""
    try:
        parameters = inspect.signature(samples).parameters.values()
    except ValueError:  # a builtin without a signature
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


def _points(sizes: Sizes) -> list[dict[str, int]]:
    """Split `sizes` into one mapping for each size; the lists are combined element by element."""
    fits = isinstance(sizes, Mapping) and bool(sizes) and all(isinstance(name, str) for name in sizes)
    given: dict[str, list[Any]] = {}
    for names, value in sizes.items() if isinstance(sizes, Mapping) and fits else ():
        numbers = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        fits = (
            fits
            and bool(names.split())
            and given.keys().isdisjoint(names.split())
            and bool(numbers)
            and all(type(each) is int and each >= 0 for each in numbers)
        )
        given |= dict.fromkeys(names.split(), numbers)
    if not fits:
        raise no_such_size(
            "`sizes` must map names to sizes",
            "a mapping from names, all different, to a whole number or a list of whole numbers",
            shown(sizes),
            'write `sizes={"B": 8, "H W": [14, 28, 56]}`',
        )
    lengths = {len(numbers) for numbers in given.values() if len(numbers) > 1}
    if len(lengths) > 1:
        raise no_such_size(
            "the lists of `sizes` must have the same length",
            "lists of the same length",
            ", ".join(f"{len(numbers)} for `{name}`" for name, numbers in given.items()),
            "give each list the same number of sizes, or one size",
        )
    count = max(len(numbers) for numbers in given.values())
    return [
        {name: numbers[at if len(numbers) > 1 else 0] for name, numbers in given.items()}
        for at in range(count)
    ]


def _of_function(
    operator: Operator[..., Any], samples: Callable[..., Any], points: Sequence[Mapping[str, int]], seed: int
) -> list[SizedCall]:
    """Call a function of sizes for each size; a parameter that is not a size gets `make`."""
    parameters = _required(samples)
    left = [name for name in parameters if name not in points[0]]
    unknown = [name for name in points[0] if name not in parameters]
    if unknown or len(left) > 1:
        raise no_such_size(
            "`sizes` does not fit the parameters of `samples`",
            f"a size for each of {listed([name for name in parameters if name != 'make'])}",
            f"sizes for {listed(list(points[0]))}",
            'write `samples=lambda make, n: [(make(n),)]` and `sizes={"n": [256, 512]}`',
        )
    schema, found = operator.specification.schema, []
    for point in points:

        def sized(make: Make, point: Mapping[str, int] = point) -> Any:
            return samples(**dict.fromkeys(left, make), **point)

        make = Make(generator=torch.Generator().manual_seed(seed))
        try:
            calls = samples_of(LocatedSamples(sized, where(samples)), make, schema, operator.name)
        except errors.SampleError as error:
            raise errors.SampleError(
                f"at {_shown_sizes(point)}: {error.problem}",
                argument=error.argument,
                expected=error.expected,
                got=error.got,
                where=error.where,
                hint="give sizes that `samples` can make" if error.__cause__ else error.hint,
            ) from error
        every = [Sample.of(position, call, schema) for position, call in enumerate(calls)]
        found += [SizedCall(_label(point, each), point, each) for each in every]
    return [*_tiny(_own(operator, seed)), *_numbered(found)]


def _own(operator: Operator[..., Any], seed: int) -> Sequence[Sample]:
    """Return the operator's samples, if it has any."""
    return samples_of_operator(operator, None, seed) if samples_for(operator.specification) else ()


def _given(
    operator: Operator[..., Any], own: Sequence[Sample], points: Sequence[Mapping[str, int]], seed: int
) -> tuple[list[SizedCall], list[str]]:
    """Resize a sample to each of the sizes: the first sample that accepts them."""
    specification = operator.specification
    generator = torch.Generator().manual_seed(seed)
    found = []
    for point in points:
        refusals: list[str] = []
        for sample in filter(usable, own):
            template = Template.of(specification, sample)
            try:
                values, letters = _resized(template, point)
            except RefusedSizesError as error:
                refusals.append(str(error))
                continue
            again = _sample(template, values, generator)
            found.append(SizedCall(_label(point, again), shown_letters(letters), again))
            break
        else:
            raise no_such_size(
                f"no sample takes the sizes {_shown_sizes(point)}",
                "sizes with which the reference can be called",
                refusals[0] if refusals else "no sample has non-empty floating tensors",
                "also give every letter that has to change together with these letters, as in "
                '`{"H Ho": 56, "W Wo": 56}`',
            )
    return [*_tiny(own), *_numbered(found)], []


def _resized(template: Template, point: Mapping[str, int]) -> tuple[list[Any], Letters]:
    """Return the arguments and letters of a template in these sizes.

    Raises:
        RefusedSizesError: If the operator refuses them.
        UsageError: If it has no such sizes, or tensors of these sizes cannot be made.
    """
    schema = template.specification.schema
    plain = [each.name for each in schema.arguments if not each.kind.is_tensor]
    known = [*(() if template.shapes is None else template.letters), *plain]
    unknown = [name for name in point if name not in known]
    if unknown:
        raise no_such_size(
            f"there is no size `{unknown[0]}`",
            f"one of {listed(known)}"
            if known
            else "letters of `shapes=`, but it is declared without `shapes=`",
            listed(list(point)),
            "name letters of `shapes=` or arguments that are numbers, or give "
            '`samples=lambda make, n: [(make(n),)]` with `sizes={"n": [256, 512]}`',
        )
    letters = {**template.letters, **{name: size for name, size in point.items() if name in template.letters}}
    try:
        values = template.values(letters)
    except (RuntimeError, TypeError) as error:  # as torch raises where bytes, or a size, are beyond 64 bits
        raise _too_large(", ".join(f"{name}={size}" for name, size in point.items()), error) from error
    names = template.sample.names
    values = [
        point.get(name, value) if name in plain else value for name, value in zip(names, values, strict=True)
    ]
    template.attempt(values)
    return values, letters | dict(point)


def _found(
    operator: Operator[..., Any], own: Sequence[Sample], effort: BenchmarkEffort, seed: int
) -> tuple[list[SizedCall], list[str]]:
    """Grow the first sample that can be grown; if there is none, return the samples unchanged."""
    generator = torch.Generator().manual_seed(seed)
    for sample in filter(usable, own):
        template = Template.of(operator.specification, sample)
        found = list(_grown(template, effort.elements, generator))
        if found:
            remark = f"sizes grown from {sample}; give different sizes with `sizes=` or `samples=`"
            return [*_tiny(own), *_numbered(found)], [remark]
    every = [SizedCall(_label({}, each), {}, each) for each in own if elements(each.flat)]
    return [*_tiny(own), *_numbered(every)], [
        "measured on its own samples, which are small and cannot be grown; give larger samples with "
        "`samples=`"
    ]


def _grown(template: Template, targets: Sequence[int], generator: torch.Generator) -> Iterator[SizedCall]:
    """Yield a call with about each of these numbers of elements, grown from a sample."""
    for letters in grow(template, targets):
        again = _sample(template, template.values(letters), generator)
        sizes = {} if template.shapes is None else shown_letters(letters)
        smaller = partial(_smaller, template, generator, elements(again.flat))
        yield SizedCall(_label(sizes, again), sizes, again, smaller=smaller)


def _smaller(template: Template, generator: torch.Generator, most: int, target: int) -> SizedCall | None:
    """Return the call of a sample with about this many elements; None if that is not fewer."""
    found = next(_grown(template, [target], generator), None)
    return found if found is not None and elements(found.sample.flat) < most else None


def _sample(template: Template, values: Sequence[Any], generator: torch.Generator) -> Sample:
    try:
        filled = tuple(template.filled(values, generator))
    except (RuntimeError, MemoryError) as error:  # as torch's allocator raises
        shapes = [list(each.shape) for each in values if isinstance(each, Tensor)]
        raise _too_large(", ".join(map(str, shapes)), error) from error
    return Sample(template.sample.position, template.sample.flattening, filled)


def _too_large(sizes: str, error: Exception) -> errors.UsageError:
    return errors.UsageError(
        "the arguments of a size cannot be made",
        argument="sizes",
        expected="sizes whose tensors fit into memory",
        got=f"{sizes}: {str(error).strip().partition(chr(10))[0]}",
        hint="give smaller sizes",
    )


def _tiny(own: Sequence[Sample]) -> list[SizedCall]:
    """Return the smallest sample, whose time is the overhead of a call."""
    some = sorted((each for each in own if usable(each)), key=lambda each: elements(each.flat))
    some = [each for each in some if elements(each.flat) <= TINY]
    return [SizedCall(f"a call, {_label({}, some[0])}", {}, some[0], "call")] if some else []


def _numbered(sizes: list[SizedCall]) -> list[SizedCall]:
    """Sort sizes, and make their labels distinct."""
    ordered = sorted(sizes, key=lambda each: elements(each.sample.flat))
    labels = [each.label for each in ordered]
    return [
        replace(each, label=f"{each.label} ({labels[:at].count(each.label) + 1})")
        if labels.count(each.label) > 1
        else each
        for at, each in enumerate(ordered)
    ]


def _label(sizes: Mapping[str, int], sample: Sample) -> str:
    return _shown_sizes(sizes) if sizes else ", ".join(argument_texts(sample.labels, sample.flat))


def _shown_sizes(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def argument_texts(labels: Sequence[str], values: Sequence[Any]) -> list[str]:
    """Describe each argument; a tensor's dtype is shown unless it is the floating dtype of the case.

    Example:
        >>> argument_texts(["x", "at", "by"], [torch.ones(2, 3), torch.arange(2), 2.0])
        ['x [2, 3]', 'at [2] int64', 'by=2.0']
    """
    return [
        f"{label} {list(value.shape)}{_kind(value)}" if isinstance(value, Tensor) else f"{label}={value!r}"
        for label, value in zip(labels, values, strict=True)
        if not isinstance(value, torch.Generator)
    ]


def _kind(tensor: Tensor) -> str:
    """Name a dtype that is not floating; a complex dtype has the precision of the case."""
    if tensor.is_complex():
        return " complex"
    return "" if tensor.is_floating_point() else f" {str(tensor.dtype).removeprefix('torch.')}"


def arguments_on(sample: Sample, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Copy the flat arguments of a sample to a device, and convert floating tensors to this dtype."""
    return [replica(value, dtype if is_inexact(value) else None, device) for value in sample.flat]
