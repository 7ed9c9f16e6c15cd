"""Subjects of a check: operators, `autograd.Function` classes and operators of torch.library, with samples.

An adopted class is run to learn facts that its code does not show: types, results, and writes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from opsmith import errors
from opsmith.adopting.class_samples import class_samples
from opsmith.adopting.function_class import adopt_function, is_function_class
from opsmith.adopting.registered import is_operator, overload_of
from opsmith.adopting.schema_matching import described
from opsmith.adopting.signature import forward_signature, value_names
from opsmith.checking.effort import Effort
from opsmith.checking.exceptions import refuse_own, watched_calls
from opsmith.checking.processes.fork import announce
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.property import endless, raised_at
from opsmith.checking.report import Failure, Outcome
from opsmith.checking.samples.cases import refuse_unfit
from opsmith.checking.samples.object_arguments import copied_object, tensors_of_object
from opsmith.checking.samples.sample import Sample, sample_named
from opsmith.checking.side_effects.global_settings import torch_state_restored
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
    torch_seeded,
)
from opsmith.core.call_arguments import CallArguments, call_error, shown
from opsmith.core.functional_form import on_copies
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.origins.function_class import class_of
from opsmith.core.samples import LocatedSamples, Make, location_of, read_samples, samples_of
from opsmith.core.schema import functional_schema
from opsmith.core.shape_samples import missing_words, samples_for
from opsmith.core.specification import Specification
from opsmith.core.tensors import map_tensors
from opsmith.judging.attribution import calls_operator
from opsmith.torch_library import capabilities
from opsmith.torch_library.library_operators import library_operator_of
from opsmith.torch_library.origins.forward import Returned, returned_by
from opsmith.torch_library.registration import BITWISE

T = TypeVar("T")

GivenSamples = Callable[..., Iterable[Any]] | Iterable[Any] | None

GIVEN = "the samples given to `check`"
"""Location of a list of samples in messages."""


def subject_of(checked: Any, samples: GivenSamples, seed: int, effort: Effort) -> Subject:
    """The subject of a check.

    Args:
        checked: An operator of ours, an `autograd.Function` class, or an operator of torch.library.
        samples: As for `check`.

    Raises:
        UsageError: If it is none of these.
        MissingSamplesError: If there are no samples.
        SampleError: If a sample does not fit.
        ForwardRaisedError: If the forward of a class raises on every sample.
    """
    if is_function_class(checked):
        with torch_seeded(seed):  # for authors who draw random numbers without `make`
            operator, most = _as_operator(checked, samples, _make(seed))
        # A class of the oldest kind has no `apply` that runs; after adoption, it has one.
        old = class_of(operator.specification.origin).takes_self
        own_apply = _apply_of(operator.specification, most)
        kind, apply = (ADOPTED_CLASS, None) if old else (FUNCTION_CLASS, own_apply)
        own = Subject(operator.specification, (), seed, effort, kind, operator, apply, most)
        own = replace(own, shown_as=checked.__qualname__)
        return _with_samples(own, None)
    if isinstance(checked, Operator):
        samples = _learnt_from(checked, samples, seed)
        form = checked.functional  # an argument written in place is compared as a result, too
        origin = form.specification.origin
        kind = ADOPTED if origin.referenced else ADOPTED_CLASS
        kind = OPERATOR if origin.kind == "declared" else kind
        own = Subject(form.specification, (), seed, effort, kind, form, shown_as=checked.name)
        own = _with_samples(own, samples)
        return own if form is checked else replace(own, in_place=checked)
    if is_operator(checked):
        called = declared = _as_specification(checked)
        if declared.schema.written:
            call = calls_operator(on_copies(declared.reference, declared.schema))
            called = replace(declared, schema=functional_schema(declared.schema), reference=call)
        own = Subject(
            called, (), seed, effort, LIBRARY_OPERATOR, None, called.reference, shown_as=declared.name
        )
        own = _with_samples(own, samples)
        return replace(own, in_place=LibraryWrite(declared)) if declared.schema.written else own
    raise _no_subject(checked)


def _with_samples(subject: Subject, samples: GivenSamples) -> Subject:
    """The subject with the given samples, or with its operator's samples."""
    specification = subject.specification
    calls = _drawn(specification, samples, subject.seed, subject.name)
    if not calls:
        raise errors.MissingSamplesError(
            f"there are no samples to check it on{missing_words(specification)}",
            operator=specification.name,
            where=specification.where,
            hint=_sampling_hint(specification, subject.kind),
        )
    own = tuple(Sample.of(position, call, specification.schema) for position, call in enumerate(calls))
    for each in own:
        refuse_unfit(each.position, each.labels, each.flat, subject.name, GIVEN)
    subject = replace(subject, samples=own)
    return replace(subject, outside=OutsideState.of(subject.functions, LARGE))


