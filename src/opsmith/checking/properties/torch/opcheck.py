"""`torch.library.opcheck`, test by test."""

from __future__ import annotations

import re
from typing import Any

import torch

from opsmith import errors
from opsmith.checking.causes import UNKNOWN
from opsmith.checking.exceptions import first_line
from opsmith.checking.promises import of_tools
from opsmith.checking.properties.torch.compile import chain
from opsmith.checking.properties.torch.fake import has_own_fake
from opsmith.checking.property import Findings, Note, Property, Skipped, of_exception
from opsmith.checking.run import Run, each_run
from opsmith.checking.subject import Subject
from opsmith.judging.compare import SavedBits
from opsmith.torch_library.torch_messages import LOOKS_AT_DATA, OPCHECK_DIFFERS, has_message

NAME = "opcheck"

TESTS = {
    "test_schema": "the schema matches the writes and the results",
    "test_autograd_registration": "the gradients are registered where torch looks for them",
    "test_faketensor": "the fake kernel agrees with the real kernel",
    "test_aot_dispatch_dynamic": "results and gradients are the same when traced with dynamic shapes",
}
"""opcheck's tests, each with its promise."""

TRACED = ("test_aot_dispatch_dynamic",)
"""Tests that trace the operator, and compare two runs on the same arguments."""

ON_FAKES = ("test_faketensor", *TRACED)
"""Tests that need a fake kernel."""

CAUSES_OF_ERRORS = {
    r"Argument (\w+) is not defined as mutable but was mutated": "mutates-input",
    r"Argument (\w+) is not defined to alias output but was aliasing": "aliases-input",
}
"""Cause for each error of test_schema."""


def run(subject: Subject) -> Findings:
    """Run each test of opcheck on every sample."""
    if subject.torch_operator is None:
        yield Skipped("a class is not an operator that torch knows: `opsmith.adopt` makes an operator of it")
        return
    if not subject.effort.full:
        yield Note(f"{TRACED[0]} was left out: the effort is `{subject.effort.name}`, which compiles nothing")
    yield from each_run(NAME, _tests, subject)


def _tests(run: Run) -> Findings:
    effort = run.subject.effort
    for test, promise in TESTS.items():
        if test in TRACED and (not effort.full or (run.subject.rank(run.sample) and not effort.exhaustive)):
            continue  # `compile` traces every sample
        reason = _unsuited(run, test)
        error = None if reason is not None else _opcheck(run, test)
        if error is not None:
            reason = _excused(run, test, error)
        if reason is not None:
            yield Note(f"{test} {reason}")
        elif error is not None:
            cause, input = _cause(test, error)
            message = f"opcheck's {test} fails ({promise}): {errors.message_of(error)}"
            evidence = {**of_exception(error, str(run)), "test": test}
            yield run.failure(input, cause, message, evidence=evidence)


def _unsuited(run: Run, test: str) -> str | None:
    """The reason why a test is not run on a sample."""
    if test in TRACED and any(isinstance(value, torch.Generator) for value in run.sample.flat):
        return "was left out for a sample with a generator, because the test would draw from it twice"
    if test in ON_FAKES and run.subject.lacks("fake"):
        return "was left out, because there is no fake kernel: write `torch.library.register_fake`"
    return None


def _excused(run: Run, test: str, error: BaseException) -> str | None:
    """The reason why an error of a test is no fault."""
    missing = next((each for each in chain(error) if isinstance(each, errors.MissingFakeError)), None)
    if missing is not None:
        return f"was left out, because there is no fake kernel: {missing.hint}"
    if test in TRACED and _compares(error):
        values = run.values().tensors
        if any(bool(each.isnan().any()) for each in values if each is not None):
            return (
                "was left out for a sample with nan in its results or gradients, because nan equals nothing"
            )
    if test in ON_FAKES and has_message(error, LOOKS_AT_DATA) and not has_own_fake(run.subject):
        return f"was left out, because the reference looks at data: {first_line(error)}"
    cause, input = _cause(test, error)
    if cause == "mutates-input" and not _written(run):
        # torch 2.13 reports its own `x * x.conj()` inside an operator like this.
        return (
            f"reports a call inside of the operator as a write into `{input}`, but no bit of an argument "
            "changed"
        )
    return None


def _cause(test: str, error: BaseException) -> tuple[str, str | None]:
    """The cause that an error of opcheck names, and the argument."""
    if test == "test_faketensor":
        return "fake-mismatch", None
    for words, cause in CAUSES_OF_ERRORS.items():
        found = re.search(words, str(error))
        if found:
            return cause, found[1]
    return (UNKNOWN if _compares(error) or isinstance(error, AssertionError) else "raises"), None


def _compares(error: BaseException) -> bool:
    """True if an error of opcheck means that numbers differ, and not that a call raised."""
    return has_message(error, OPCHECK_DIFFERS)


def _opcheck(run: Run, test: str) -> BaseException | None:
    subject, flat = run.subject, run.flat()
    for argnum in run.argnums:
        flat[argnum].requires_grad_()
    subject.note_call(values := run.sample.flattening.pack(flat))
    args, kwargs = run.sample.flattening.schema.dispatched(values)
    with subject.seeded():
        found: dict[str, Any] = torch.library.opcheck(
            subject.torch_operator, tuple(args), kwargs, test_utils=test, raise_exception=False
        )
    answer = found[test]
    return answer if isinstance(answer, BaseException) else None


def _written(run: Run) -> bool:
    """True if a call, or its backward, changes a bit of an argument."""
    flat = run.flat()
    before = [SavedBits.of(value) for value in flat if isinstance(value, torch.Tensor)]
    with run.subject.seeded(), torch.no_grad():
        run.subject.call(run.sample, flat)
    if all(each.written() is None for each in before):
        run.call(flat).backward()
    return any(each.written() is not None for each in before)


OPCHECK = Property(
    NAME,
    "torch's own opcheck accepts the operator",
    run,
    traits=("compiles", "integration", "transforms"),
    given=of_tools,
)
