"""Kinds of subjects: operators, `autograd.Function` classes and operators of torch.library."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.class_samples import Samples, class_samples
from opsmith.adopting.function_class import adopt_function, is_function_class
from opsmith.adopting.registered import is_operator, overload_of
from opsmith.adopting.schema_matching import described
from opsmith.adopting.signature import value_names
from opsmith.checking.class_runs import first_run, learnt_from
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import calls_operator
from opsmith.checking.report import Failure
from opsmith.checking.samples.cases import refuse_unfit
from opsmith.checking.samples.given import GIVEN, GivenSamples, drawing, drawn
from opsmith.checking.samples.sample import Sample
from opsmith.checking.side_effects.outside_state import LARGE, OutsideState
from opsmith.checking.subject import (
    ADOPTED,
    ADOPTED_CLASS,
    FUNCTION_CLASS,
    LIBRARY_OPERATOR,
    OPERATOR,
    LibraryWrite,
    Subject,
    SubjectKind,
)
from opsmith.core.call_arguments import CallArguments, shown
from opsmith.core.functional_form import on_copies
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.origins.function_class import class_of
from opsmith.core.samples import Make
from opsmith.core.schema import functional_schema
from opsmith.core.shape_samples import missing_words
from opsmith.core.specification import Specification
from opsmith.torch_library import capabilities
from opsmith.torch_library.library_operators import library_operator_of
from opsmith.torch_library.registration import BITWISE


def subject_of(checked: Any, samples: GivenSamples, seed: int, effort: Effort) -> Subject:
    """The subject of a check.

    Args:
        checked: An operator of ours, an `autograd.Function` class, or an operator of torch.library.
        samples: As of `check`.
        seed: Seed of all random numbers.
        effort: Level of effort.

    Raises:
        UsageError: If it is none of these.
        MissingSamplesError: If there are no samples.
        SampleError: If a sample does not fit.
        ForwardRaisedError: If the forward of a class raises on every sample.
    """
    if is_function_class(checked):
        with drawing(seed) as make:
            operator = as_operator(checked, samples, make)
        calls = drawn(operator.specification, None, seed, checked.__qualname__)
        # A class of the oldest kind has no `apply` that runs; adopted, it has.
        old = class_of(operator.specification.origin).takes_self
        apply = None if old else _apply_of(operator.specification)
        kind = ADOPTED_CLASS if apply is None else FUNCTION_CLASS
        return _subject(
            operator.specification, calls, seed, effort, kind, operator, apply, checked.__qualname__
        )
    if isinstance(checked, Operator):
        samples = learnt_from(checked, samples, seed)
        form = checked.functional  # what it writes in place is compared as a result, too
        calls = drawn(form.specification, samples, seed, checked.name)
        subject = _subject(
            form.specification, calls, seed, effort, _kind_of(form.specification), form, None, checked.name
        )
        return subject if form is checked else replace(subject, in_place=checked)
    if is_operator(checked):
        declared = as_specification(checked)
        written = bool(declared.schema.written)
        called = on_copies_of(declared) if written else declared
        calls = drawn(called, samples, seed)
        subject = _subject(
            called, calls, seed, effort, LIBRARY_OPERATOR, None, called.reference, declared.name
        )
        return replace(subject, in_place=LibraryWrite(declared)) if written else subject
    raise _no_subject(checked)


def _kind_of(specification: Specification) -> SubjectKind:
    if specification.origin.kind == "declared":
        return OPERATOR
    return ADOPTED if specification.origin.referenced else ADOPTED_CLASS


def _no_subject(checked: Any) -> errors.UsageError:
    kind = (
        getattr(checked, "__self__", None) if getattr(checked, "__name__", "") == "apply" else type(checked)
    )
    if is_function_class(kind):
        hint = f"pass the class, `{kind.__name__}`"
    else:
        hint = 'declare it first, with `@opsmith.operator("mylib::name")`'
    return errors.UsageError(
        "only an operator (of opsmith or of torch.library), or an `autograd.Function` class, can be checked",
        expected="an operator, `torch.ops.mylib.name`, or a class derived from torch.autograd.Function",
        got=shown(checked),
        hint=hint,
    )


def _apply_of(specification: Specification) -> Callable[..., Any]:
    """A class's own `apply`, with the arguments of the operator."""
    origin, schema = specification.origin, specification.schema

    @calls_operator
    def apply(*args: Any, **kwargs: Any) -> Any:
        return origin.subject.apply(*origin.spread(schema.call_values(args, kwargs)))

    return apply


def through_apply(subject: Subject) -> Subject | None:
    """The class of an adopted operator, called through its own `apply`; None if it can be checked itself.

    The operator copies what the class writes into, and takes fewer gradients than `apply`. A class that was
    adopted with a `kind=` is held to torch's contract all the same: checked itself, it would fail for what
    `kind=` declares.
    """
    specification = subject.specification
    promised = subject.apply is not None or specification.origin.claims <= {"true"}
    if promised or class_of(specification.origin).takes_self:
        return None
    return replace(subject, kind=FUNCTION_CLASS, apply=_apply_of(specification))


THROUGH_APPLY = "called"
"""Evidence of a failure of a class through its own `apply`; the operator that was made of it is right."""


