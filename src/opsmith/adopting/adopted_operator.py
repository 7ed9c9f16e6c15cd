"""Handles of an adopted Function class: they call the class, and learn types and results from calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from opsmith import errors
from opsmith.adopting.class_specification import class_gradients, class_tangents, computed_by, packed_samples
from opsmith.adopting.learned_types import has_flag, learned_from
from opsmith.core.forked_locks import lock_of
from opsmith.core.functional_form import all_results, functional_name
from opsmith.core.operator import DerivedOperator, Operator, Registration
from opsmith.core.origins.function_class import AdoptedFunction, ClassFormula, ObservedReturn, class_of, note
from opsmith.core.specification import Specification
from opsmith.torch_library.in_place import register_operator

if TYPE_CHECKING:
    from opsmith.core.explanation import Explanation


_LEARNING = lock_of(sys.modules[__name__], "_LEARNING")

_MISFITS = (errors.ArgumentError, errors.ResultTypeError, errors.ResultCountError)


def _by_author(
    rules: Mapping[str, Any], by_class: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """The author's rules, without the rules of the class, for the current inputs or results."""
    return {
        name: rule
        for name, rule in rules.items()
        if name in names and not isinstance(rule, ClassFormula) and rule != by_class.get(name)
    }


class AdoptedOperator(Operator[..., Any]):
    """Handle of an adopted Function class, with the arguments and results of `apply`."""

    _form: Operator[..., Any] | None = None
    _kept: tuple[Registration, ...] = ()
    """Earlier registrations, with fewer types, which graphs may contain."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator; learn the types and results of a call if they differ from the known ones."""
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
        """Compute a call that must not write, as on a leaf, on copies, and note that its flags mark nothing.

        Return None if the flags mark an argument, or if earlier runs have shown the arguments that they mark.
        """
        adopted = self._class
        if adopted is None or not adopted.schema.new_values:
            return None
        try:
            flags = adopted.flags_of(*adopted.completed(args, kwargs))
            if not has_flag(flags) or not adopted.leaves_alone(flags, unknown=True):
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
        """Compute a call of the operator or its functional form, and learn its types and results."""
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
                # If nothing is new, another thread may have learnt it in the meantime.
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
            adopted = self._class
            if adopted is not None and adopted.provenance().unseen and not adopted.facts.seen:
                self._learn(args, kwargs, None)
                adopted.facts.seen = True
            return results

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        adopted = self._class
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

    @property
    def torch_operators(self) -> tuple[Any, ...]:
        """All `OpOverload`s of the operator, the earlier ones last; see `Operator.torch_operators`."""
        registrations = (self._registration, *reversed(self._kept))
        return tuple(overload for each in registrations for overload in each.overloads)

    def redeclare(
        self, specification: Specification, register: Callable[[Specification], Registration] | None = None
    ) -> None:
        """Replace the operator by a new one of the same name; see `Operator.redeclare`."""
        for _ in range(self._specification.generation - specification.generation):
            self._registration.remove()
            *kept, self._registration = self._kept
            self._kept = tuple(kept)
        super().redeclare(specification, register)
        chosen = self._class is not None and self._class.facts.chosen
        self._form = self.functional if chosen and specification.schema.written else None

    def _note_flags(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the flags of an in-place call that marked nothing: later such calls do not run in place."""
        with _LEARNING:  # another thread may be replacing the facts
            adopted = self._class
            if adopted is not None and self._specification.schema.written:
                flags = adopted.flags_of(*adopted.completed(args, kwargs))
                note(adopted.facts.dirty_under, flags, frozenset())
                self._form = self.functional  # read here, since compiled code takes no locks
                adopted.facts.chosen = True

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], observed: ObservedReturn | None) -> bool:
        """Learn the types and results of a call; return False if none of them is new."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo compiles each function after a graph break
            new: bool = torch.compiler.disable(self._learn)(args, kwargs, observed)
            return new
        with _LEARNING:
            adopted = self._class
            learned = None if adopted is None else learned_from(adopted, args, kwargs, observed)
            if adopted is None or learned is None:
                return False
            gradients, tangents, schema = (
                self._specification.gradients,
                self._specification.tangents,
                learned.schema,
            )
            rules = _by_author(gradients.rules, class_gradients(adopted), schema.tensor_names)
            moves = _by_author(
                tangents.rules, class_tangents(adopted), [each.name for each in schema.results]
            )
            specification = replace(
                self._specification,
                **computed_by(learned),
                gradients=replace(gradients, rules=MappingProxyType(class_gradients(learned) | rules)),
                tangents=replace(tangents, rules=MappingProxyType(class_tangents(learned) | moves)),
                samples=self._specification.samples
                if learned.provenance().samples is None
                else packed_samples(learned.provenance().samples, learned),
            )
            if self._registration.traced:  # an existing graph keeps the operator that it contains
                specification = replace(specification, generation=specification.generation + 1)
                grown = register_operator(specification)
                self._kept, self._registration = (*self._kept, self._registration), grown
                grown.owner = self
                torch.compiler.reset()
            self.redeclare(specification, register_operator)
            return True

    def _unlearn(self, before: Specification) -> None:
        """Forget the types and results that were learnt from a call that then failed."""
        if torch.compiler.is_dynamo_compiling():
            torch.compiler.disable(self._unlearn)(before)
            return
        with _LEARNING:
            if self._specification is not before:
                self.redeclare(before, register_operator)

    def explain(self, /, *args: Any, **kwargs: Any) -> Explanation:
        """Explain a call without running it."""
        if self._class is not None:
            args, kwargs = self._class.completed(args, kwargs)
        return super().explain(*args, **kwargs)

    @property
    def derived_kind(self) -> type[DerivedOperator[..., Any]]:
        """The class of the handle of its functional form."""
        return AdoptedFunctionalForm

    def _call_hint(self, *, out: bool = False) -> str:
        hint = '`adopt(..., signature="(x: Tensor, n: int) -> Tensor")`'
        call = super()._call_hint(out=out)
        return call if out else f"{call}; if it takes other types, declare them: {hint}"

    @property
    def function_class(self) -> type[torch.autograd.Function] | None:
        """The class; None after another operator was declared under this name."""
        return None if self._class is None else self._class.function_class

    @property
    def _class(self) -> AdoptedFunction | None:
        """The origin; None after another operator was declared under this name."""
        origin = self._specification.origin
        return origin if isinstance(origin, AdoptedFunction) else None


class AdoptedFunctionalForm(DerivedOperator[..., Any]):
    """Handle of the functional form of an adopted class: it returns the results of `apply`, run on copies."""

    _owner: AdoptedOperator

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute the functional form."""
        if torch.compiler.is_compiling():
            return self._computed(args, kwargs)
        return self._owner.learning(self._computed, args, kwargs)

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self is not self._owner.functional:  # a call has shown more types since
            return self._owner.functional(*args, **kwargs)
        adopted = class_of(self._owner.specification.origin)
        if not adopted.schema.new_values:  # a call has shown that it writes nothing
            return self._owner(*args, **kwargs)
        args, kwargs = adopted.completed(args, kwargs)
        results = super().__call__(*args, **kwargs)
        return adopted.structured(results if isinstance(results, tuple) else (results,))
