"""torch takes the operator for one of its own: `torch.library.opcheck`, test by test."""

from __future__ import annotations

from typing import Any

import torch

from opsmith import errors
from opsmith.checking.differentiated import differentiated
from opsmith.checking.numerical import quiet
from opsmith.checking.property import Findings, Note, Property, Skipped, each_sample
from opsmith.checking.report import Failure
from opsmith.checking.sample import Sample
from opsmith.checking.subject import Subject

NAME = "integration"

TESTS = {
    "test_schema": "its schema says truly what it writes and returns",
    "test_autograd_registration": "its gradients are registered where torch looks for them",
    "test_faketensor": "its fake kernel agrees with the real one",
    "test_aot_dispatch_dynamic": "results and gradients are the same when traced with dynamic shapes",
}
"""opcheck's tests, and what each promises."""

REPEATS = ("test_aot_dispatch_dynamic",)
"""Tests that compare two runs on the same arguments."""


def run(subject: Subject) -> Findings:
    """Run each test of opcheck on every sample."""
    if subject.torch_operator is None:
        yield Skipped("it is a class, and no operator that torch knows: `opsmith.adopt` makes it one")
        return
    yield from each_sample(NAME, subject, _sample)


def _sample(subject: Subject, sample: Sample) -> Findings:
    for test, promise in TESTS.items():
        if test in REPEATS and any(isinstance(value, torch.Generator) for value in sample.flat):
            yield Note(f"{test} was left out for a sample with a generator, which it would draw from twice")
            continue
        error = _opcheck(subject, sample, test)
        if error is None:
            continue
        missing = _missing_fake(error)
        if missing is not None:
            yield Note(f"{test} was left out, since there is no fake kernel: {missing.mend}")
            continue
        yield Failure(
            NAME,
            None,
            test.removeprefix("test_"),
            f"opcheck's {test} fails ({promise}): {error}",
            subject.specification.where,
            {"sample": str(sample), "exception": type(error).__name__},
        )


def _opcheck(subject: Subject, sample: Sample, test: str) -> BaseException | None:
    flat = sample.at()
    for place in differentiated(subject, sample).places:
        flat[place].requires_grad_()
    args, kwargs = sample.flattening.schema.dispatched(sample.flattening.pack(flat))
    with subject.seeded(), quiet():
        found: dict[str, Any] = torch.library.opcheck(
            subject.torch_operator, tuple(args), kwargs, test_utils=test, raise_exception=False
        )
    answer = found[test]
    return answer if isinstance(answer, BaseException) else None


def _missing_fake(error: BaseException | None) -> errors.MissingFakeError | None:
    """The error of an opaque operator without a fake kernel, wherever torch has wrapped it."""
    while error is not None:
        if isinstance(error, errors.MissingFakeError):
            return error
        error = error.__cause__ or error.__context__
    return None


INTEGRATION = Property(NAME, "torch's own opcheck accepts the operator", run)
