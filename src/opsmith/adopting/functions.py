"""Adopting an `autograd.Function` class: from its two methods to an operator like any other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.operator import AdoptedOperator
from opsmith.adopting.outputs import outputs_of
from opsmith.adopting.signature import (
    Signature,
    arguments_of,
    forward_signature,
    resolved,
    stated_signature,
    without_defaults,
)
from opsmith.core.adopted import KINDS, Adopted, overrides
from opsmith.core.answers import non_differentiable, not_implemented
from opsmith.core.attaching import check_attached
from opsmith.core.calls import Call
from opsmith.core.gradients import GradientRules, Rule
from opsmith.core.operator import Operator
from opsmith.core.outputs import Outputs, leaves, side_by_side
from opsmith.core.results import Result
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.core.tangents import TangentRule, TangentRules
from opsmith.declaring import check_name, declare_specified
from opsmith.torch_library.adopted.fallback import declare_opaque
from opsmith.torch_library.adopted.formula import gradient_formula, tangent_formula
from opsmith.torch_library.adopted.forward import as_function, returned_by

Called = Callable[[], Iterable[Any]] | None
Samples = Callable[[], Iterable[Any]] | Iterable[Any] | None


def adopt_function(
    function_class: type[torch.autograd.Function],
    name: str,
    *,
    reference: Callable[..., Any] | None,
    samples: Samples,
    signature: Signature,
    kind: str | Iterable[str],
    opaque: bool,
    module: str,
) -> Operator[..., Any]:
    """Make an operator of a Function class, which stays as it is; see `opsmith.adopt`."""
    check_name(name, mend='write `opsmith.adopt(MyFunction, "mylib::my_function")`')
    _refuse_unfit(function_class, name)
    kinds, samples = _kinds(kind, name), called(samples)
    adopted = _describe(function_class, name, kinds, reference, samples, signature)
    specification = _specification(adopted, samples, module, opaque=opaque)
    return declare_specified(specification, AdoptedOperator)


def _describe(
    function_class: type[torch.autograd.Function],
    name: str,
    kinds: frozenset[str],
    reference: Callable[..., Any] | None,
    samples: Called,
    signature: Signature,
) -> Adopted:
    """What a class is as an operator: its arguments and results, from all that its author has said."""
    stated = stated_signature(signature, name)
    calls = [_values_of(sample, function_class) for sample in samples()] if samples is not None else []
    arguments, variadic = arguments_of(function_class, stated, calls, name)
    others = [resolved(each) for each in (reference, function_class.forward) if callable(each)]
    hints = [each.return_annotation for each in others]
    run = (lambda: returned_by(function_class, calls[0])) if calls else None
    arguments, defaults = without_defaults(arguments)
    said = inspect.Signature.empty if stated is None else stated.return_annotation
    outputs, optional = outputs_of(function_class, said, hints, run, name)
    schema = Schema(arguments, _results(outputs, optional), single=outputs == 0)
    if reference is not None:
        reference = _as_reference(reference, schema, outputs, variadic, name)
    return Adopted(name, schema, function_class, outputs, kinds, variadic, reference, defaults)


def _values_of(sample: Any, function_class: type[torch.autograd.Function]) -> list[Any]:
    """The arguments of one sample, as forward takes them."""
    if isinstance(sample, Call):
        bound = forward_signature(function_class).bind(*sample.args, **sample.kwargs)
        bound.apply_defaults()
        return list(bound.args)
    return list(sample) if isinstance(sample, tuple | list) else [sample]


def _specification(adopted: Adopted, samples: Called, module: str, *, opaque: bool) -> Specification:
    function_class = adopted.function_class
    forward = as_function(adopted)
    if opaque:
        declare_opaque(adopted)
    return Specification(
        name=adopted.operator,
        reference=adopted.reference or forward,
        schema=adopted.schema,
        module=module,
        qualname=function_class.__qualname__,
        where=adopted.where,
        opaque=opaque and adopted.reference is None,
        random=adopted.random,
        gradients=GradientRules(MappingProxyType(_gradients(adopted)), surrogate=adopted.surrogate),
        tangents=TangentRules(MappingProxyType(_tangents(adopted))),
        samples=None if samples is None else _packed(samples, adopted),
        adopted=adopted,
        forward=forward,
    )


def _gradients(adopted: Adopted) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    if adopted.backward is not None:
        rules = dict.fromkeys(adopted.differentiable, gradient_formula(adopted))
    constants = set(adopted.schema.tensor_names) - set(adopted.differentiable)
    return rules | dict.fromkeys(constants, non_differentiable)


def _tangents(adopted: Adopted) -> dict[str, TangentRule]:
    results = [result.name for result in adopted.schema.results if result.differentiable]
    if adopted.random:
        why = "its forward draws random numbers, and forward mode would have to run it again and draw others"
        return dict.fromkeys(results, not_implemented(why))
    formula = tangent_formula(adopted)
    if formula is not None:
        return dict.fromkeys(results, formula)
    if "nonlinear" in adopted.kinds:
        why = (
            "its backward is not linear in the incoming gradient, so nothing follows from it for forward mode"
        )
        return dict.fromkeys(results, not_implemented(why))
    return {}


def _results(outputs: Outputs, optional: tuple[bool, ...]) -> tuple[Result, ...]:
    """The results; what `forward` returns in a tuple inside of its tuple has no gradient in torch either."""
    top = side_by_side(outputs)
    names = ["result"] if len(optional) == 1 else [f"result{position}" for position in range(len(optional))]
    return tuple(
        Result(name, differentiable=position in top, optional=absent)
        for position, (name, absent) in enumerate(zip(names, optional, strict=True))
    )


def _as_reference(
    reference: Callable[..., Any], schema: Schema, outputs: Outputs, variadic: bool, operator: str
) -> Callable[..., Any]:
    """A reference that takes the operator's arguments and returns its results in a row."""
    flat = not isinstance(outputs, tuple) or outputs == tuple(range(len(outputs)))
    if not variadic or not callable(reference):
        check_attached(reference, "the reference", schema, operator)
        if flat:
            return reference

    @functools.wraps(reference)
    def in_a_row(*values: Any) -> Any:
        given = [*values[:-1], *values[-1]] if variadic else values
        returned = reference(*given)
        parts = leaves(outputs, returned)
        return returned if flat else tuple(value for position, value in parts if position is not None)

    return in_a_row


