"""Inputs without elements that an operator fails at, without a word of its own that it does not take them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from opsmith.checking.exceptions import Overlooking, own_words
from opsmith.checking.output.calling import calling
from opsmith.checking.output.replay import replay
from opsmith.checking.property import first_line, innermost
from opsmith.checking.report import Failure
from opsmith.checking.samples.dimensions import Symbol, free, sizes_of
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.samples.variation_kinds import Change
from opsmith.checking.subject import Subject

UNSUPPORTED = "not supported"
"""What torch says, by RuntimeError, of what it does not do for tensors of such sizes, as a convolution of no
groups. Python says it as well, by TypeError: of a comparison with None, for one."""


FAR = (-30.0, 30.0)


@dataclass(frozen=True)
class Unserved:
    """An input without elements for which an operator has nothing to compute, and fails.

    Args:
        sample: The input.
        symbol: The size that is 0 in it.
        raised: Name of what is raised, and what it says.
        where: `file:line` of what raises it.
    """

    sample: Sample
    symbol: Symbol
    raised: tuple[str, str]
    where: str


def unserved(
    subject: Subject, change: Change, sample: Sample, error: Exception, dtype: torch.dtype | None
) -> Unserved | None:
    """The fault, where nobody refuses an input that has results without elements.

    Whoever raises an error of its own refuses it. The results are without elements if each place of the
    dimension stands for itself, as in a batch: what looks at all of it, as a mean does or the largest of a
    row, may have no answer where there is nothing.

    Args:
        subject: What is under check.
        change: What was changed.
        sample: The input.
        error: What the operator raises for it.
        dtype: dtype of floating tensors.
    """
    symbol = change.without
    if symbol is None or not (subject.own_code or subject.foreign):
        return None
    refused = isinstance(error, RuntimeError) and UNSUPPORTED in str(error)
    refused = refused or isinstance(error, NotImplementedError)
    if refused or own_words(error, lambda: subject.reference(sample, sample.at(dtype))):
        return None
    if subject.own_code and _has_form(subject, sample, dtype):
        return None
    samples = [change.of, *(_outlying(change.of, symbol, factor) for factor in FAR)]
    if not all(free(subject, sizes_of(subject, each), symbol) for each in samples):
        return None
    raised = (type(error).__name__, first_line(error))
    return Unserved(sample, symbol, raised, innermost(error, subject.specification.where))


def _has_form(subject: Subject, sample: Sample, dtype: torch.dtype | None) -> bool:
    """Whether torch knows the form of the results: then it means to serve it, and a library of its own fails.

    A Fourier transform of no rows is so.
    """
    with Overlooking(), torch.no_grad():
        subject.reference(sample, sample.at(dtype, torch.device("meta")))
        return True
    return False


def _outlying(sample: Sample, symbol: Symbol, factor: float) -> Sample:
    """The sample with numbers far off in the last place of a dimension: others show whether they see it."""
    flat = sample.at()
    for spot in symbol.spots:
        if is_inexact(flat[spot.place]) and symbol.size:
            other = flat[spot.place].clone(memory_format=torch.contiguous_format)
            other.narrow(spot.index, symbol.size - 1, 1).mul_(factor)
            flat[spot.place] = other
    return replace(sample, flat=tuple(flat))


def failure_of(check: str, subject: Subject, found: Unserved) -> Failure:
    """The failure for it.

    Args:
        check: Name of the property.
        subject: What is under check.
        found: The input.
    """
    sample, symbol = found.sample, found.symbol
    place = symbol.spots[0].place
    name, shape = sample.labels[place], list(sample.flat[place].shape)
    called = calling(subject)
    script = None
    if called is not None:
        script = replay(subject, sample, sample.at(), [called.call(sample)], check=check)
    return Failure(
        check,
        name,
        "empty",
        f"it fails where `{name}` has the shape {shape}: {': '.join(found.raised).rstrip('.')}. Each place "
        f"of `{symbol.name}` stands for itself, so without any there is nothing to compute: return results "
        "without elements, or raise an error that says what is expected",
        found.where,
        {"sample": str(sample), "exception": found.raised[0]},
        script,
    )
