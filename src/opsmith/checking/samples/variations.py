"""Variations: more inputs derived from the author's samples, and empty ones that the operator fails on.

Every variation is a sample with one thing changed, and the operator's reference decides whether it is valid.
One for which the reference raises, warns, or returns values that are not finite is listed as rejected, and is
not a fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import (
    Overlooking,
    attribute_exception,
    named_by,
    refuse_own,
    structure_of,
)
from opsmith.checking.output.replay import replay, target_of
from opsmith.checking.property import first_line, innermost
from opsmith.checking.report import Failure
from opsmith.checking.samples.argument_values import argument_values
from opsmith.checking.samples.batches import all_finite
from opsmith.checking.samples.cases import refuse_unfit_results
from opsmith.checking.samples.linked_sizes import Symbol, is_batch_like, sizes_of
from opsmith.checking.samples.linked_values import links_of, relinked
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.samples.variation_kinds import KINDS, Variation
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.torch_library.torch_messages import UNSUPPORTED_SIZE, has_message

MOST_ELEMENTS = 2000
"""Largest number of elements of a variation, unless its sample has more."""

MOST_RESULTS = 20_000
"""Largest number of elements of its results."""


@dataclass(frozen=True)
class Variations:
    """Inputs that were derived from the author's samples.

    Args:
        samples: Accepted ones; their positions follow those of the author's samples.
        rejected: Rejected ones, each with the reason.
        unserved: Empty inputs that an operator fails on without refusing them.
    """

    samples: tuple[Sample, ...]
    rejected: tuple[str, ...]
    unserved: tuple[UnhandledEmptyInput, ...] = ()


def variations(subject: Subject) -> Variations:
    """Derive more inputs from the samples, the same for the same seed.

    They are taken from each kind in turn (sizes, empties, values, ...), up to the limit of the effort for the
    samples of each rank: a dimension that only some have is reached, too. Then come values of other arguments
    than tensors that no sample shows, each once, up to a limit of their own.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> print(variations(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])).samples[1])
        sample 6 (x [0, 5]; sample 0 with `x.shape[0]` at 0 where it had 3)
    """
    refuse_unfit_results(subject)
    effort, trial = subject.effort, _Trial(subject)
    for dims in dict.fromkeys(sample.dims for sample in subject.samples):
        trial.begin(effort.variations)
        for change in _in_turn(subject, [sample for sample in subject.samples if sample.dims == dims]):
            if not trial.left:
                break
            trial.accepts(change)
    trial.begin(effort.argument_values)
    for several in argument_values(subject):
        for change in several[: max(MOST_SAMPLES, effort.samples)]:
            taken = trial.left and trial.accepts(change)
            if taken and not effort.exhaustive:
                break
    return Variations(tuple(trial.accepted), tuple(trial.rejected), tuple(trial.faults.values()))


MOST_SAMPLES = 3
"""Most samples in which a value is tried until the reference takes it."""


@dataclass
class _Trial:
    """Variations that were tried so far.

    Attributes:
        subject: The subject of the check.
        accepted: Accepted ones.
        rejected: Rejected ones that are reported, each with the reason.
        faults: Empty inputs that the operator fails on, by the size.
    """

    subject: Subject
    accepted: list[Sample] = field(default_factory=list)
    rejected: dict[str, None] = field(default_factory=dict)
    faults: dict[str, UnhandledEmptyInput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        subject = self.subject
        self.begin(0)
        self._seen, self._links = {form_of(sample) for sample in subject.samples}, links_of(subject.samples)
        self._first = len(subject.samples) + len(subject.dropped)

    def begin(self, limit: int) -> None:
        """Allow so many more to be accepted, with four attempts for each."""
        self._room, self._attempts = limit, 4 * limit

    @property
    def left(self) -> bool:
        """True if more may be tried."""
        return self._room > 0 and self._attempts > 0

    def accepts(self, change: Variation) -> bool:
        """Try a variation; return True if the reference takes it."""
        sample = change.sample(self._first + len(self.accepted))
        sample = replace(sample, flat=tuple(relinked(self._links, sample.labels, sample.flat)))
        form = form_of(sample)
        too_large = sample.elements > max(MOST_ELEMENTS, change.of.elements)
        if too_large or (form in self._seen and not change.fresh_numbers):
            return False
        self._attempts -= 1
        reason = refusal(self.subject, sample, change)
        if reason is None:
            self.accepted.append(sample)
            self._room -= 1
            self._seen.add(form)
            return True
        if isinstance(reason, UnhandledEmptyInput):
            self.faults.setdefault(reason.symbol.name, reason)
        elif not change.silent:
            self.rejected[f"{change.origin}: {reason}"] = None
        return False


def _in_turn(subject: Subject, samples: Sequence[Sample]) -> Iterator[Variation]:
    """Yield one variation of each kind, then the next of each, over samples in turn."""
    kinds = [
        _woven([kind(subject, sample, _generator(subject, at, sample)) for sample in samples])
        for at, kind in enumerate(KINDS)
    ]
    return _woven(kinds)


def _woven(several: Sequence[Iterator[Variation]]) -> Iterator[Variation]:
    for turn in zip_longest(*several):
        yield from (change for change in turn if change is not None)


def _generator(subject: Subject, kind: int, sample: Sample) -> torch.Generator:
    """Return a generator that is independent of the number of variations of other kinds."""
    return torch.Generator().manual_seed((subject.seed * 1009 + kind) * 1009 + sample.position)


def form_of(sample: Sample) -> tuple[Any, ...]:
    """Return what distinguishes variations: shapes, dtypes, and values of other arguments."""
    return tuple(
        (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)
        for value in sample.flat
    )


def refusal(subject: Subject, sample: Sample, change: Variation) -> str | UnhandledEmptyInput | None:
    """Return the reason why the reference rejects a variation; None where it accepts it."""
    for dtype in (torch.float64, None):  # a class may accept only the sample's own dtype
        try:
            before, known = _warned(subject, change.of, dtype)
        except Exception as error:
            refuse_own(error)
            continue  # reported by the properties
        try:
            after, warned = _warned(subject, sample, dtype)
        except Exception as error:
            refuse_own(error)
            if isinstance(error, errors.OpsmithError) and named_by(error).cause != "raises":
                return None  # its author refuses nothing: it breaks a rule, which the properties report
            fault = unhandled_empty_input(subject, change, sample, error, dtype)
            return fault or f"{type(error).__name__}: {first_line(error)}"
        if _kinds(after) != _kinds(before) and subject.specification.schema.always_tensors:
            return f"it returns {_kinds(after)}, where its declaration says {_kinds(before)}"
        if not subject.draws and drawing_operations(subject, sample):
            return "it draws random numbers, which no sample does"
        results = [each for each in after if isinstance(each, Tensor)]
        if sum(each.numel() for each in results) > MOST_RESULTS:
            return f"its results have more than {MOST_RESULTS} elements"
        if all_finite(before) and not all_finite(after):
            return "its results are not finite"
        return next((f"it warns: {text}" for text in warned if text not in known), None)
    return "the reference does not take the sample itself"


def stands_alone(subject: Subject, sample: Sample, symbol: Symbol) -> bool:
    """Return True if each place of a dimension stands for itself, also beside outlying numbers."""
    samples = [sample, *(_outlying(sample, symbol, factor) for factor in FAR)]
    return all(is_batch_like(subject, sizes_of(subject, each), symbol) for each in samples)


def _kinds(results: Sequence[Any]) -> str:
    """Form of what a call returned, without the numbers."""
    tensors = sum(isinstance(each, Tensor) for each in results)
    others = [structure_of(each) for each in results if not isinstance(each, Tensor)]
    return ", ".join([f"{tensors} tensor{'s' * (tensors != 1)}", *others])


def _warned(subject: Subject, sample: Sample, dtype: torch.dtype | None) -> tuple[Sequence[Any], list[str]]:
    """Run the reference; return its results and the texts of its warnings."""
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = subject.reference(sample, sample.at(dtype))
    return results, [str(each.message).splitlines()[0] for each in caught]


FAR = (-30.0, 30.0)
"""Factors that make outlying numbers."""


@dataclass(frozen=True)
class UnhandledEmptyInput:
    """An empty input for which an operator fails although there is nothing to compute.

    Args:
        sample: The input.
        symbol: The size that is 0 in it.
        raised: Name of the exception, and its message.
        where: Location, `file:line`, of the exception.
    """

    sample: Sample
    symbol: Symbol
    raised: tuple[str, str]
    where: str


def unhandled_empty_input(
    subject: Subject, change: Variation, sample: Sample, error: Exception, dtype: torch.dtype | None
) -> UnhandledEmptyInput | None:
    """Return the fault if an empty input with empty results is not refused.

    An error raised by the operator's own code refuses the input. The results are empty if the dimension is
    batch-like: a reduction over it, such as a mean or a maximum, may have no result for no elements.

    Args:
        subject: The checked operator.
        change: The variation.
        sample: The input.
        error: Exception of the operator.
        dtype: dtype of floating tensors.
    """
    symbol = change.without
    if symbol is None or subject.kind.has_reference:
        return None
    refused = isinstance(error, RuntimeError) and has_message(error, UNSUPPORTED_SIZE)
    refused = refused or isinstance(error, NotImplementedError)
    if refused or attribute_exception(error, lambda: subject.reference(sample, sample.at(dtype))):
        return None
    if subject.kind.own_forward and _has_form(subject, sample, dtype):
        return None
    if not stands_alone(subject, change.of, symbol):
        return None
    raised = (type(error).__name__, first_line(error))
    return UnhandledEmptyInput(sample, symbol, raised, innermost(error, subject.specification.where))


def _has_form(subject: Subject, sample: Sample, dtype: torch.dtype | None) -> bool:
    """Return True if torch can infer the results: then it means to support the input, and a library fails.

    An example is a Fourier transform of no rows.
    """
    with Overlooking(), torch.no_grad():
        subject.reference(sample, sample.at(dtype, torch.device("meta")))
        return True
    return False


def _outlying(sample: Sample, symbol: Symbol, factor: float) -> Sample:
    """Return the sample with outlying numbers at the last index of a dimension."""
    flat = sample.at()
    for location in symbol.locations:
        if is_inexact(flat[location.argnum]) and symbol.size:
            other = flat[location.argnum].clone(memory_format=torch.contiguous_format)
            other.narrow(location.index, symbol.size - 1, 1).mul_(factor)
            flat[location.argnum] = other
    return replace(sample, flat=tuple(flat))


def failure_of(property: str, subject: Subject, found: UnhandledEmptyInput) -> Failure:
    """Make the failure of the fault.

    Args:
        property: Name of the property.
        subject: The checked operator.
        found: The fault.
    """
    sample, symbol = found.sample, found.symbol
    argnum = symbol.locations[0].argnum
    name, shape = sample.labels[argnum], list(sample.flat[argnum].shape)
    target = target_of(subject)
    script = None
    if target is not None:
        script = replay(subject, sample, sample.at(), [target.call(sample)], property=property)
    return Failure(
        property,
        name,
        "empty",
        f"it fails where `{name}` has the shape {shape}: {': '.join(found.raised).rstrip('.')}. Each place "
        f"of `{symbol.name}` stands for itself, so without any there is nothing to compute: return results "
        "without elements, or raise an error that says what is expected",
        found.where,
        {"sample": str(sample), "exception": found.raised[0]},
        script,
        given="undeclared",
    )
