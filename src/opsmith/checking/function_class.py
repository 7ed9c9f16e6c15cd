"""A Function class under check: it is adopted under a name of its own, for the check alone."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.functions import adopt_function
from opsmith.adopting.sampling import Samples, class_samples
from opsmith.adopting.signature import forward_signature
from opsmith.checking.fitness import refuse_unfit
from opsmith.checking.isolation import announce
from opsmith.checking.mistakes import refuse_own
from opsmith.checking.property import raised_at
from opsmith.checking.report import Outcome
from opsmith.checking.sample import sample_named
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.samples import Make
from opsmith.torch_library.adopted.forward import returned_by

NAMESPACE = "checked"


class ForwardRaisedError(Exception):
    """A class's forward raises on every sample, so that nothing tells what it returns.

    Args:
        outcome: What is to be reported of it.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


def as_operator(
    function_class: type[torch.autograd.Function], samples: Samples, make: Make
) -> Operator[..., Any]:
    """The operator that a class is checked as; checking the class again replaces it.

    Args:
        function_class: The class.
        samples: Tuples of arguments as `apply` takes them, or a function that returns them.
        make: What makes tensors for such a function.

    Raises:
        MissingSamplesError: If there are none.
        SampleError: If one does not fit forward.
        ForwardRaisedError: If forward has to be run to know what it returns, and raises.
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
                mend=f"call `opsmith.check({called}, samples=[(x, 2.0)])`; `opsmith adopt FILE` guesses some",
            )
        for position, values in enumerate(read):
            refuse_unfit(position, labels_of(function_class, values), values, called, given.place)
        return adopt_function(
            function_class,
            name,
            reference=None,
            samples=replace(given, source=[tuple(values) for values in read]),
            signature=None,
            kind="true",
            opaque=False,
            module=__name__,
            run=_returned,
        )
    except errors.OpsmithError as error:
        if error.operator != name:
            raise
        raise _about(error, called) from error


def _returned(
    function_class: type[torch.autograd.Function], samples: Sequence[Sequence[Any]]
) -> tuple[int, Any]:
    """The first sample on which forward runs, and what it returns.

    Raises:
        ForwardRaisedError: With what it raises on the first, if it raises on each.
    """
    first: tuple[str, BaseException] | None = None
    for position, values in enumerate(samples):
        named = sample_named(position, labels_of(function_class, values), values)
        announce(partial(str, named))
        try:
            return position, returned_by(function_class, values)
        except BaseException as error:
            refuse_own(error)
            first = first or (named, error)
    assert first is not None
    failure = raised_at("forward", where(function_class.forward), first[1], first[0])
    raise ForwardRaisedError(Outcome("forward", "failed", failures=(failure,))) from first[1]


def labels_of(function_class: type[torch.autograd.Function], values: Sequence[Any]) -> list[str]:
    """What forward calls each of the values that it is given; those of `*xs` are `xs[0]`, `xs[1]`, ..."""
    parameters = list(forward_signature(function_class).parameters.values())[: len(values)]
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        rest = len(values) - len(parameters) + 1
        names = [each.name for each in parameters[:-1]]
        return [*names, *(f"{parameters[-1].name}[{place}]" for place in range(rest))]
    return [each.name for each in parameters]


def _about(error: errors.OpsmithError, operator: str) -> errors.OpsmithError:
    """The same error, about what the user knows by this name."""
    return type(error)(
        error.problem,
        operator=operator,
        argument=error.argument,
        expected=error.expected,
        got=error.got,
        where=error.where,
        mend=error.mend,
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
