"""Mutation: an in-place call writes the values that its functional form returns, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.checking.exceptions import error_words
from opsmith.checking.processes.fork import in_child
from opsmith.checking.properties.behaviour.layouts import layout_cases, samples_of_each_form
from opsmith.checking.properties.behaviour.write_runs import (
    LAYOUT,
    WriteCase,
    Writer,
    in_place,
    reference_write,
    written_by,
)
from opsmith.checking.properties.kernels.sizes import authored, forms, refused_calls, watched_in_child
from opsmith.checking.property import Findings, Note, Property, Skipped
from opsmith.checking.report import Failure
from opsmith.checking.run import Coverage, Run, covered_runs
from opsmith.checking.samples.batches import replicas
from opsmith.checking.samples.sample import Sample
from opsmith.checking.subject import LibraryWrite, Subject

NAME = "mutation"


def run(subject: Subject) -> Findings:
    """Write in place in every layout and mode, and compare with the functional form."""
    operator = subject.in_place
    if operator is None:
        yield Skipped("the operator does not declare a write into an argument")
        return
    found: dict[tuple[str | None, str], list[Failure]] = {}

    def check(run: Run, coverage: Coverage) -> Findings:
        kind = partial(WriteCase, operator=operator, found=found)
        for case in layout_cases(kind, run, forward_alone=True):
            if isinstance(case, Note):
                yield case
            elif case.written:
                coverage.ran += 1
                yield from case.check()

    chosen = samples_of_each_form(subject)
    yield from covered_runs(NAME, check, "no sample has a tensor that the operator writes into", chosen)
    for failures in found.values():  # a failure for each input and cause
        layouts = dict.fromkeys(each.evidence[LAYOUT] for each in failures if LAYOUT in each.evidence)
        shown = {LAYOUT: ", ".join(layouts)} if layouts else {}
        yield replace(failures[0], evidence={**failures[0].evidence, **shown})
    yield from never_written(subject, operator, {str(input).partition("[")[0] for input, _ in found})
    yield from half_written(subject, operator)


def never_written(subject: Subject, operator: Writer, faulty: set[str]) -> Findings:
    """Report declared arguments that the reference never writes into.

    Args:
        subject: The subject; all its samples are tried, not only the samples that get layouts.
        operator: The operator that writes in place.
        faulty: Names of the arguments that have a failure already.
    """
    specification = operator.specification
    names = specification.schema.written
    given: set[str] = set()
    rose: set[str] = set()
    changed: set[str] = set()
    for sample in subject.samples:
        if changed == {*names}:
            return
        flat, positions = sample.at(), sample.flattening.positions(names)
        filled = {at for at in positions if isinstance(flat[at], Tensor) and flat[at].numel()}
        found = reference_write(subject, sample, flat) if filled else None
        if found is not None:
            given.update(sample.names[at] for at in filled)
            rose.update(sample.names[at] for at in filled & found.rose)
            changed.update(sample.names[at] for at in filled & found.changed)
    for name in names:
        if name in changed or name in faulty:
            continue
        cause, words = (
            "not-exercised",
            f"no sample changes an element of `{name}`: add a sample that changes one",
        )
        if name not in given:
            words = f"no sample has a tensor with elements for `{name}`: add a sample that has one"
        elif name not in rose:
            at, writer = "`mutates=`", "the reference"
            if isinstance(operator, LibraryWrite):
                at, writer = "`mutates_args=` or its schema", "the operator"
            cause, words = (
                "not-written",
                f"`{name}` is declared in {at}, but {writer} does not write into it on any sample: "
                f"remove it from {at}, or write into it, for example by `.copy_(...)`",
            )
        yield Failure(NAME, name, cause, words, specification.where)


HALF_WRITTEN = "half-written"


def half_written(subject: Subject, operator: Writer) -> Findings:
    """Report a kernel that writes before it raises, where the reference refuses before it writes."""
    if not subject.specification.kernels or subject.draws:
        return

    def failures() -> tuple[Failure, ...]:
        own = authored(subject)
        return tuple(
            failure
            for sample in forms(own)
            for refused in refused_calls(own, sample)
            for failure in _half_written_by(own, operator, refused.sample, refused.flat)
        )

    if in_child():
        yield from failures()
        return
    try:
        outcome = watched_in_child(NAME, subject, failures)
    except errors.UsageError as error:
        yield Note(f"calls that the reference refuses were not tried: {error.problem}")
        return
    for failure in outcome.failures:
        if failure.cause == HALF_WRITTEN:
            yield failure
        else:  # it dies or hangs in a wrong call, which no other property makes
            yield Note(f"not all calls that the reference refuses were tried: {failure.message}")


def _half_written_by(
    subject: Subject, operator: Writer, sample: Sample, flat: Sequence[Any]
) -> Iterator[Failure]:
    with torch.no_grad():
        if written_by(in_place(subject, operator.reference), sample, replicas(flat)).changed:
            return
        run = written_by(in_place(subject, operator), sample, replicas(flat))
    if run.error is None:
        return
    for at in sorted(run.changed):
        label, text = sample.labels[at], error_words(run.error)
        message = (
            f"a call wrote into `{label}` before it raised an error ({text}), but the reference did "
            "not: check shapes, dtypes and devices before the first write"
        )
        where = subject.specification.kernels[0].where
        yield Failure(NAME, label, HALF_WRITTEN, message, where, {"sample": str(sample)})


MUTATION = Property(
    NAME,
    "a call in place writes what the functional form returns, and nothing else, in every layout",
    run,
    inputs="every",
    traits=("about-results", "sends-gradients"),
)
