"""Inputs of a sample that have a gradient to check, and the reasons why others have none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated, rule_location
from opsmith.checking.exceptions import Overlooking, first_line, raised_within
from opsmith.checking.numerics.autodiff import has_gradient
from opsmith.checking.property import Coverage, Findings, Note, Skipped, covered_samples
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula
from opsmith.judging.tensors import is_inexact
from opsmith.torch_library.torch_messages import NO_DERIVATIVE, has_message


def given_instead(subject: Subject, sample: Sample) -> dict[str, str]:
    """Inputs with a formula that a sample does not differentiate, and what it gives instead."""
    inexact = {sample.names[argnum] for argnum in sample.inexact}
    rules = subject.specification.gradients.rules
    instead: dict[str, str] = {}
    for name, value in zip(sample.names, sample.flat, strict=True):
        if isinstance(rules.get(name), Formula) and name not in inexact:
            instead[name] = str(value.dtype) if isinstance(value, Tensor) else repr(value)
    empty = [name for name, rule in rules.items() if isinstance(rule, Formula) and name not in sample.names]
    return {**instead, **dict.fromkeys(empty, "an empty list")}


def differentiated_names(subject: Subject) -> set[str]:
    """Inputs that some sample differentiates."""
    found: set[str] = set()
    for sample in subject.samples:
        with Overlooking():  # what a call raises is reported
            found.update(sample.names[argnum] for argnum in differentiated(subject, sample).argnums)
    return found


def not_exercised(property: str, subject: Subject, what: str) -> Findings:
    """Report inputs with a formula that no sample differentiates."""
    instead: dict[str, str] = {}
    for sample in subject.samples:
        instead |= given_instead(subject, sample)
    exercised = differentiated_names(subject)
    for name, given in instead.items():
        whole = given.startswith("torch.") and "float" not in given and "complex" not in given
        if name in exercised:
            continue
        if subject.specification.origin.kind == "class" and whole:  # which annotates every tensor alike
            yield Note(f"no sample differentiates `{name}`, which is {given}")
            continue
        message = (
            f"no sample differentiates `{name}`, so its {what} is not checked: expected a floating tensor in "
            f"at least one sample, got {given}"
        )
        yield Failure(property, name, "not-exercised", message, rule_location(subject, name))


def nothing_to_differentiate(subject: Subject) -> bool:
    """True if no result requires a gradient in any sample, though every floating input does."""
    for sample in subject.samples:
        flat = [value.requires_grad_() if is_inexact(value) else value for value in sample.in_double()]
        with torch.enable_grad():
            if any(map(has_gradient, tensors_in(subject.call(sample, flat)))):
                return False
    return True


def promises_gradients(subject: Subject) -> bool:
    """True if the author wrote a gradient: the backward of a class, or one registered with torch."""
    return subject.specification.origin.own("gradient") is not None


def lacks_floats(subject: Subject) -> bool:
    """True if no sample has a floating tensor with elements, so that no gradient has any."""
    return not any(sample.flat[argnum].numel() for sample in subject.samples for argnum in sample.inexact)


SubsetCheck = Callable[[Subject, Sample, tuple[int, ...], tuple[int, ...]], Findings]


def each_subset(name: str, check_subset: SubsetCheck, subject: Subject) -> Findings:
    """Run a function on every sample, by all inputs together and by each alone.

    A refused derivative (a formula declared as not implemented, an operation without forward mode, a backward
    marked with `once_differentiable`) is not a failure; its reason is reported.

    Args:
        name: Name of the property.
        subject: The subject of the check.
        check_subset: Takes the subject, a sample, the inputs to differentiate by, and those found right
            together, if those are among them. It yields `Skipped` with the reason if it compares nothing,
            which is not a pass.
    """

    def each(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
        inputs, refused = differentiated(subject, sample), coverage.refused
        refused.update(dict.fromkeys(inputs.refused.values()))
        right: tuple[int, ...] = ()
        for subset in reversed([*inputs.subsets()]):
            known = right if {*subset} <= {*right} else ()  # all together may be refused, and some alone not
            try:
                found = [*check_subset(subject, sample, subset, known)]
            except Exception as error:
                if not refuses(error):
                    raise
                refused[first_line(error)] = None
                continue
            reasons = [finding.reason for finding in found if isinstance(finding, Skipped)]
            refused.update(dict.fromkeys(reasons))
            coverage.ran += not (reasons or known)  # a comparison with `known` alone does not count
            yield from (finding for finding in found if not isinstance(finding, Skipped))
            if any(isinstance(finding, Failure) for finding in found):
                return  # the other subsets of this sample would report the same
            right = right or subset

    yield from covered_samples(name, each, "there is nothing to differentiate", subject)


def refuses(error: Exception) -> bool:
    """True if an exception refuses a derivative on purpose."""
    by_torch = isinstance(error, RuntimeError) and has_message(error, NO_DERIVATIVE)
    return (by_torch and not raised_within(error)) or isinstance(error, NotImplementedError)
