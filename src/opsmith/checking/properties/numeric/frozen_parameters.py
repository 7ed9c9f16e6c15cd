"""Parameters that a call reaches through an object, such as a module: frozen or not, all else is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.calls import CallValues, SampleRun, copies, differentiated, live_call
from opsmith.checking.exceptions import refuse_own
from opsmith.checking.numerics.compare import describe_difference, differ_beyond_rounding
from opsmith.checking.property import Findings, each_sample, first_line, innermost
from opsmith.checking.report import Failure
from opsmith.checking.samples.object_arguments import address_of, copied_object, tensors_of_object
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject

MOST = 8
"""Largest number of parameters that are frozen one by one."""


def frozen_parameters(property: str, subject: Subject) -> Findings:
    """Freeze parameters within the objects of each sample, and compare results and gradients.

    Args:
        property: Name of the property that reports.
        subject: The subject of the check.
    """
    own = tuple(each for each in subject.samples if each.objects and not each.origin)
    yield from each_sample(property, partial(_sample, property), replace(subject, samples=own))


@dataclass(frozen=True)
class Choice:
    """A choice of the parameters that require a gradient.

    Args:
        words: Description, for messages.
        needs: The flag of each parameter that is changed, by position of the object and name in it.
    """

    words: str
    needs: dict[tuple[int, str], bool]

    def applied(self, sample: Sample) -> Sample:
        """Return the sample with copies of its objects in which this choice is made."""
        flat = list(sample.flat)
        for argnum in sample.objects:
            flat[argnum] = copied_object(flat[argnum], None, None)
            if flat[argnum] is not sample.flat[argnum]:
                for name, tensor in tensors_of_object(flat[argnum]).items():
                    tensor.requires_grad_(self.needs.get((argnum, name), tensor.requires_grad))
        return replace(sample, flat=tuple(flat))


def _choices(sample: Sample) -> Iterator[Choice]:
    """Yield each parameter frozen alone, then all of them, and all that were frozen as they would train."""
    given = {address_of(value) for value in sample.flat if isinstance(value, Tensor)}  # as of checkpoints
    leaves = {
        (argnum, name): tensor.requires_grad
        for argnum, value in sample.objects.items()
        for name, tensor in tensors_of_object(value).items()
        if tensor.is_leaf and is_inexact(tensor) and address_of(tensor) not in given
    }
    trained = [key for key, needs in leaves.items() if needs]
    labels = sample.labels
    if len(trained) > 1:
        for argnum, name in trained[:MOST]:
            yield Choice(f"`{name}` of `{labels[argnum]}` requires no gradient", {(argnum, name): False})
    if trained:
        names = " and ".join(dict.fromkeys(f"`{labels[argnum]}`" for argnum, _ in trained))
        yield Choice(f"no parameter of {names} requires a gradient", dict.fromkeys(trained, False))
    frozen = [
        (argnum, name)
        for argnum, value in sample.objects.items()
        for name in _frozen(value)
        if (argnum, name) in leaves
    ]
    if frozen:
        names = " and ".join(dict.fromkeys(f"`{labels[argnum]}`" for argnum, _ in frozen))
        yield Choice(f"every parameter of {names} requires a gradient", dict.fromkeys(frozen, True))


def _frozen(value: object) -> list[str]:
    named = tensors_of_object(value)
    return [
        name
        for name, tensor in named.items()
        if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
    ]


def _sample(property: str, subject: Subject, sample: Sample) -> Findings:
    every = differentiated(subject, sample)
    for argnums in [*reversed([*every.subsets()]), ()]:
        given = _values(subject, sample, argnums)
        for choice in _choices(sample):
            failure = _compared(property, subject, sample, argnums, given, choice)
            if failure is not None:
                yield failure
                return  # the other choices would report the same


def _compared(
    property: str,
    subject: Subject,
    sample: Sample,
    argnums: tuple[int, ...],
    given: CallValues,
    choice: Choice,
) -> Failure | None:
    run = SampleRun(subject, sample, argnums, subject.devices[0])
    alone = "" if argnums else ", nor any input"
    when = f"where {choice.words}{alone}"
    hint = "what a call gives must not depend on them: read `requires_grad` of each before differentiating"
    evidence = {"sample": str(sample)}
    try:
        found = _values(subject, choice.applied(sample), argnums)
    except Exception as error:
        refuse_own(error)
        message = f"{when}, it raises {type(error).__name__}: {first_line(error)}; else it does not; {hint}"
        where = innermost(error, run.backward_location() if argnums else subject.specification.where)
        return Failure(property, None, "input-needs-grad", message, where, evidence)
    for named, one, other in zip(run.names(), given.tensors, found.tensors, strict=False):
        if differ_beyond_rounding(one, other):
            message = f"{named} is another one {when}: {describe_difference(one, other)}; {hint}"
            return Failure(property, named.name, "input-needs-grad", message, named.where, evidence)
    return None


def _values(subject: Subject, sample: Sample, argnums: tuple[int, ...]) -> CallValues:
    call = live_call(subject, sample, sample.at(), argnums)
    return call.values() if argnums else CallValues(copies(call.results))