def _sampling_hint(specification: Specification, kind: SubjectKind) -> str:
    if kind.in_library:
        names = specification.schema.names
        listed = f"({', '.join(names)}{',' * (len(names) == 1)})"
        path = specification.name.replace("::", ".")
        return f"call `opsmith.check(torch.ops.{path}, samples=[{listed}])`"
    attached = f"write `@{specification.variable}.samples` over a function of `make` that yields tuples of "
    there = specification.origin.takes_samples or f"{attached}arguments"
    return f"{there}, or call `check(..., samples=[(x, weight)])`"


def _drawn(specification: Specification, samples: GivenSamples, seed: int, name: str) -> list[CallArguments]:
    """The samples' calls."""
    source = samples_for(specification) if samples is None else samples
    if source is None:
        return []
    with torch_seeded(seed):
        return samples_of(source, _make(seed), specification.schema, name, GIVEN)


def _make(seed: int) -> Make:
    return Make(generator=torch.Generator().manual_seed(seed))


def _no_subject(checked: Any) -> errors.UsageError:
    kind = (
        getattr(checked, "__self__", None) if getattr(checked, "__name__", "") == "apply" else type(checked)
    )
    if is_function_class(kind):
        hint = f"pass the class, `{kind.__name__}`"
    else:
        hint = 'declare it first, with `@opsmith.operator("mylib::name")`'
    return errors.UsageError(
        "only an operator (of opsmith or of torch.library) or an `autograd.Function` class can be checked",
        expected="an operator, `torch.ops.mylib.name`, or a class derived from torch.autograd.Function",
        got=shown(checked),
        hint=hint,
    )


def _apply_of(specification: Specification, most: int | None = None) -> Callable[..., Any]:
    """A class's own `apply`, with the arguments of the operator.

    Args:
        most: Maximum number of arguments that the author's calls pass. Further arguments that equal their
            defaults are left out, since a backward returns a gradient for each passed argument. None for all.
    """
    origin, schema = specification.origin, specification.schema
    parameters = list(forward_signature(origin.subject).parameters.values())

    @calls_operator
    def apply(*args: Any, **kwargs: Any) -> Any:
        values = list(origin.spread(schema.call_values(args, kwargs)))
        while most is not None and most < len(values) <= len(parameters):
            if values[-1] is not parameters[len(values) - 1].default:
                break
            values.pop()
        return origin.subject.apply(*values)

    return apply


def through_apply(subject: Subject) -> Subject | None:
    """The class of an adopted operator, called through its own `apply`; None if it can be checked itself.

    The operator copies the arguments that the class writes into, and takes fewer gradients than `apply`. A
    class adopted with a `kind=` is nevertheless checked by torch's contract, but through `apply` it would
    fail for the behavior that `kind=` declares.
    """
    specification = subject.specification
    promised = subject.apply is not None or specification.origin.claims <= {"true"}
    if promised or class_of(specification.origin).takes_self:
        return None
    return replace(subject, kind=FUNCTION_CLASS, apply=_apply_of(specification))


