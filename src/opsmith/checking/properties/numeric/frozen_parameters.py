"""Parameters that a call reaches through an object, such as a module: frozen or not, all else is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from opsmith.checking.calls import differentiated
from opsmith.checking.property import Findings
from opsmith.checking.run import Run, each_run
from opsmith.checking.samples.object_arguments import address_of, copied_object, tensors_of_object
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import Subject
from opsmith.checking.ways import Outputs, Way, another_output, compare, differs_from
from opsmith.judging.tensors import is_inexact

MOST = 8
"""Largest number of parameters that are frozen one by one."""

HINT = "; what a call gives must not depend on them: read `requires_grad` of each before differentiating"

Needs = dict[tuple[int, str], bool]
"""Whether a parameter requires a gradient, by position of its object and its name there."""


def frozen_parameters(property: str, subject: Subject) -> Findings:
    """Freeze parameters within the objects of each sample, and compare results and gradients.

    Args:
        property: Name of the property that reports.
        subject: The subject of the check.
    """
    own = tuple(each for each in subject.samples if each.objects and not each.origin)
    yield from each_run(property, _check, replace(subject, samples=own))


def _check(run: Run) -> Findings:
    for argnums in [*reversed([*differentiated(run.subject, run.sample).subsets()]), ()]:
        failure = next(compare(_ways(replace(run, place=run.subject.devices[0], by=argnums))), None)
        if failure is not None:
            yield failure
            return  # the other choices would report the same


def _ways(run: Run) -> Iterator[Way]:
    names, right, alone = run.names(), run.values().tensors, "" if run.argnums else ", nor any input"
    needed = partial(another_output, run.name, run)
    cause = "input-needs-grad"
    for words, needs in _choices(run.sample):
        failure = partial(needed, f"where {words}{alone}", cause, error=cause, hint=HINT)
        yield Way(words, names, partial(_asked, run, needs), partial(differs_from, right), failure)


def _choices(sample: Sample) -> Iterator[tuple[str, Needs]]:
    """Yield each parameter frozen alone, then all of them, and all that were frozen as they would train."""
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
    """The results and gradients with copies of the objects in which some parameters are frozen or not."""
    flat = list(run.sample.flat)
    for argnum in run.sample.objects:
        flat[argnum] = copied_object(flat[argnum], None, None)
        if flat[argnum] is not run.sample.flat[argnum]:
            for name, tensor in tensors_of_object(flat[argnum]).items():
                tensor.requires_grad_(needs.get((argnum, name), tensor.requires_grad))
    return replace(run, sample=replace(run.sample, flat=tuple(flat))).values().tensors
