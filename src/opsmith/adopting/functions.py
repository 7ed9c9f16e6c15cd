"""Adopting an `autograd.Function` class: from its two methods to an operator like any other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch

from opsmith import errors
from opsmith.adopting.operator import AdoptedOperator
from opsmith.adopting.outputs import outputs_of
from opsmith.adopting.sampling import ClassSamples, Samples, class_samples
from opsmith.adopting.signature import Signature, arguments_of, resolved, stated_signature, without_defaults
from opsmith.core.adopted import KINDS, Adopted, overrides
from opsmith.core.answers import non_differentiable, not_implemented
from opsmith.core.attaching import check_attached
from opsmith.core.calls import Call
from opsmith.core.gradients import GradientRules, Rule
from opsmith.core.operator import Operator
from opsmith.core.outputs import Outputs, leaves, side_by_side
from opsmith.core.results import Result
from opsmith.core.samples import Make, Placed
from opsmith.core.schema import Schema
from opsmith.core.specification import Specification
from opsmith.core.tangents import TangentRule, TangentRules
from opsmith.declaring import check_name, declare_specified
from opsmith.torch_library.adopted.fallback import declare_opaque
from opsmith.torch_library.adopted.formula import gradient_formula, tangent_formula
from opsmith.torch_library.adopted.forward import as_function, returned_by

Runner = Callable[[type[torch.autograd.Function], Sequence[Sequence[Any]]], tuple[int, Any]]


def first_returned(
    function_class: type[torch.autograd.Function], samples: Sequence[Sequence[Any]]
) -> tuple[int, Any]:
    """0, and what a class's forward returns for the first of the samples."""
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
) -> Operator[..., Any]:
    """Make an operator of a Function class, which stays as it is; see `opsmith.adopt`.

    `run` tells for which sample forward returns what, where only a run tells what it returns.
    """
    check_name(name, hint='write `opsmith.adopt(MyFunction, "mylib::my_function")`')
    _refuse_unfit(function_class, name)
    kinds, given = _kinds(kind, name), class_samples(samples, function_class, name, "adopt")
    adopted = _describe(function_class, name, kinds, reference, given, signature, run)
    specification = _specification(adopted, given, module, opaque=opaque)
    return declare_specified(specification, AdoptedOperator)


def _describe(
    function_class: type[torch.autograd.Function],
    name: str,
    kinds: frozenset[str],
    reference: Callable[..., Any] | None,
    samples: ClassSamples | None,
    signature: Signature,
    run: Runner,
) -> Adopted:
    """What a class is as an operator: its arguments and results, from all that its author has said."""
    stated = stated_signature(signature, name)
    calls = [] if samples is None else samples.values(Make())
    arguments, variadic = arguments_of(function_class, stated, calls, name)
    others = [resolved(each) for each in (reference, function_class.forward) if callable(each)]
    hints = [each.return_annotation for each in others]
    look = (lambda: run(function_class, calls)) if calls else None
    arguments, defaults = without_defaults(arguments)
    said = inspect.Signature.empty if stated is None else stated.return_annotation
    outputs, optional = outputs_of(function_class, said, hints, look, name)
    schema = Schema(arguments, _results(outputs, optional), single=outputs == 0)
    if reference is not None:
        reference = _as_reference(reference, schema, outputs, variadic, name)
    return Adopted(name, schema, function_class, outputs, kinds, variadic, reference, defaults)


def _specification(
    adopted: Adopted, samples: ClassSamples | None, module: str, *, opaque: bool
) -> Specification:
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


def _packed(samples: ClassSamples, adopted: Adopted) -> Placed:
    """Samples as calls of the operator, whose last argument takes what `*args` took."""

    def packed(make: Make) -> Iterable[Any]:
        return [Call(tuple(adopted.packed(values))) for values in samples.values(make)]

    return Placed(packed, samples.place)


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
            hint='leave it out where the gradient is the derivative, or write `kind="surrogate"`',
        )
    return kinds


def _refuse_unfit(function_class: Any, operator: str) -> None:
    def refused(what: str, hint: str) -> errors.UsageError:
        return errors.UsageError(
            f"`{function_class.__qualname__}` {what}", operator=operator, argument="subject", hint=hint
        )

    if not overrides(function_class, "forward"):
        raise refused("has no `forward`", "write `forward(ctx, x)` as a static method")
    if inspect.getattr_static(function_class, "__init__") is not torch.autograd.Function.__init__:
        raise refused(
            "has an `__init__`, whose state torch's `apply` has not taken since 1.3",
            "give what it is made with to `forward` as arguments",
        )
