"""Inputs of a sample that have a gradient to check, and the reasons why others have none."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import raised_within
from opsmith.checking.numerics.autodiff import has_gradient
from opsmith.checking.property import Coverage, Findings, Note, Skipped, covered_samples, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.grad_outputs import results_with_gradient
from opsmith.checking.samples.sample import Sample, is_inexact
from opsmith.checking.subject import Subject
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula, NonDifferentiable, NotImplementedGradient
from opsmith.core.location import where
from opsmith.torch_library import capabilities
from opsmith.torch_library.torch_messages import NO_DERIVATIVE, has_message


@dataclass(frozen=True)
class Differentiated:
    """The flat arguments of a sample that gradients flow to.

    Args:
        argnums: Those to check.
        refused: The reason for each input that has no gradient to check.
    """

    argnums: tuple[int, ...]
    refused: dict[str, str]

    def subsets(self, effort: Effort | None = None) -> Iterator[tuple[int, ...]]:
        """Each input alone, then all of them together; with an effort, other choices too.

        Args:
            effort: Level of effort: every choice of up to four inputs; of more, every pair, and all but one.
                With `quick`, each alone and all.
        """
        for argnum in self.argnums:
            yield (argnum,)
        if len(self.argnums) > 1:
            yield self.argnums
        if effort is None or not effort.input_choices or len(self.argnums) < 3:
            return
        few = len(self.argnums) <= 4
        sizes = range(2, len(self.argnums)) if few else sorted({2, len(self.argnums) - 1})
        for size in sizes:
            yield from combinations(self.argnums, size)


def differentiated(subject: Subject, sample: Sample) -> Differentiated:
    """Select the inputs of a sample to differentiate by: floating tensors with a gradient, derived or given.

    There are none if no result has a dtype with gradients. A floating result without a graph still counts:
    finite differences must confirm that it is constant.
    """
    if not any(results_with_gradient(subject, sample, subject.call(sample, sample.at()))):
        return Differentiated((), {})
    rules = subject.specification.gradients
    argnums: list[int] = []
    refused: dict[str, str] = {}
    for argnum in sample.inexact:
        name = sample.names[argnum]
        rule = rules.rules.get(name)
        if isinstance(rule, NotImplementedGradient):
            refused[name] = f"the gradient of `{name}` is not implemented: {rule.reason}"
        elif subject.kind.in_library:
            if not subject.lacks("autograd"):
                argnums.append(argnum)
            else:
                refused[name] = "it has no gradient: `torch.library.register_autograd` gives it one"
        elif rule is None and subject.specification.opaque and rules.stand_in is None:
            refused[name] = (
                f"`{name}` has no gradient: the operator is opaque; write "
                f"`.gradients({name}=lambda grad: ...)`, or `{name}=opsmith.non_differentiable`"
            )
        elif not isinstance(rule, NonDifferentiable):
            argnums.append(argnum)
    return Differentiated(tuple(argnums), refused)


def _differentiates_itself(subject: Subject) -> bool:
    own = subject.specification.library_operator
    return own is not None and bool(own.autograd)


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


def not_exercised(
    property: str, subject: Subject, instead: Mapping[str, str], differentiated: Container[str], what: str
) -> Findings:
    """Report inputs with a formula that no sample differentiates.

    Args:
        property: Name of the property.
        subject: The subject of the check.
        instead: Inputs that some sample does not differentiate, and what it gives instead.
        differentiated: Inputs that some sample differentiates.
        what: Name of what is not checked.
    """
    for name, given in instead.items():
        whole = given.startswith("torch.") and "float" not in given and "complex" not in given
        if name in differentiated:
            continue
        if subject.specification.adopted is not None and whole:  # which annotates every tensor alike
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
        flat = [value.requires_grad_() if is_inexact(value) else value for value in sample.at(torch.float64)]
        with torch.enable_grad():
            if any(map(has_gradient, tensors_in(subject.call(sample, flat)))):
                return False
    return True


def promises_gradients(subject: Subject) -> bool:
    """True if the author wrote a gradient: the backward of a class, or one registered with torch."""
    adopted = subject.specification.adopted
    return (adopted is not None and adopted.backward is not None) or _differentiates_itself(subject)


def lacks_floats(subject: Subject) -> bool:
    """True if no sample has a floating tensor with elements, so that no gradient has any."""
    return not any(sample.flat[argnum].numel() for sample in subject.samples for argnum in sample.inexact)


def rule_location(subject: Subject, name: str) -> str:
    """`file:line` of what computes the gradient of an input."""
    specification = subject.specification
    rule = specification.gradients.rules.get(name)
    if isinstance(rule, Formula):
        return rule.where
    if specification.library_operator is not None and subject.kind.in_library:
        parts = capabilities.custom_parts(specification.library_operator.overload)
        return specification.where if parts is None or parts.backward is None else where(parts.backward)
    stand_in = specification.gradients.stand_in
    return where(stand_in) if stand_in is not None and rule is None else specification.where


SubsetCheck = Callable[[Subject, Sample, tuple[int, ...], tuple[int, ...]], Findings]


def each_subset(name: str, check_subset: SubsetCheck, subject: Subject) -> Findings:
    """Run a function on every sample, by all inputs together and by each alone.

    A refused derivative (a formula declared as not implemented, an operation without forward mode, a backward
    marked with `once_differentiable`) is not a failure; its reason is reported.

    Args:
        name: Name of the property.
        subject: The subject of the check.
        check_subset: Takes the subject, a sample, the inputs to differentiate by, and those found right
            together. It yields `Skipped` with the reason if it compares nothing, which is not a pass.
    """
    if subject.specification.gradients.surrogate:
        yield Skipped("the gradients are surrogates, wrong on purpose; the property `surrogate` holds them")
        return

    def each(subject: Subject, sample: Sample, coverage: Coverage) -> Findings:
        inputs, refused = differentiated(subject, sample), coverage.refused
        refused.update(dict.fromkeys(inputs.refused.values()))
        right: tuple[int, ...] = ()
        for subset in reversed([*inputs.subsets()]):
            try:
                found = [*check_subset(subject, sample, subset, right)]
            except Exception as error:
                if not refuses(error):
                    raise
                refused[first_line(error)] = None
                continue
            reasons = [finding.reason for finding in found if isinstance(finding, Skipped)]
            refused.update(dict.fromkeys(reasons))
            coverage.ran += not (reasons or right)  # a comparison with `right` alone does not count
            yield from (finding for finding in found if not isinstance(finding, Skipped))
            if any(isinstance(finding, Failure) for finding in found):
                return  # the other subsets of this sample would report the same
            right = right or subset

    yield from covered_samples(name, each, "there is nothing to differentiate", subject)


def refuses(error: Exception) -> bool:
    """True if an exception refuses a derivative on purpose."""
    by_torch = isinstance(error, RuntimeError) and has_message(error, NO_DERIVATIVE)
    return (by_torch and not raised_within(error)) or isinstance(error, NotImplementedError)
