"""What forward mode and second order share: a check by each input, and reasons where there is none."""

from __future__ import annotations

from collections.abc import Callable

from opsmith.checking.differentiated import differentiated
from opsmith.checking.numerical import large_note, too_large
from opsmith.checking.property import Findings, Note, Skipped, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject

Check = Callable[[Subject, Sample, tuple[int, ...], bool], Failure | None]


def each_subset(name: str, subject: Subject, check: Check) -> Findings:
    """Check every sample by each input alone and by all together.

    A derivative that someone refuses by NotImplementedError (a formula declared as not implemented, an
    operation without forward mode) is a clear answer and no failure: its reason stands in the report.

    Args:
        name: Name of the property.
        subject: What is under check.
        check: Checks a sample by some of its inputs, in fast mode if told so.
    """
    if subject.specification.gradients.surrogate:
        yield Skipped("the gradients are surrogates, wrong on purpose; the property `surrogate` holds them")
        return
    refused: dict[str, None] = {}
    checked = False

    def look(subject: Subject, sample: Sample) -> Findings:
        nonlocal checked
        inputs = differentiated(subject, sample)
        refused.update(dict.fromkeys(inputs.refused.values()))
        fast = bool(inputs.places) and too_large(subject, sample, inputs.places)
        if fast:
            yield Note(large_note(sample))
        for subset in inputs.subsets():
            try:
                failure = check(subject, sample, subset, fast)
            except NotImplementedError as error:
                refused[first_line(error)] = None
                continue
            checked = True
            if failure is not None:
                yield failure
                return  # the other subsets of this sample would say the same again

    failed = False
    for finding in each_sample(name, subject, look):
        failed = failed or isinstance(finding, Failure)
        yield finding
    if checked or failed:
        yield from (Note(reason) for reason in refused)
    else:
        yield Skipped("; ".join(refused) or "there is nothing to differentiate")
