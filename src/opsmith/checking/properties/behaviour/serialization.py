"""Serialization: the operator, a module that holds it, and its results can be copied and stored."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Raised, attempt
from opsmith.checking.promises import of_tools
from opsmith.checking.property import Finding, Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.run import Run, each_run
from opsmith.checking.subject import Subject
from opsmith.judging.attribution import calls_operator
from opsmith.judging.compare import differ_beyond_rounding, exact_difference, form_difference

NAME = "serialization"


class Holder(torch.nn.Module):
    """A module that holds an object, as a model holds an operator."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def run(subject: Subject) -> Findings:
    """Copy and store the operator in every way, and call each copy; then copy and store results."""
    reason = _unreachable(subject)
    if reason is not None:
        yield Skipped(reason)
        return
    failed = False
    for finding in _copies(subject):
        failed = failed or isinstance(finding, Failure)
        yield finding
    if not failed:
        yield from each_run(NAME, _results, subject)


def _unreachable(subject: Subject) -> str | None:
    """The reason why pickle cannot find a class by its name; None if it can."""
    kind = subject.specification.origin.subject
    if not subject.kind.applied or attempt(partial(_pickled, kind)) is kind:
        return None
    return (
        f"pickle stores only the name of a class, but `{kind.__qualname__}` is not found by its name "
        f"in `{kind.__module__}`: define the class at the top of a module"
    )


def _copies(subject: Subject) -> Iterator[Finding]:
    """Copy the subject in every way, and compare the results of each copy with the original's results."""
    own = subject.kind.applied or subject.kind.in_library
    original: Any = subject.specification.origin.subject if own else subject.operator
    refused: dict[str, list[str]] = {}
    for what, made, taken in _forms(original):
        for how, copied in WAYS.items():
            words, again = f"{how} of {what}", attempt(partial(copied, made))
            if not isinstance(again, Raised):
                if taken(again) is not original:
                    yield from _same(subject, taken(again), words)
            elif subject.kind.in_library:  # torch's own object, which torch may not support storing
                refused.setdefault(str(again), []).append(words)
            else:
                where = subject.specification.where
                yield Failure(NAME, None, "raises", f"{words} raises {again}", where)
    for problem, failed in refused.items():
        yield Note(f"{', '.join(failed)}: {problem}")


def _forms(original: Any) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Objects that hold the operator: a name, the object, and a function that takes the operator out."""
    yield "it", original, lambda copied: copied
    yield "a module that holds the operator", Holder(original), lambda copied: copied.held
    if callable(original) and not isinstance(original, type):
        yield "a `functools.partial` of the operator", partial(original), lambda copied: copied.func


@calls_operator
def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@calls_operator
def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "`copy.deepcopy`": copy.deepcopy,
    "`pickle`": _pickled,
    "`torch.save`": _saved,
}


def _same(subject: Subject, again: Any, what: str) -> Findings:
    """Compare the results of a copy with those of the operator."""
    other = replace(subject, operator=again) if subject.apply is None else replace(subject, apply=again)
    for run in (Run(subject, sample, NAME) for sample in subject.samples[:1]):
        with torch.no_grad():
            expected, found = subject.call(run.sample, run.flat()), other.call(run.sample, run.flat())
        for result, got, right in zip(subject.results(run.sample), found, expected, strict=True):
            if not isinstance(got, Tensor) or not isinstance(right, Tensor):
                continue
            steady = subject.specification.rounds_alike
            differ = exact_difference(got, right) if steady else differ_beyond_rounding(got, right)
            if form_difference(got, right, strides=True) or differ:
                message = f"the copy from {what} returns a different `{result.name}`"
                yield run.failure(None, "stale-state", message)


def _results(run: Run) -> Findings:
    """Copy and store results, and compare them with the originals."""
    if run.subject.rank(run.sample):
        return
    with torch.no_grad():
        results = run.subject.call(run.sample, run.flat())
    named = zip(run.subject.results(run.sample), results, strict=True)
    tensors = [(result.name, value) for result, value in named if isinstance(value, Tensor)]
    for (name, value), (how, copied) in product(tensors, WAYS.items()):
        again = attempt(partial(copied, value.detach()))
        if isinstance(again, Raised):
            words = f"{how} of `{name}` raises {again}"
            if _lacks(copied, value.dtype):
                yield Note(f"{words}; torch raises this error for any tensor of {value.dtype}")
            else:
                yield run.failure(name, "raises", words)
            continue
        lazy = value.is_neg() or value.is_conj()  # torch resolves these while it copies
        difference = form_difference(again, value, strides=not lazy) or exact_difference(again, value)
        if difference is not None:
            yield run.failure(name, "unknown", f"`{name}` is not the same after {how}: {difference}")


def _lacks(copied: Callable[[Any], Any], dtype: torch.dtype) -> bool:
    """True if torch itself cannot copy a tensor of a dtype by this function."""
    return isinstance(attempt(lambda: copied(torch.zeros(2, dtype=dtype))), Raised)


SERIALIZATION = Property(
    NAME,
    "the operator and its results can be copied, pickled and saved",
    run,
    traits=("integration", "transforms"),
    given=of_tools,
)
