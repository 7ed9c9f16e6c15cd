"""Adopting an `autograd.Function` class: its specification and its handle."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.adopting.class_samples import ClassSamples, Samples, class_samples
from opsmith.adopting.outputs import learned_outputs, outputs_of
from opsmith.adopting.signature import (
    Signature,
    arguments_of,
    forward_signature,
    resolved,
    stated_signature,
    without_defaults,
)
from opsmith.core.adopted import (
    KINDS,
    AdoptedFunction,
    ClassFormula,
    ObservedFacts,
    ObservedReturn,
    Origin,
    Outputs,
    leaves,
    note,
    overrides,
)
from opsmith.core.argument_types import VALUE_TYPES
from opsmith.core.call_arguments import CallArguments, check_attached
from opsmith.core.forked_locks import lock_of
from opsmith.core.formula import non_differentiable, not_implemented
from opsmith.core.forward_arguments import ForwardArguments
from opsmith.core.functional_form import all_results, copied_back, functional_name
from opsmith.core.gradients import GradientRules, Rule, TangentRule, TangentRules
from opsmith.core.location import where
from opsmith.core.operator import DerivedOperator, Operator, Registration
from opsmith.core.results import Result
from opsmith.core.samples import (
    LocatedSamples,
    Make,
)
from opsmith.core.schema import REQUIRED, Argument, Schema, with_aliases
from opsmith.core.specification import Specification
from opsmith.declaration import check_flag, check_name, declare_specified
from opsmith.torch_library.adopted.fallback import declare_opaque
from opsmith.torch_library.adopted.forward import Returned, forward_function, returned_by, writing_forward
from opsmith.torch_library.adopted.gradients import gradient_formula, tangent_formula
from opsmith.torch_library.in_place import register_operator

if TYPE_CHECKING:
    from opsmith.core.explanation import Explanation


_LEARNING = lock_of(sys.modules[__name__], "_LEARNING")
_MISFITS = (errors.ArgumentError, errors.ResultTypeError, errors.ResultCountError)


def _is_of_class(rule: Rule) -> bool:
    return isinstance(rule, ClassFormula) or rule is non_differentiable


class AdoptedOperator(Operator[..., Any]):
    """Handle of an adopted Function class, with the arguments and results of `apply`."""

    _form: Operator[..., Any] | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator; a call that shows other types or results than were assumed changes them."""
        if torch.compiler.is_compiling():
            return self._computed(args, kwargs)
        try:
            return self.learning(self._computed, args, kwargs)
        except errors.MutationError as refusal:
            results = self._marking_nothing(args, kwargs) if refusal.operator == self.name else None
            if results is None:
                raise
            return results

    def _marking_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute on copies a call that must not write, as on a leaf, and note that its flags mark nothing.

        Return None if they mark something, or earlier runs have shown what they mark.
        """
        adopted = self._specification.adopted
        if adopted is None or not adopted.schema.new_values:
            return None
        try:
            flags = adopted.flags_of(*adopted.completed(args, kwargs))
            if not _has_flag(flags) or not adopted.leaves_alone(flags, unknown=True):
                return None
            results = self.functional(*args, **kwargs)
        except errors.OpsmithError:
            return None
        if not adopted.leaves_alone(flags, unknown=False):
            return None
        self._note_flags(args, kwargs)
        return results

    def learning(
        self,
        compute: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute a call of the operator or its functional form, and take over what it shows."""
        before, first = self._specification, None
        while True:
            tried = self._specification
            try:
                results = compute(args, kwargs)
            except errors.OpsmithError as error:
                first = first or error
                own = error.operator in (self.name, functional_name(self.name))
                misfit = isinstance(error, _MISFITS) and own
                found: ObservedReturn | None = getattr(error, "observed", None)
                # Where there is nothing new, another thread may have learnt it in the meantime.
                if misfit and (self._learn(args, kwargs, found) or self._specification is not tried):
                    continue
                if misfit and found is not None and found.unmarked:
                    self._note_flags(args, kwargs)
                    continue
                self._unlearn(before)
                raise first from None
            except Exception:
                self._unlearn(before)
                raise
            adopted = self._specification.adopted
            if adopted is not None and adopted.origin.unseen and not adopted.facts.seen:
                self._learn(args, kwargs, None)
                adopted.facts.seen = True
            return results

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        adopted = self._specification.adopted
        if adopted is None:
            return super().__call__(*args, **kwargs)
        args, kwargs = adopted.completed(args, kwargs)
        schema = self._specification.schema
        if schema.written and adopted.facts.chosen and adopted.writes_nothing(args, kwargs):
            return (self._form or self.functional)(*args, **kwargs)
        results = super().__call__(*args, **kwargs)
        if not schema.written:
            return adopted.structured(results if isinstance(results, tuple) else (results,))
        new = all_results(schema, schema.call_values(args, kwargs), results)
        return adopted.structured(new)

    def redeclare(
        self, specification: Specification, register: Callable[[Specification], Registration] | None = None
    ) -> None:
        """Become another operator of the same name; see `Operator.redeclare`."""
        super().redeclare(specification, register)
        chosen = specification.adopted is not None and specification.adopted.facts.chosen
        self._form = self.functional if chosen and specification.schema.written else None

    def _note_flags(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the flags of a call in place that has marked nothing: later ones are not done in place."""
        with _LEARNING:  # another thread may be replacing the facts
            adopted = self._specification.adopted
            if adopted is not None and self._specification.schema.written:
                flags = adopted.flags_of(*adopted.completed(args, kwargs))
                note(adopted.facts.dirty_under, flags, frozenset())
                self._form = self.functional  # found here, since compiled code takes no locks
                adopted.facts.chosen = True

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], observed: ObservedReturn | None) -> bool:
        """Take over the types and results of a call; return False if they show nothing new."""
        with _LEARNING:
            adopted = self._specification.adopted
            learned = None if adopted is None else learned_from(adopted, args, kwargs, observed)
            if learned is None:
                return False
            gradients, tangents = self._specification.gradients, self._specification.tangents
            by_class = _gradients(learned)
            kept = {
                name: rule
                for name, rule in gradients.rules.items()
                if not _is_of_class(rule) and name in by_class
            }
            specification = replace(
                self._specification,
                **_computing(learned),
                gradients=replace(gradients, rules=MappingProxyType({**by_class, **kept})),
                tangents=replace(tangents, rules=MappingProxyType(_tangents(learned))),
                samples=self._specification.samples
                if learned.origin.samples is None
                else _packed(learned.origin.samples, learned),
            )
            self.redeclare(specification, register_operator)
            return True

    def _unlearn(self, before: Specification) -> None:
        """Forget what a call showed that then failed."""
        with _LEARNING:
            if self._specification is not before:
                self.redeclare(before, register_operator)

    def explain(self, /, *args: Any, **kwargs: Any) -> Explanation:
        """Explain a call without running it."""
        adopted = self._specification.adopted
        args, kwargs = (args, kwargs) if adopted is None else adopted.completed(args, kwargs)
        return super().explain(*args, **kwargs)

    def _fallback(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return AdoptedOperator.__call__(self, *args, **kwargs)

    @property
    def derived_kind(self) -> type[DerivedOperator[..., Any]]:
        """The class of the handle of its functional form."""
        return AdoptedFunctionalForm

    def _call_hint(self) -> str:
        call = self._specification.schema.call_text(self._specification.short_name)
        hint = '`adopt(..., signature="(x: Tensor, n: int) -> Tensor")`'
        return f"call it as {call}; if its types are others, declare them: {hint}"

    @property
    def function_class(self) -> type[torch.autograd.Function] | None:
        """The class; None after the operator was declared again as another one."""
        adopted = self._specification.adopted
        return None if adopted is None else adopted.function_class


class AdoptedFunctionalForm(DerivedOperator[..., Any]):
    """Handle of the functional form of an adopted class: it returns what `apply` does, on copies."""

    _owner: AdoptedOperator

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute the functional form."""
        if torch.compiler.is_compiling():
            return self._computed(args, kwargs)
        return self._owner.learning(self._computed, args, kwargs)

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        adopted = self._owner.specification.adopted
        assert adopted is not None
        if not adopted.schema.new_values:  # a call has shown that it writes nothing
            return self._owner(*args, **kwargs)
        args, kwargs = adopted.completed(args, kwargs)
        results = super().__call__(*args, **kwargs)
        return adopted.structured(results if isinstance(results, tuple) else (results,))

    def _fallback(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return AdoptedFunctionalForm.__call__(self, *args, **kwargs)


Runner = Callable[[type[torch.autograd.Function], Sequence[Sequence[Any]]], tuple[int, Returned]]


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
    specification = _specification(adopted, given, module, opaque=opaque)
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
    """Describe a class as an operator: its arguments and results, from all that its author declared."""
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
    shown = tuple(tuple(map(_placeholder, values)) for values in calls)
    origin = Origin(stated is not None, reference, samples, shown, ran=bool(calls))
    if reference is not None:
        reference = _as_reference(reference, schema, outputs, parameters, name)
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
        provenance=lambda: origin,
    )


def _given_tensors(
    arguments: tuple[Argument, ...], results: Sequence[Result], known: Mapping[str, inspect.Parameter]
) -> tuple[Argument, ...]:
    """Return the arguments, those that are written as tensors if nothing shows that they may be None."""
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


def learned_from(
    adopted: AdoptedFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    observed: ObservedReturn | None = None,
) -> AdoptedFunction | None:
    """Return the class with the types and results that a call shows, too; None if these are not new.

    The author's `signature=` is never changed.
    """
    origin, facts = adopted.origin, adopted.facts
    outputs, results = adopted.outputs, adopted.schema.results
    arguments, parameters, defaults = adopted.schema.arguments, adopted.parameters, adopted.defaults
    ran = origin.ran or facts.written is not None
    if observed is not None:
        certain = ran or origin.stated or adopted.mutates is not None
        learned = learned_outputs(
            outputs,
            results,
            observed.structure,
            adopted.schema.names,
            certain=certain,
            flagged=any(map(_has_flag, tuple(facts.dirty_under))),  # which other threads change
        )
        if learned is None or (origin.stated and _optional_results(learned[1]) != _optional_results(results)):
            return None
        (outputs, results), ran = learned, True
    elif origin.stated:
        return None
    else:
        if not parameters.plain and parameters.are_packed(args, kwargs):
            args, kwargs = tuple(parameters.spread(adopted.schema.call_values(args, kwargs))), {}
        try:
            bound = forward_signature(adopted.function_class).bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        origin = replace(origin, observed=(*origin.observed, tuple(map(_placeholder, bound.args))))
        found, parameters = arguments_of(adopted.function_class, None, origin.observed)
        arguments, defaults = without_defaults(found, parameters)
    schema = Schema(arguments, results, single=outputs == 0)
    if (schema, parameters, outputs) == (adopted.schema, adopted.parameters, adopted.outputs):
        return None
    reference, final = origin.reference, replace(origin, ran=ran)
    if reference is not None:
        reference = _as_reference(reference, schema, outputs, parameters, adopted.operator)
    return replace(
        adopted,
        schema=schema,
        outputs=outputs,
        parameters=parameters,
        reference=reference,
        defaults=defaults,
        facts=ObservedFacts(
            dirty_under=facts.dirty_under, keeps_under=facts.keeps_under, chosen=facts.chosen
        ),
        provenance=lambda: final,
    )


def _has_flag(flags: tuple[Any, ...]) -> bool:
    """Return True if an argument is a flag: a bool, a text or None."""
    return any(value not in (..., torch.Tensor) for value in flags)


def _optional_results(results: Sequence[Result]) -> list[bool]:
    """Return for each result True if it may be None: no call changes more of `signature=` than writes."""
    return sorted(each.optional for each in results)


_SOME_TENSOR = torch.empty(0)
_SOME_OBJECT = object()


def _placeholder(value: Any) -> Any:
    """Return a value of the same type that keeps neither a tensor nor an object alive."""
    if isinstance(value, torch.Tensor):
        return _SOME_TENSOR
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_placeholder, value))
    if type(value) in (list, tuple):
        return type(value)(map(_placeholder, value))
    if type(value) is dict:
        return {key: _placeholder(item) for key, item in value.items()}
    return value if value is None or isinstance(value, _KEPT) else _SOME_OBJECT


