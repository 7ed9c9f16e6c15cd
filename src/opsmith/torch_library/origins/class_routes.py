"""Routes of an adopted class: known calls directly run the code of the class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from opsmith import errors
from opsmith.core.call_arguments import requires_gradient, tensors_in
from opsmith.core.origins.function_class import AdoptedFunction, ClassFormula, class_of
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator, differentiate
from opsmith.torch_library.calls.computation import Route, UnknownCallError
from opsmith.torch_library.flattening import ArgumentFlattening
from opsmith.torch_library.origins.class_nodes import ClassNodes
from opsmith.torch_library.origins.forward import run_forward
from opsmith.torch_library.writes import (
    goes_on_from_a_write,
    raising_versions,
    refuse_leaves,
    refuse_unwritable,
    written_tensors,
)


class WritingOperator(RegisteredOperator, Protocol):
    """The registration of a class that may write into its arguments."""

    def writes_views_besides(self, values: list[Any]) -> bool:
        """Return True for a call that a single node cannot record."""
        ...

    def by_node(self, values: list[Any]) -> tuple[Any, ...]:
        """Write with an autograd node; return the new values, and all results."""
        ...


class ClassRoutes:
    """Routes of one adopted class.

    Args:
        registered: The operator.

    Attributes:
        as_applied: True if a call equals a call of `apply`: the same arguments and results in the same order.
    """

    def __init__(self, registered: WritingOperator) -> None:
        specification = registered.specification
        adopted = self._adopted = class_of(specification.origin)
        self._registered, self._specification = registered, specification
        rules = specification.gradients.rules.values()
        self._open = not specification.kernels and all(isinstance(each, ClassFormula) for each in rules)
        self.as_applied = self._open and _is_as_applied(adopted)
        self._nodes = ClassNodes(registered.form_registration, adopted) if self.as_applied else None
        arguments = specification.schema.arguments
        self._written_places = [at for at, each in enumerate(arguments) if each.alias]
        self._usual_facts = frozenset(self._written_places), frozenset(specification.schema.written), False
        # An argument that is not a tensor may be a flag that decides whether the class writes.
        self._flags = any(not each.kind.is_tensor or each.kind.optional for each in adopted.schema.arguments)

    def route(self, values: list[Any]) -> Route | None:
        """The route of calls with the signature of these argument values."""
        tensors = tensors_in(values)
        if not self._open or any(each.is_meta for each in tensors):
            return None
        written = [values[at] for at in self._written_places]
        # As in `apply`, written arguments are returned detached if grad mode is off.
        detached = not torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(written))
        route = Route(self._computed, accelerated=not detached)
        if self._nodes is None or any(each.is_inference() for each in tensors):
            return route
        recorded = torch.is_grad_enabled() and requires_gradient(values)
        if not (recorded if written else self._writes_nothing(tuple(values))):
            return route
        apply = self._nodes.of(dict(zip(self._adopted.schema.names, values, strict=True)))
        if written:
            return Route(partial(self._by_node, apply))
        return Route(self._computed, self._unless_it_writes(apply) if self._adopted.may_write else apply)

    def _by_node(self, apply: Callable[..., Any], values: Sequence[Any]) -> tuple[Any, ...]:
        """All results except written arguments, by the `apply` of a node if the call is a usual call.

        Raises:
            UnknownCallError: If the call must be validated in full.
        """
        if not self._writes_as_before(values):
            return self._computed(values)
        results = apply(*values)
        return results[len(self._written_places) :] if isinstance(results, tuple) else ()

    def _writes_as_before(self, values: Sequence[Any]) -> bool:
        """Return True for a call that writes like earlier calls, into tensors with their own memory."""
        facts, flags = self._adopted.facts, self._adopted.flags(values)
        alike = facts.written_under.get(flags), facts.dirty_under.get(flags), facts.keeps_under.get(flags)
        if alike != self._usual_facts:
            return False
        for at in self._written_places:
            tensor = values[at]
            if not (goes_on_from_a_write(tensor) and tensor.is_contiguous()):
                return False
        storages = [each.untyped_storage() for each in values if isinstance(each, Tensor)]
        return len({*map(id, storages)}) == len(storages)

    def _computed(self, values: Any) -> tuple[Any, ...]:
        """All results except written arguments, by the class on copies of written arguments, or in place.

        Raises:
            UnknownCallError: If the call must be validated in full.
        """
        values = list(values)
        recorded = torch.is_grad_enabled() and requires_gradient(values)
        try:
            if self._specification.schema.written:
                return self._written(values, recorded=recorded)
            if not recorded:
                with torch.no_grad():
                    return run_forward(self._adopted, values).results
            flattening = ArgumentFlattening.of(self._adopted.schema, values)
            primitive = OperatorPrimitive(self._registered, flattening)
            return differentiate(primitive, flattening.flatten(values))
        except (errors.ResultTypeError, errors.ResultCountError) as error:
            raise UnknownCallError from error  # validation in full learns the new structure of results

    def _written(self, values: list[Any], *, recorded: bool) -> tuple[Any, ...]:
        """Write by the forward; return all results except the arguments."""
        specification, adopted = self._specification, self._adopted
        if adopted.facts.chosen and adopted.writes_nothing(tuple(values), {}):
            raise UnknownCallError
        if recorded and self._registered.writes_views_besides(values):
            raise UnknownCallError
        try:
            refuse_unwritable(specification, values)
            if recorded:
                refuse_leaves(specification, values)
        except errors.MutationError as error:
            raise UnknownCallError from error  # refused in full, too, unless its flags mark nothing
        count = len(specification.schema.written)
        if recorded:
            return self._registered.by_node(values)[count:]
        with torch.no_grad(), raising_versions([each for _, each in written_tensors(specification, values)]):
            return run_forward(adopted, values, in_place=True).results[count:]

    def _writes_nothing(self, values: tuple[Any, ...]) -> bool:
        """Return True if runs with the flags of a call have written into no argument."""
        return self._adopted.facts.written_under.get(self._adopted.flags(values)) == frozenset()

    def _unless_it_writes(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """The `apply` of a node, for calls that write into no argument according to earlier runs."""
        facts = self._adopted.facts

        def checked(*values: Any) -> Any:
            if self._writes_nothing(values) if self._flags else not facts.written:
                return apply(*values)
            raise UnknownCallError

        return checked


def _is_as_applied(adopted: AdoptedFunction) -> bool:
    schema = adopted.schema
    plain = adopted.parameters.plain and not (adopted.defaults or adopted.random)
    lists = any(each.kind.is_tensor and each.kind.sequence for each in schema.arguments)
    # The accelerator returns a written argument as it is, not in a 1-tuple.
    plain = plain and not (schema.new_values and adopted.outputs == (0,))
    differentiable = schema.always_tensors and all(result.differentiable for result in schema.results)
    return (
        plain
        and adopted.outputs in (0, tuple(range(len(schema.results))))
        and schema.positional == len(schema.arguments)
        and differentiable
        and not (adopted.takes_self or lists)
        and adopted.backward is not None
    )