def _packed(samples: Callable[[], Iterable[Any]], adopted: Adopted) -> Callable[[], Iterable[Any]]:
    """Samples as calls of the operator, whose last argument takes what `*args` took."""

    function_class = adopted.function_class

    def packed() -> Iterable[Any]:
        return [Call(tuple(adopted.packed(_values_of(sample, function_class)))) for sample in samples()]

    return packed


def called(samples: Samples) -> Called:
    """Samples as a function that returns them; a list of them does as well."""
    if samples is None or callable(samples):
        return samples
    listed = list(samples)
    return lambda: listed


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
            mend='leave it out where the gradient is the derivative, or write `kind="surrogate"`',
        )
    return kinds


def _refuse_unfit(function_class: Any, operator: str) -> None:
    def refused(what: str, mend: str) -> errors.UsageError:
        return errors.UsageError(
            f"`{function_class.__qualname__}` {what}", operator=operator, argument="subject", mend=mend
        )

    if not overrides(function_class, "forward"):
        raise refused("has no `forward`", "write `forward(ctx, x)` as a static method")
    if inspect.getattr_static(function_class, "__init__") is not torch.autograd.Function.__init__:
        raise refused(
            "has an `__init__`, whose state torch's `apply` has not taken since 1.3",
            "give what it is made with to `forward` as arguments",
        )