_KEPT = (*(kind for kind in VALUE_TYPES if kind is not torch.Tensor), torch.Size, Enum)


def _specification(
    adopted: AdoptedFunction, samples: ClassSamples | None, module: str, *, opaque: bool
) -> Specification:
    function_class = adopted.function_class
    if opaque:
        declare_opaque(adopted)
    return Specification(
        name=adopted.operator,
        **_computing(adopted),
        module=module,
        qualname=function_class.__qualname__,
        where=adopted.where,
        opaque=opaque and adopted.reference is None,
        random=adopted.random,
        gradients=GradientRules(MappingProxyType(_gradients(adopted)), surrogate=adopted.surrogate),
        tangents=TangentRules(MappingProxyType(_tangents(adopted))),
        samples=None if samples is None else _packed(samples, adopted),
    )


def _computing(adopted: AdoptedFunction) -> dict[str, Any]:
    """Return the parts of a specification that compute a class, in place if it writes into arguments."""
    forward, schema, reference = forward_function(adopted), adopted.call_schema, adopted.reference
    if not schema.written:
        return {
            "schema": schema,
            "adopted": adopted,
            "forward": forward,
            "functional_forward": None,
            "reference": reference or forward,
        }
    writes = writing_forward(adopted)
    return {
        "schema": schema,
        "adopted": adopted,
        "forward": writes,
        "functional_forward": forward,
        "reference": writes if reference is None else copied_back(reference, schema),
    }


