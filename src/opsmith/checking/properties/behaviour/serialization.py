"""Serialization: the operator, a module that holds it, and its results can be copied and stored."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opsmith.checking.exceptions import Overlooking, refuse_own
from opsmith.checking.promises import of_tools
from opsmith.checking.property import Finding, Findings, Note, Property, Skipped, each_sample, first_line
from opsmith.checking.report import Failure
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.global_settings import without_warnings
from opsmith.checking.subject import Subject
from opsmith.judging.attribution import calls_operator
from opsmith.judging.compare import differ_beyond_rounding, exact_difference, metadata_difference

NAME = "serialization"


class Holder(torch.nn.Module):
    """A module that holds something, as a model holds an operator."""

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
        yield from each_sample(NAME, _results, subject)


def _unreachable(subject: Subject) -> str | None:
    """The reason why pickle cannot find a class by its name; None where it can."""
    if not subject.kind.applied:
        return None
    kind = subject.specification.origin.subject
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is kind:
        return None
    return (
        f"`{kind.__qualname__}` is not found by its name in `{kind.__module__}`, and pickle "
        "keeps no more of a class: define it at the top of a module"
    )


def _copies(subject: Subject) -> Iterator[Finding]:
    """Copy the subject in every way, and compare the results of each copy with its own."""
    own = subject.kind.applied or subject.kind.in_library
    original: Any = subject.specification.origin.subject if own else subject.operator
    refused: dict[str, list[str]] = {}
    for what, made, taken in _forms(original):
        for how, copied in WAYS.items():
            try:
                with without_warnings():
                    again = taken(copied(made))
            except Exception as error:
                refuse_own(error)
                problem = f"{type(error).__name__}: {first_line(error)}"
                if subject.kind.in_library:  # torch's own object, which torch may not support storing
                    refused.setdefault(problem, []).append(f"{how} of {what}")
                else:
                    yield _failure(subject, f"{how} of {what} raises {problem}", "raises", {})
                continue
            if again is not original:
                yield from _same(subject, again, f"{how} of {what}")
    for problem, failed in refused.items():
        yield Note(f"{', '.join(failed)}: {problem}")


def _forms(original: Any) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Objects that hold the operator: a name, the object, and a function that takes the operator out."""
    yield "it", original, lambda copied: copied
    yield "a module that holds it", Holder(original), lambda copied: copied.held
    if callable(original) and not isinstance(original, type):
        yield "a `functools.partial` of it", functools.partial(original), lambda copied: copied.func


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
    for sample in subject.samples[:1]:
        with torch.no_grad():
            expected, found = subject.call(sample, sample.at()), other.call(sample, sample.at())
        for result, got, right in zip(subject.results(sample), found, expected, strict=True):
            if not isinstance(got, Tensor) or not isinstance(right, Tensor):
                continue
            steady = subject.specification.rounds_alike
            differ = exact_difference(got, right) if steady else differ_beyond_rounding(got, right)
            if metadata_difference(got, right, strides=True) or differ:
                yield _failure(
                    subject,
                    f"what comes back from {what} gives another `{result.name}`",
                    "stale-state",
                    {"sample": str(sample)},
                )


def _results(subject: Subject, sample: Sample) -> Findings:
    """Copy and store results, and compare them with the originals."""
    if subject.rank(sample):
        return
    with torch.no_grad():
        results = subject.call(sample, sample.at())
    for result, value in zip(subject.results(sample), results, strict=True):
        if not isinstance(value, Tensor):
            continue
        for how, copied in WAYS.items():
            try:
                with without_warnings():
                    again = copied(value.detach())
            except Exception as error:
                refuse_own(error)
                words = f"{how} of `{result.name}` raises {type(error).__name__}: {first_line(error)}"
                if _lacks(copied, value.dtype):
                    yield Note(f"{words}; so torch does for any tensor of {value.dtype}")
                else:
                    yield _failure(subject, words, "raises", {"sample": str(sample)}, result.name)
                continue
            lazy = value.is_neg() or value.is_conj()  # torch resolves these while it copies
            fault = metadata_difference(again, value, strides=not lazy)
            difference = None if fault else exact_difference(again, value)
            if fault is None and difference is None:
                continue
            reason = f"the {fault[0]} {fault[1]}, not {fault[2]}" if fault else f"other values: {difference}"
            words = f"`{result.name}` comes back from {how} with {reason}"
            yield _failure(subject, words, "unknown", {"sample": str(sample)}, result.name)


def _lacks(copied: Callable[[Any], Any], dtype: torch.dtype) -> bool:
    """True if torch itself cannot copy a tensor of a dtype by this function."""
    with Overlooking(), without_warnings():
        copied(torch.zeros(2, dtype=dtype))
        return False
    return True


def _failure(
    subject: Subject, words: str, cause: str, evidence: dict[str, Any], input: str | None = None
) -> Failure:
    return Failure(NAME, input, cause, words, subject.specification.where, evidence)


SERIALIZATION = Property(
    NAME,
    "it and its results can be copied, pickled and saved",
    run,
    traits=("integration", "transforms"),
    given=of_tools,
)