THROUGH_APPLY = "called"
"""Evidence of a failure of a class called through its own `apply`; the operator made of the class is
right."""


def of_own_apply(failure: Failure, subject: Subject) -> Failure:
    """The failure of a class called through its own `apply`, as a failure of the operator made of it."""
    call = f"`{subject.specification.qualname}.apply`"
    message = f"called through {call}: {failure.message}"
    return replace(failure, message=message, evidence={**failure.evidence, THROUGH_APPLY: call})


NAMESPACE = "checked"


def _as_operator(
    function_class: type[torch.autograd.Function], samples: GivenSamples, make: Make
) -> tuple[Operator[..., Any], int]:
    """The operator that represents a class in a check, and the maximum number of arguments of the author's
    calls.

    A second check of the class replaces this operator.
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
                hint=f"call `opsmith.check({called}, samples=[(x, 2.0)])`; `opsmith adopt FILE` guesses "
                "some samples",
            )
        for position, values in enumerate(read):
            refuse_unfit(position, value_names(function_class, len(values)), values, called, given.location)
        operator = adopt_function(
            function_class,
            name,
            reference=None,
            samples=replace(given, source=[tuple(values) for values in read]),
            signature=None,
            kind="true",
            opaque=False,
            module=__name__,
            run=_first_run,
            mutates=(),
        )
        return operator, max(map(len, read))
    except errors.OpsmithError as error:
        if error.operator == name:
            error.operator = None  # a temporary name, which users do not know
            error.of(called)
        raise


def throwaway_name(namespace: str, function_class: type) -> str:
    """An operator's name for a class that is adopted for one check; the name is the same each time.

    Example:
        >>> throwaway_name("checked", torch.autograd.Function)
        'checked::torch_autograd_function_Function_85d5be5a'
    """
    full = f"{function_class.__module__}.{function_class.__qualname__}"
    plain = re.sub(r"\W+", "_", full, flags=re.ASCII).strip("_")
    return f"{namespace}::{plain}_{zlib.crc32(full.encode()):08x}"


def _as_specification(operator: Any) -> Specification:
    """A specification in which the operator is its own reference.

    Args:
        operator: `torch.ops.ns.name`, one of its overloads, or a `torch.library.custom_op`.

    Raises:
        UsageError: If the operator has several overloads, or belongs to torch.
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


class ForwardRaisedError(Exception):
    """Error: a class's forward raises on every sample, or does not return; its results are unknown."""

    def __init__(self, failure: Failure) -> None:
        self.outcome = Outcome("forward", "failed", failures=(failure,))
        super().__init__(self.outcome)


def _learnt_from(operator: Operator[..., Any], samples: GivenSamples, seed: int) -> GivenSamples:
    """The samples as calls of an operator, which learns from them the facts that an adopted class shows in
    runs.

    Samples of other operators are returned unchanged.

    Raises:
        ForwardRaisedError: If forward does not return, or raises on a sample whose types no other sample
            shows.
    """
    if operator.specification.origin.kind != "class":
        return samples
    adopted = class_of(operator.specification.origin)
    if samples is not None:
        location = location_of(samples, GIVEN)
        with torch_seeded(seed):
            given = read_samples(samples, _make(seed), operator.name, location)
        if not adopted.provenance().stated:
            _show_types(operator, given)
        calls = [_packed(operator, each) for each in given]
        samples = LocatedSamples(lambda make: calls, location) if callable(samples) else calls
    if adopted.mutates is None and not adopted.facts.written_under and adopted.may_write:
        _show_writes(operator, samples, seed)
    return samples


def _show_types(operator: Operator[..., Any], samples: Sequence[Any]) -> None:
    """Call the operator on samples that do not fit, so that it learns their types, until none is new."""
    calls = [(position, call) for position, call in enumerate(map(_call_of, samples)) if call is not None]
    function_class, known = class_of(operator.specification.origin).function_class, None
    raised: dict[int, ForwardRaisedError] = {}
    while known is not operator.specification:
        known = operator.specification
        for position, call in calls:
            run = partial(_call_with_copies, operator, call)
            found = None if _fits(operator, call) else _attempt(function_class, position, call, run)
            if found is not None and not isinstance(found.__cause__, errors.ArgumentError):
                raised.setdefault(position, found)
    for position, call in calls:
        if position in raised and not _fits(operator, call):
            raise raised[position]