def _gradients(adopted: AdoptedFunction) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    if adopted.backward is not None:
        rules = dict.fromkeys(adopted.differentiable, gradient_formula(adopted))
    constants = set(adopted.schema.tensor_names) - set(adopted.differentiable)
    return rules | dict.fromkeys(constants, non_differentiable)


def _tangents(adopted: AdoptedFunction) -> dict[str, TangentRule]:
    results = [result.name for result in adopted.schema.results if result.differentiable]
    if adopted.random:
        why = "its forward draws random numbers, and forward mode would have to run it again and draw others"
        return dict.fromkeys(results, not_implemented(why))
    formula = tangent_formula(adopted)
    if formula is not None:
        return dict.fromkeys(results, formula)
    if "nonlinear" in adopted.kinds:
        why = "its backward is not linear in grad_output, so forward mode cannot be derived from it"
        return dict.fromkeys(results, not_implemented(why))
    return {}


def _as_reference(
    reference: Callable[..., Any],
    schema: Schema,
    outputs: Outputs,
    parameters: ForwardArguments,
    operator: str,
) -> Callable[..., Any]:
    """Return a reference with the operator's arguments that returns its results in a flat tuple."""
    flat = not isinstance(outputs, tuple) or outputs == tuple(range(len(outputs)))  # in the same order
    if parameters.plain or not callable(reference):
        check_attached(reference, "the reference", schema, operator)
        if flat:
            return reference

    @functools.wraps(reference)
    def flattened(*values: Any) -> Any:
        returned = reference(*parameters.spread(values))
        parts = leaves(outputs, returned)
        found = {position: value for position, value in parts if position is not None}
        return returned if flat else tuple(found[position] for position in range(len(found)))

    return flattened


def _packed(samples: ClassSamples, adopted: AdoptedFunction) -> LocatedSamples:
    """Return the samples as calls of the operator, whose arguments carry those of forward."""

    def packed(make: Make) -> Iterable[Any]:
        return [CallArguments(*adopted.completed(tuple(values), {})) for values in samples.values(make)]

    return LocatedSamples(packed, samples.location)


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


def keeps_state_in_init(function_class: type[torch.autograd.Function]) -> bool:
    """Return True if a class has an `__init__` of its own, and methods that take the instance as `self`.

    `apply` makes no instance, so a static or class method cannot depend on `__init__`, which torch's own
    `InplaceFunction` has, too.
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
            "has an `__init__`, whose state torch's `apply` has not taken since 1.3",
            "give what it is made with to `forward` as arguments",
        )
