"""Runs of an adopted class that show what its code does not say: types, results, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import errors
from opsmith.adopting.signature import value_names
from opsmith.checking.exceptions import calls_operator, refuse_own, watched_calls
from opsmith.checking.processes.fork import announce
from opsmith.checking.processes.watchdog import EndlessCallError
from opsmith.checking.property import endless, raised_at
from opsmith.checking.report import Outcome
from opsmith.checking.samples.given import GIVEN, GivenSamples, drawing, drawn
from opsmith.checking.samples.sample import sample_named
from opsmith.checking.side_effects.random_states import torch_state_restored
from opsmith.core.call_arguments import CallArguments, call_error
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.origins.function_class import class_of
from opsmith.core.samples import LocatedSamples, location_of, read_samples
from opsmith.core.tensors import map_tensors
from opsmith.torch_library.origins.forward import Returned, returned_by


class ForwardRaisedError(Exception):
    """A class's forward raises on every sample, or does not return, so that its results are unknown.

    Args:
        outcome: Outcome to report.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def learnt_from(operator: Operator[..., Any], samples: GivenSamples, seed: int) -> GivenSamples:
    """The samples as calls of an operator, which has learnt from them what an adopted class shows in runs.

    Args:
        operator: The operator; of any other one, the samples are returned as they are.
        samples: As of `check`.
        seed: Seed of all random numbers.

    Raises:
        SampleError: If they are not a list, or cannot be made.
        ForwardRaisedError: If forward raises on a sample whose types no other one shows, or does not return.
    """
    if operator.specification.origin.kind != "class":
        return samples
    adopted = class_of(operator.specification.origin)
    if samples is not None:
        location = location_of(samples, GIVEN)
        with drawing(seed) as make:
            given = read_samples(samples, make, operator.name, location)
        if not adopted.provenance().stated:
            _show_types(operator, given)
        calls = [_packed(operator, each) for each in given]
        samples = LocatedSamples(lambda make: calls, location) if callable(samples) else calls
    if adopted.mutates is None and not adopted.facts.written_under and adopted.may_write:
        _show_writes(operator, samples, seed)
    return samples


def _show_types(operator: Operator[..., Any], samples: Sequence[Any]) -> None:
    """Call the operator on samples that do not fit, until none shows new types: it learns them in calls."""
    calls = [(position, call) for position, call in enumerate(map(_call_of, samples)) if call is not None]
    function_class, known = class_of(operator.specification.origin).function_class, None
    raised: dict[int, tuple[str, BaseException]] = {}
    while known is not operator.specification:
        known = operator.specification
        for position, call in calls:
            if _fits(operator, call):
                continue
            labels = [*value_names(function_class, len(call.args)), *call.kwargs]
            named = sample_named(position, labels, (*call.args, *call.kwargs.values()))
            announce(partial(str, named))
            with _watched(function_class):
                try:
                    _call_with_copies(operator, call)
                except BaseException as error:
                    refuse_own(error)
                    if not isinstance(error, errors.ArgumentError):
                        raised.setdefault(position, (named, error))
    for position, call in calls:
        if position in raised and not _fits(operator, call):
            raise _forward_raised(function_class, *raised[position]) from raised[position][1]


def _call_of(sample: Any) -> CallArguments | None:
    """The call of a sample; None if it is none."""
    if isinstance(sample, CallArguments):
        return sample
    if isinstance(sample, Tensor):
        return CallArguments((sample,))
    return CallArguments(tuple(sample)) if isinstance(sample, tuple | list) else None


def _fits(operator: Operator[..., Any], call: CallArguments) -> bool:
    adopted = class_of(operator.specification.origin)
    return call_error(*adopted.completed(call.args, call.kwargs), adopted.schema) is None


def _packed(operator: Operator[..., Any], sample: Any) -> Any:
    """A sample with the operator's arguments, where these carry those of forward in another form."""
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
    """Call a class that may write, and was never run: a call shows what it marks as dirty."""
    adopted = class_of(operator.specification.origin)
    calls = drawn(operator.specification, samples, seed, operator.name)
    given = [adopted.schema.call_values(call.args, call.kwargs) for call in calls]
    if not given:
        return
    try:
        position, returned = first_run(adopted.function_class, [adopted.spread(values) for values in given])
        if returned.marked:
            with _watched(adopted.function_class):
                _call_with_copies(operator, CallArguments(tuple(given[position])))
    except errors.OpsmithError:
        return  # the check reports it


def first_run(
    function_class: type[torch.autograd.Function], samples: Sequence[Sequence[Any]]
) -> tuple[int, Returned]:
    """The first sample on which forward runs, and what it returns.

    Raises:
        ForwardRaisedError: With what it raises on the first, if it raises on each.
    """
    first: tuple[str, BaseException] | None = None
    with _watched(function_class):
        for position, values in enumerate(samples):
            named = sample_named(position, value_names(function_class, len(values)), values)
            announce(partial(str, named))
            try:
                return position, returned_by(function_class, values)
            except BaseException as error:
                refuse_own(error)
                first = first or (named, error)
    assert first is not None
    raise _forward_raised(function_class, *first) from first[1]


def _forward_raised(
    function_class: type[torch.autograd.Function], named: str, error: BaseException
) -> ForwardRaisedError:
    failure = raised_at("forward", where(function_class.forward), error, named)
    return ForwardRaisedError(Outcome("forward", "failed", failures=(failure,)))


@contextmanager
def _watched(function_class: type[torch.autograd.Function]) -> Iterator[None]:
    """A region in which a forward that does not return is stopped.

    Raises:
        ForwardRaisedError: If one was stopped.
    """
    watchdog = watched_calls(returned_by.__code__)
    try:
        with watchdog:
            yield
    except EndlessCallError as error:
        failure = endless("forward", where(function_class.forward), error, watchdog)
        raise ForwardRaisedError(Outcome("forward", "failed", failures=(failure,))) from error