def _call_of(sample: Any) -> CallArguments | None:
    """The call of a sample; None if the sample is not a call of the operator."""
    if isinstance(sample, CallArguments):
        return sample
    if isinstance(sample, Tensor):
        return CallArguments((sample,))
    return CallArguments(tuple(sample)) if isinstance(sample, tuple | list) else None


def _fits(operator: Operator[..., Any], call: CallArguments) -> bool:
    adopted = class_of(operator.specification.origin)
    return call_error(*adopted.completed(call.args, call.kwargs), adopted.schema) is None


def _packed(operator: Operator[..., Any], sample: Any) -> Any:
    """A sample with the operator's arguments, if these contain forward's arguments in a different form."""
    adopted, call = class_of(operator.specification.origin), _call_of(sample)
    if call is None or (adopted.parameters.plain and not adopted.defaults):
        return sample
    return CallArguments(*adopted.completed(call.args, call.kwargs))


@calls_operator
def _call_with_copies(operator: Operator[..., Any], call: CallArguments) -> None:
    values = map_tensors(Tensor.clone, call.kwargs.values())
    with torch_state_restored(), torch.no_grad():
        operator(*map_tensors(Tensor.clone, call.args), **dict(zip(call.kwargs, values, strict=True)))


def _show_writes(operator: Operator[..., Any], samples: GivenSamples, seed: int) -> None:
    """Call a class that may write and has not run yet: a call shows the arguments that it marks as dirty."""
    adopted = class_of(operator.specification.origin)
    calls = _drawn(operator.specification, samples, seed, operator.name)
    given = [adopted.schema.call_values(call.args, call.kwargs) for call in calls]
    if not given:
        return
    try:
        position, returned = _first_run(adopted.function_class, [adopted.spread(values) for values in given])
        if returned.marked:
            call = CallArguments(tuple(given[position]))
            run = partial(_call_with_copies, operator, call)
            _attempt(adopted.function_class, position, call, run)
    except errors.OpsmithError:
        return  # the check reports it


def _first_run(
    function_class: type[torch.autograd.Function], samples: Sequence[Sequence[Any]]
) -> tuple[int, Returned]:
    """The first sample on which forward runs, and the returned value.

    Raises:
        ForwardRaisedError: If forward raises on each sample; with the error on the first sample.
    """
    raised: list[ForwardRaisedError] = []
    for position, values in enumerate(samples):
        own = [copied_object(each, None, None) if tensors_of_object(each) else each for each in values]
        call, run = CallArguments(tuple(values)), partial(returned_by, function_class, own)
        found = _attempt(function_class, position, call, run)
        if not isinstance(found, ForwardRaisedError):
            return position, found
        raised.append(found)
    raise raised[0]


def _attempt(
    function_class: type[torch.autograd.Function], position: int, call: CallArguments, run: Callable[[], T]
) -> T | ForwardRaisedError:
    """Run a class on a sample; return its results, or the error that it raises.

    Raises:
        ForwardRaisedError: If forward does not return.
    """
    location, watchdog = where(function_class.forward), watched_calls(returned_by.__code__)
    labels = [*value_names(function_class, len(call.args)), *call.kwargs]
    named = sample_named(position, labels, (*call.args, *call.kwargs.values()))
    announce(lambda: named)
    try:
        with watchdog:
            return run()
    except EndlessCallError as error:
        raise ForwardRaisedError(endless("forward", location, error, watchdog)) from error
    except BaseException as error:
        refuse_own(error)
        found = ForwardRaisedError(raised_at("forward", location, error, named))
        found.__cause__ = error
        return found
