"""Variations: more inputs derived from the author's samples, and empty inputs on which the operator fails.

Every variation is a sample with one thing changed, and the operator's reference decides if it is valid. If
the reference raises, warns, or returns values that are not finite, the variation is listed as rejected, and
is no fault.
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
    error_words,
    first_line,
    named_by,
    refuse_own,
    structure_of,
)
from opsmith.checking.output.replay import replay, target_of
from opsmith.checking.report import Failure
from opsmith.checking.samples.argument_values import argument_values
from opsmith.checking.samples.batches import all_finite
from opsmith.checking.samples.cases import refuse_unfit_results
from opsmith.checking.samples.domain import is_batch_like, sizes_of
from opsmith.checking.samples.sample import Sample, Symbol, Variation
from opsmith.checking.samples.variation_kinds import KINDS
from opsmith.checking.subject import Subject, drawing_operations
from opsmith.core.location import innermost
from opsmith.judging.tensors import is_inexact
from opsmith.torch_library.torch_messages import UNSUPPORTED_SIZE, has_message

MOST_ELEMENTS = 2000
"""Maximum number of elements of a variation, unless its sample has more."""

MOST_RESULTS = 20_000
"""Maximum number of elements of its results."""

MOST_SAMPLES = 3
"""Maximum number of samples in which a value is tried until the reference takes it."""


@dataclass(frozen=True)
class Variations:
    """Inputs that were derived from the author's samples.

    Args:
        samples: Accepted inputs; their positions follow the author's samples.
        rejected: Rejected inputs, each with the reason.
        unserved: A failure of the property `forward` for each size of 0 for which the operator fails without
            refusing it, although there is nothing to compute.
    """

    samples: tuple[Sample, ...] = ()
    rejected: tuple[str, ...] = ()
    unserved: tuple[Failure, ...] = ()


def variations(subject: Subject) -> Variations:
    """Derive more inputs from the samples; the same seed derives the same inputs.

    They are taken from each kind in turn (sizes, empties, values, ...), up to the limit of the effort for the
    samples of each rank, so that a dimension that only some samples have is reached, too. Then come values
    that no sample shows of arguments that are not tensors, each once, up to a separate limit.

    Example:
        >>> import opsmith.ops
        >>> from opsmith.checking.effort import EFFORTS
        >>> from opsmith.checking.subject_kinds import subject_of
        >>> print(variations(subject_of(opsmith.ops.exp, None, 0, EFFORTS["quick"])).samples[1])
        sample 6 (x [0, 5]; sample 0 with `x.shape[0]` = 0 instead of 3)
    """
    refuse_unfit_results(subject)
    effort, trial = subject.effort, _Trial(subject)
    for dims in dict.fromkeys(sample.dims for sample in subject.samples):
        changes = _in_turn(subject, [sample for sample in subject.samples if sample.dims == dims])
        trial.accept(effort.variations, ([change] for change in changes))
    most = max(MOST_SAMPLES, effort.samples)
    trial.accept(effort.argument_values, (several[:most] for several in argument_values(subject)))
    return Variations(tuple(trial.usable()), tuple(trial.rejected), tuple(trial.faults.values()))


@dataclass
class _Trial:
    """Variations that were tried so far.

    Attributes:
        subject: The subject of the check.
        accepted: Accepted variations.
        rejected: Rejected variations to report, each with the reason.
        faults: Failures for empty inputs, by the size.
        unusable: Number of inputs whose drawn numbers the reference does not take.
    """

    subject: Subject
    accepted: list[Sample] = field(default_factory=list)
    rejected: dict[str, None] = field(default_factory=dict)
    faults: dict[str, Failure] = field(default_factory=dict)
    unusable: int = 0

    def __post_init__(self) -> None:
        self._seen = {form_of(sample) for sample in self.subject.samples}
        self._first = len(self.subject.samples) + len(self.subject.dropped)

    def accept(self, limit: int, choices: Iterator[Sequence[Variation]]) -> None:
        """Accept a limited number of variations, with four attempts for each.

        Args:
            limit: Maximum number of variations to accept.
            choices: Lists of variations; of each list, the first that the reference takes is accepted, or all
                of them if the effort is exhaustive.
        """
        enough, attempts = len(self.accepted) + limit, 4 * limit
        for several in choices:
            for change in several:
                if len(self.accepted) >= enough or attempts <= 0:
                    return
                sample = change.sample(self._first + len(self.accepted))
                form = form_of(sample)
                too_large = sample.elements > max(MOST_ELEMENTS, change.of.elements)
                if too_large or (form in self._seen and not change.fresh_numbers):
                    continue
                attempts -= 1
                reason = refusal(self.subject, sample, change)
                if isinstance(reason, str) and (reason == NOT_FINITE or change.fresh_numbers):
                    self.unusable += change.is_drawn
                if isinstance(reason, Failure) and change.without is not None:
                    self.faults.setdefault(change.without.name, reason)
                elif reason is not None and not change.silent:
                    self.rejected[f"{change.origin}: {reason}"] = None
                elif reason is None:
                    self.accepted.append(sample)
                    self._seen.add(form)
                    if not self.subject.effort.exhaustive:
                        break

    def usable(self) -> list[Sample]:
        """The accepted variations; drawn ones are strained if the reference rejects most drawn numbers."""
        strained = [_strained(each) for each in self.accepted]
        few = self.unusable > sum(now is not had for now, had in zip(strained, self.accepted, strict=True))
        return strained if few else self.accepted


def _strained(sample: Sample) -> Sample:
    """The sample, strained if its numbers were drawn."""
    change = sample.change
    if change is None or not change.is_drawn:
        return sample
    return replace(sample, change=replace(change, given="strained"))


NOT_FINITE = "its results are not finite"


def _in_turn(subject: Subject, samples: Sequence[Sample]) -> Iterator[Variation]:
    """Yield one variation of each kind, then the next of each kind, over the samples in turn.

    The numbers of a variation do not depend on the number of variations of other kinds.
    """
    every = [sizes_of(subject, sample) for sample in samples]

    def generator(at: int, sample: Sample) -> torch.Generator:
        return torch.Generator().manual_seed((subject.seed * 1009 + at) * 1009 + sample.position)

    def woven(several: Sequence[Iterator[Variation]]) -> Iterator[Variation]:
        for turn in zip_longest(*several):
            yield from (change for change in turn if change is not None)

    kinds = [[kind(each, generator(at, each.sample)) for each in every] for at, kind in enumerate(KINDS)]
    return woven([*map(woven, kinds)])


def form_of(sample: Sample) -> tuple[Any, ...]:
    """Return the key that distinguishes variations: shapes, dtypes, and values of other arguments."""
    return tuple(
        (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else repr(value)
        for value in sample.flat
    )


def refusal(subject: Subject, sample: Sample, change: Variation) -> str | Failure | None:
    """Return the reason why the reference rejects a variation, or the fault; None if it is accepted."""
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
                return None  # its author does not refuse it; it breaks a rule, which the properties report
            fault = _unserved(subject, change, sample, error, dtype)
            return fault or error_words(error)
        if _kinds(after) != _kinds(before) and subject.specification.schema.always_tensors:
            return f"it returns {_kinds(after)}, but its declaration says {_kinds(before)}"
        if not (subject.draws or all(own for _, own in drawing_operations(subject, sample))):
            return "it draws random numbers, but the samples draw none"
        if sum(each.numel() for each in after if isinstance(each, Tensor)) > MOST_RESULTS:
            return f"its results have more than {MOST_RESULTS} elements"
        had_nan, has_nan = (any(map(_has_nan, results)) for results in (before, after))
        if (all_finite(before) and not all_finite(after)) or (has_nan and not had_nan):
            return NOT_FINITE
        return next((f"it warns: {text}" for text in warned if text not in known), None)
    return "the reference does not take the sample itself"


def _has_nan(value: Any) -> bool:
    return is_inexact(value) and bool(value.isnan().any())


def _kinds(results: Sequence[Any]) -> str:
    """Form of a call's results, without the numbers."""
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
"""Factors that make numbers outliers."""


