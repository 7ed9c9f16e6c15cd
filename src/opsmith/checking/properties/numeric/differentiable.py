"""Inputs of a sample that have a gradient to check, and parameters that a call reaches through an object.

Freezing a parameter of an object, such as a module, must change no result and no other gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.calls import Differentiated, differentiated, rule_location
from opsmith.checking.exceptions import Overlooking
from opsmith.checking.numerics.autodiff import has_gradient, record
from opsmith.checking.property import Findings, Note
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, each_run
from opsmith.checking.samples.object_arguments import address_of, tensors_of_object
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.ways import Outputs, Way, another_output, compare, differs_from
from opsmith.core.call_arguments import tensors_in
from opsmith.core.formula import Formula
from opsmith.judging.tensors import is_inexact


def given_instead(subject: Subject, sample: Sample) -> dict[str, str]:
    """Inputs with a formula that a sample does not differentiate, with a description of its value."""
    inexact = {sample.names[argnum] for argnum in sample.inexact}
    rules = subject.specification.gradients.rules
    instead: dict[str, str] = {}
    for name, value in zip(sample.names, sample.flat, strict=True):
        if isinstance(rules.get(name), Formula) and name not in inexact:
            instead[name] = str(value.dtype) if isinstance(value, Tensor) else repr(value)
    empty = [name for name, rule in rules.items() if isinstance(rule, Formula) and name not in sample.names]
    return {**instead, **dict.fromkeys(empty, "an empty list")}


def each_differentiated(subject: Subject) -> Iterator[tuple[Sample, Differentiated]]:
    """Yield each sample with the inputs that it differentiates; exceptions are reported elsewhere."""
    for sample in subject.samples:
        with Overlooking():
            yield sample, differentiated(subject, sample)


def differentiated_names(subject: Subject) -> set[str]:
    """Inputs that at least one sample differentiates."""
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
        results = record(partial(subject.call, sample), sample.in_double(), sample.inexact)[2]
        if any(map(has_gradient, tensors_in(results))):
            return False
    return True


def lacks_floats(subject: Subject) -> bool:
    """True if no sample has a floating tensor with elements, so that no gradient has elements."""
    return not any(sample.flat[argnum].numel() for sample in subject.samples for argnum in sample.inexact)


MOST = 8
"""Maximum number of parameters that are frozen one by one."""

HINT = (
    "; results and gradients must not depend on frozen parameters: read `requires_grad` of each "
    "parameter before you differentiate by it"
)

Needs = dict[tuple[int, str], bool]
"""True for each parameter that requires a gradient, by the position of its object and its name in it."""


def frozen_parameters(property: str, subject: Subject) -> Findings:
    """Freeze parameters within the objects of each sample, and compare results and gradients.

    Args:
        property: Name of the property that reports.
        subject: The subject of the check.
    """
    own = tuple(each for each in subject.samples if each.objects and not each.origin)
    yield from each_run(property, _check, replace(subject, samples=own))


def _check(run: Run) -> Findings:
    flattened = run.sample.objects.flattened  # their gradients belong to the parameters, frozen or not
    for subset in [*reversed([*differentiated(run.subject, run.sample).subsets()]), ()]:
        argnums = tuple(argnum for argnum in subset if argnum not in flattened)
        failure = next(compare(_ways(replace(run, place=run.subject.devices[0], by=argnums))), None)
        if failure is not None:
            yield failure
            return  # the other choices would report the same fault


def _ways(run: Run) -> Iterator[Way]:
    names, right, alone = (
        run.names(),
        run.values().tensors,
        "" if run.argnums else ", and no input requires one",
    )
    needed = partial(another_output, run.name, run)
    cause = "input-needs-grad"
    for words, needs in _choices(run.sample):
        failure = partial(needed, f"where {words}{alone}", cause, error=cause, hint=HINT)
        yield Way(words, names, partial(_asked, run, needs), partial(differs_from, right), failure)


def _choices(sample: Sample) -> Iterator[tuple[str, Needs]]:
    """Yield each parameter frozen alone, then all frozen, then all frozen parameters made trainable."""
    given = {address_of(value) for value in sample.flat if isinstance(value, Tensor)}  # as of checkpoints
    leaves = {
        (argnum, name): tensor
        for argnum, value in sample.objects.items()
        for name, tensor in tensors_of_object(value).items()
        if tensor.is_leaf and is_inexact(tensor) and address_of(tensor) not in given
    }
    trained = [key for key, tensor in leaves.items() if tensor.requires_grad]
    parameters = [key for key, tensor in leaves.items() if isinstance(tensor, torch.nn.Parameter)]
    labels = sample.labels
    for argnum, name in trained[:MOST] if len(trained) > 1 else ():
        yield f"`{name}` of `{labels[argnum]}` requires no gradient", {(argnum, name): False}
    for which, keys in ("no", trained), ("every", [key for key in parameters if key not in trained]):
        if keys:
            names = " and ".join(dict.fromkeys(f"`{labels[argnum]}`" for argnum, _ in keys))
            yield f"{which} parameter of {names} requires a gradient", dict.fromkeys(keys, which == "every")


def _asked(run: Run, needs: Needs) -> Outputs:
    """The results and gradients with copies of the objects, in which parameters are frozen as given."""
    flat = list(run.sample.flat)
    for argnum, made in run.sample.objects.apart().items():
        flat[argnum] = made
        if flat[argnum] is not run.sample.flat[argnum]:
            for name, tensor in tensors_of_object(flat[argnum]).items():
                tensor.requires_grad_(needs.get((argnum, name), tensor.requires_grad))
    return replace(run, sample=replace(run.sample, flat=tuple(flat))).values().tensors