def of_own_apply(failure: Failure, subject: Subject) -> Failure:
    """The failure of a class through its own `apply`, as a failure of the operator that was made of it."""
    call = f"`{subject.specification.qualname}.apply`"
    message = f"called through {call}: {failure.message}"
    return replace(failure, message=message, evidence={**failure.evidence, THROUGH_APPLY: call})


def _subject(
    specification: Specification,
    calls: Sequence[CallArguments],
    seed: int,
    effort: Effort,
    kind: SubjectKind,
    operator: Operator[..., Any] | None,
    apply: Callable[..., Any] | None = None,
    shown_as: str | None = None,
) -> Subject:
    if not calls:
        raise errors.MissingSamplesError(
            f"there are no samples to check it on{missing_words(specification)}",
            operator=specification.name,
            where=specification.where,
            hint=_sampling_hint(specification, operator),
        )
    own = tuple(Sample.of(position, call, specification.schema) for position, call in enumerate(calls))
    for each in own:
        refuse_unfit(each.position, each.labels, each.flat, shown_as or specification.name, GIVEN)
    subject = Subject(specification, own, seed, effort, kind, operator, apply, shown_as)
    return replace(subject, outside=OutsideState.of(subject, LARGE))


def _sampling_hint(specification: Specification, operator: Operator[..., Any] | None) -> str:
    if operator is None:
        names = specification.schema.names
        listed = f"({', '.join(names)}{',' * (len(names) == 1)})"
        path = specification.name.replace("::", ".")
        return f"call `opsmith.check(torch.ops.{path}, samples=[{listed}])`"
    attached = f"write `@{specification.variable}.samples` over a function of `make` that yields tuples of "
    there = specification.origin.takes_samples or f"{attached}arguments"
    return f"{there}, or call `check(..., samples=[(x, weight)])`"


NAMESPACE = "checked"


def as_operator(
    function_class: type[torch.autograd.Function], samples: Samples, make: Make
) -> Operator[..., Any]:
    """The operator that a class is checked as; checking the class again replaces it.

    Args:
        function_class: The class.
        samples: Tuples of arguments as `apply` takes them, or a function that returns them.
        make: Maker of tensors for such a function.

    Raises:
        MissingSamplesError: If there are none.
        SampleError: If one does not fit forward.
        ForwardRaisedError: If forward must run to determine its results, and raises.
        UsageError, ParameterKindError, ...: As of `opsmith.adopt`.
    """
    name = throwaway_name(NAMESPACE, function_class)
    called = function_class.__qualname__
    try:
        given = class_samples(samples, function_class, called, "check")
        read = [] if given is None else given.values(make)
        if given is None or not read:
            raise errors.MissingSamplesError(
                f"there are no samples to check `{called}` on",
                operator=called,
                where=where(function_class.forward),
                hint=f"call `opsmith.check({called}, samples=[(x, 2.0)])`; `opsmith adopt FILE` guesses some",
            )
        for position, values in enumerate(read):
            refuse_unfit(position, value_names(function_class, len(values)), values, called, given.location)
        return adopt_function(
            function_class,
            name,
            reference=None,
            samples=replace(given, source=[tuple(values) for values in read]),
            signature=None,
            kind="true",
            opaque=False,
            module=__name__,
            run=first_run,
            mutates=(),
        )
    except errors.OpsmithError as error:
        if error.operator != name:
            raise
        raise _about(error, called) from error


def _about(error: errors.OpsmithError, operator: str) -> errors.OpsmithError:
    """Copy an error, with the name that the user knows."""
    return type(error)(
        error.problem,
        operator=operator,
        argument=error.argument,
        expected=error.expected,
        got=error.got,
        where=error.where,
        hint=error.hint,
    )


def throwaway_name(namespace: str, function_class: type) -> str:
    """An operator's name for a class that is adopted for a while, the same each time.

    Example:
        >>> throwaway_name("checked", torch.autograd.Function)
        'checked::torch_autograd_function_Function_85d5be5a'
    """
    full = f"{function_class.__module__}.{function_class.__qualname__}"
    plain = re.sub(r"\W+", "_", full, flags=re.ASCII).strip("_")
    return f"{namespace}::{plain}_{zlib.crc32(full.encode()):08x}"


def as_specification(operator: Any) -> Specification:
    """A specification in which the operator stands for its own reference.

    Args:
        operator: `torch.ops.ns.name`, one of its overloads, or a `torch.library.custom_op`.

    Raises:
        UsageError: If it has several overloads, or belongs to torch.
        UnsupportedTypeError: If its schema has types that opsmith does not know.
    """
    overload = overload_of(operator)
    signature, origin = capabilities.signature_of(overload), library_operator_of(overload)
    function, schema = next(iter(origin.sources()), None), described(signature)

    @calls_operator
    def call(*args: Any, **kwargs: Any) -> Any:
        given, named = schema.dispatched(schema.call_values(args, kwargs))
        return overload(*given, **named)

    return Specification(
        name=signature.name,
        reference=call,
        schema=schema,
        module=__name__,
        qualname=signature.name,
        where=where(function) if function else str(overload),
        opaque=True,
        random=torch.Tag.nondeterministic_seeded in overload.tags,
        deterministic=BITWISE not in overload.tags,
        inline=False,
        origin=origin,
    )


def on_copies_of(specification: Specification) -> Specification:
    """The specification of an operator that is called on copies of what it writes, and returns them."""
    call = calls_operator(on_copies(specification.reference, specification.schema))
    return replace(specification, schema=functional_schema(specification.schema), reference=call)
