"""What forward mode and second order share: a look at each sample, and why there is nothing to see."""

from __future__ import annotations

from collections.abc import Callable

from opsmith.checking.differentiated import Differentiated, differentiated
from opsmith.checking.own_words import raised_within
from opsmith.checking.property import Findings, Note, Skipped, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject

Look = Callable[[Subject, Sample, tuple[int, ...], tuple[int, ...]], Findings]

REFUSALS = ("marked with @once_differentiable", "more than one element of the written-to tensor")
"""Parts of what torch says when a backward that is marked so is differentiated, and of results in forward
mode whose elements share memory. Where the operator's own code writes into such a tensor, it is its fault."""


def each_subset(name: str, subject: Subject, look: Look) -> Findings:
    """Look at every sample by all inputs together and by each alone.

    A derivative that someone refuses (a formula declared as not implemented, an operation without forward
    mode, a backward marked with `once_differentiable`) is a clear answer and no failure: its reason stands in
    the report.

    Args:
        name: Name of the property.
        subject: What is under check.
        look: Looks at a sample by some of its inputs; it is told which others have been found right together.
            Where it compares nothing, it says why by `Skipped`: that is no pass.
    """
    if subject.specification.gradients.surrogate:
        yield Skipped("the gradients are surrogates, wrong on purpose; the property `surrogate` holds them")
        return
    refused: dict[str, None] = {}
    looked = False

    def each(subject: Subject, sample: Sample) -> Findings:
        nonlocal looked
        inputs: Differentiated = differentiated(subject, sample)
        refused.update(dict.fromkeys(inputs.refused.values()))
        right: tuple[int, ...] = ()
        for subset in reversed([*inputs.subsets()]):
            try:
                found = [*look(subject, sample, subset, right)]
            except Exception as error:
                if not refuses(error):
                    raise
                refused[first_line(error)] = None
                continue
            reasons = [finding.reason for finding in found if isinstance(finding, Skipped)]
            refused.update(dict.fromkeys(reasons))
            looked = looked or not (reasons or right)  # one of its own is no truth to hold it to
            yield from (finding for finding in found if not isinstance(finding, Skipped))
            if any(isinstance(finding, Failure) for finding in found):
                return  # the other subsets of this sample would say the same again
            right = right or subset

    failed = False
    for finding in each_sample(name, subject, each):
        failed = failed or isinstance(finding, Failure)
        yield finding
    if looked or failed:
        yield from (Note(reason) for reason in refused)
    else:
        yield Skipped("; ".join(refused) or "there is nothing to differentiate")


def refuses(error: Exception) -> bool:
    """Whether an exception says that there is no such derivative, on purpose."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSALS)
    return (said and not raised_within(error)) or isinstance(error, NotImplementedError)
