"""Adopting an `autograd.Function` class: its specification and its handle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from opsmith import errors
from opsmith.adopting.adopted_operator import AdoptedOperator
from opsmith.adopting.class_samples import ClassSamples, Samples, class_samples
from opsmith.adopting.class_specification import flat_reference, specification_of
from opsmith.adopting.learned_types import placeholder
from opsmith.adopting.outputs import outputs_of
from opsmith.adopting.signature import (
    Signature,
    arguments_of,
    resolved,
    stated_signature,
    without_defaults,
)
from opsmith.core.location import where
from opsmith.core.operator import Operator
from opsmith.core.origins.function_class import (
    KINDS,
    AdoptedFunction,
    Adoption,
    overrides,
)
from opsmith.core.results import Result
from opsmith.core.samples import (
    Make,
)
from opsmith.core.schema import REQUIRED, Argument, Schema, with_aliases
from opsmith.declaration import check_flag, check_name, declare_specified
from opsmith.torch_library.origins.class_routes import ClassRoutes
from opsmith.torch_library.origins.class_rule import ClassRule
from opsmith.torch_library.origins.forward import Returned, forward_function, returned_by, writing_forward

Runner = Callable[[type[torch.autograd.Function], Sequence[Sequence[Any]]], tuple[int, Returned]]


def is_function_class(subject: Any) -> TypeGuard[type[torch.autograd.Function]]:
    """Return True for a class derived from `torch.autograd.Function`."""
    return isinstance(subject, type) and issubclass(subject, torch.autograd.Function)


def first_returned(
    function_class: type[torch.autograd.Function], samples: Sequence[Sequence[Any]]
) -> tuple[int, Returned]:
    """Return 0, and the value that forward returns for the first sample."""
    return 0, returned_by(function_class, samples[0])


def adopt_function(
    function_class: type[torch.autograd.Function],
    name: str,
    *,
    reference: Callable[..., Any] | None,
    samples: Samples | ClassSamples,
    signature: Signature,
    kind: str | Iterable[str],
    opaque: bool,
    module: str,
    run: Runner = first_returned,
    deterministic: bool = True,
    accept: Mapping[tuple[str, ...], str] | None = None,
    mutates: str | Iterable[str] | None = None,
) -> Operator[..., Any]:
    """Make an operator of a Function class, which is not changed; see `opsmith.adopt`.

    `run` returns the index of a sample and the value of forward for it, if the results must be observed.
    """
    check_name(name, hint='write `opsmith.adopt(MyFunction, "mylib::my_function")`')
    check_flag(name, "deterministic", deterministic, (True, False))
    _refuse_unfit(function_class, name)
    kinds, given = _kinds(kind, name), class_samples(samples, function_class, name, "adopt")
    with errors.about(name, where(function_class.forward)):
        written = (mutates,) if isinstance(mutates, str) else mutates if mutates is None else tuple(mutates)
        adopted = _describe(function_class, name, kinds, reference, given, signature, run, written)
    specification = specification_of(adopted, given, module, opaque=opaque)
    specification = replace(specification, deterministic=deterministic, accept=dict(accept or {}))
    return declare_specified(specification, AdoptedOperator)


def _describe(
    function_class: type[torch.autograd.Function],
    name: str,
    kinds: frozenset[str],
    reference: Callable[..., Any] | None,
    samples: ClassSamples | None,
    signature: Signature,
    run: Runner,
    mutates: tuple[str, ...] | None,
) -> AdoptedFunction:
    """Describe a class as an operator: its arguments and results, from all declarations of its author."""
    stated = stated_signature(signature, name)
    calls = [] if samples is None else samples.values(Make())
    arguments, parameters = arguments_of(function_class, stated, calls)
    others = [resolved(each) for each in (reference, function_class.forward) if callable(each)]
    hints = [each.return_annotation for each in others]
    observe = (lambda: run(function_class, calls)) if calls else None
    arguments, defaults = without_defaults(arguments, parameters)
    declared = inspect.Signature.empty if stated is None else stated.return_annotation
    with_aliases(arguments, mutates or ())  # refuses names of arguments that cannot be written
    outputs, results = outputs_of(function_class, declared, hints, observe, parameters, mutates)
    if not calls:
        arguments = _given_tensors(arguments, results, known=resolved(function_class.forward).parameters)
    schema = Schema(arguments, results, single=outputs == 0)
    shown = tuple(tuple(map(placeholder, values)) for values in calls)
    adoption = Adoption(stated is not None, reference, samples, shown, ran=bool(calls))
    if reference is not None:
        reference = flat_reference(reference, schema, outputs, parameters, name)
    return AdoptedFunction(
        name,
        schema,
        function_class,
        outputs,
        kinds,
        parameters,
        reference,
        defaults,
        mutates,
        provenance=lambda: adoption,
        makers=(forward_function, writing_forward),
        rule=ClassRule,
        routes=ClassRoutes,
    )


def _given_tensors(
    arguments: tuple[Argument, ...], results: Sequence[Result], known: Mapping[str, inspect.Parameter]
) -> tuple[Argument, ...]:
    """Return the arguments; a written one is a plain tensor if nothing shows that it may be None."""
    written = {each.written for each in results}
    return tuple(
        replace(each, kind=replace(each.kind, optional=False))
        if each.name in written
        and each.name in known
        and known[each.name].annotation is REQUIRED
        and each.default is REQUIRED
        else each
        for each in arguments
    )


def _kinds(kind: str | Iterable[str], operator: str) -> frozenset[str]:
    given: Any = [kind] if isinstance(kind, str) else kind
    kinds: frozenset[Any] = frozenset(given) if isinstance(given, Iterable) else frozenset()
    if not kinds or kinds - set(KINDS):
        raise errors.UsageError(
            "unknown kind of Function",
            operator=operator,
            argument="kind",
            expected="one or more of " + ", ".join(f"`{known}`" for known in KINDS),
            got=repr(kind),
            hint='leave `kind=` out if the gradient is the derivative, or write `kind="surrogate"`',
        )
    return kinds


def keeps_state_in_init(function_class: type[torch.autograd.Function]) -> bool:
    """Return True if a class has its own `__init__`, and methods that take the instance as `self`.

    `apply` makes no instance, so a static or class method cannot depend on `__init__`. torch's own
    `InplaceFunction` has an `__init__`, too.
    """
    own = inspect.getattr_static(function_class, "__init__")
    if own in (torch.autograd.Function.__init__, torch.autograd.function.InplaceFunction.__init__):
        return False
    return inspect.isfunction(inspect.getattr_static(function_class, "forward"))


def _refuse_unfit(function_class: Any, operator: str) -> None:
    def refused(what: str, hint: str) -> errors.UsageError:
        return errors.UsageError(
            f"`{function_class.__qualname__}` {what}", operator=operator, argument="subject", hint=hint
        )

    if not overrides(function_class, "forward"):
        raise refused("has no `forward`", "write `forward(ctx, x)` as a static method")
    if keeps_state_in_init(function_class):
        raise refused(
            "has an `__init__`, but `apply` has not called it since torch 1.3",
            "pass the arguments of `__init__` to `forward` instead",
        )
