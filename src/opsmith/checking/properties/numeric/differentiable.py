"""Inputs of a sample that have a gradient to check, and the reasons why others have none."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opsmith.checking.calls import Differentiated, differentiated, rule_location
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import has_gradient
from opsmith.checking.property import Findings, Note
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula
from opsmith.judging.tensors import is_inexact


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


def each_differentiated(subject: Subject) -> Iterator[tuple[Sample, Differentiated]]:
    """Yield each sample with the inputs that it differentiates; what a call raises is reported elsewhere."""
    for sample in subject.samples:
        with Overlooking():
            yield sample, differentiated(subject, sample)


def differentiated_names(subject: Subject) -> set[str]:
    """Inputs that some sample differentiates."""
    pairs = each_differentiated(subject)
    return {sample.names[argnum] for sample, inputs in pairs for argnum in inputs.argnums}


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


def lacks_floats(subject: Subject) -> bool:
    """True if no sample has a floating tensor with elements, so that no gradient has any."""
    return not any(sample.flat[argnum].numel() for sample in subject.samples for argnum in sample.inexact)