def stands_alone(subject: Subject, sample: Sample, symbol: Symbol) -> bool:
    """Return True if each index of a dimension is computed independently, also next to outliers."""
    samples = [sample, *(_outlying(sample, symbol, factor) for factor in FAR)]
    return all(is_batch_like(subject, each, symbol) for each in samples)


def _outlying(sample: Sample, symbol: Symbol, factor: float) -> Sample:
    """Return the sample with outliers at the last index of a dimension."""
    flat = sample.at()
    for location in symbol.locations:
        if is_inexact(flat[location.argnum]) and symbol.size:
            other = flat[location.argnum].clone(memory_format=torch.contiguous_format)
            other.narrow(location.index, symbol.size - 1, 1).mul_(factor)
            flat[location.argnum] = other
    return replace(sample, flat=tuple(flat))


def _unserved(
    subject: Subject, change: Variation, sample: Sample, error: Exception, dtype: torch.dtype | None
) -> Failure | None:
    """Return the failure of an operator for an empty input with empty results that it does not refuse.

    An error raised by the operator's own code refuses the input. The results are empty if the dimension is
    batch-like; a reduction over it, such as a mean or a maximum, may be undefined without elements.
    """
    symbol, where = change.without, subject.specification.where
    if symbol is None or subject.kind.has_reference:
        return None
    refused = isinstance(error, RuntimeError) and has_message(error, UNSUPPORTED_SIZE)
    refused = refused or isinstance(error, NotImplementedError)
    if refused or attribute_exception(error, lambda: subject.reference(sample, sample.at(dtype))):
        return None
    if subject.kind.own_forward:
        # If torch can infer the results, it means to support the input, and a library fails, for example in a
        # Fourier transform of no rows.
        with Overlooking(), torch.no_grad():
            subject.reference(sample, sample.at(dtype, torch.device("meta")))
            return None
    if not stands_alone(subject, change.of, symbol):
        return None
    name, kind = sample.labels[symbol.locations[0].argnum], type(error).__name__
    shape = list(sample.flat[symbol.locations[0].argnum].shape)
    message = (
        f"the operator fails where `{name}` has the shape {shape}: {kind}: "
        f"{first_line(error).rstrip('.')}. Each index of `{symbol.name}` is computed alone, so there "
        "is nothing to compute for the size 0: return results without elements, or raise an error "
        "that says what is expected"
    )
    target, evidence, again = target_of(subject), {"sample": str(sample), "exception": kind}, None
    if target is not None:
        again = replay(subject, sample, sample.at(), [target.call(sample)], property="forward")
    at = innermost(error, where)
    return Failure("forward", name, "empty", message, at, evidence, again, given="undeclared")
