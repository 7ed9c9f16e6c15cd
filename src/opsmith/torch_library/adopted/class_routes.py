"""Routes of an adopted class: known calls run the code of the class itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opsmith import errors
from opsmith.core.adopted import AdoptedFunction, ClassFormula, class_of
from opsmith.core.call_arguments import requires_gradient, tensors_in
from opsmith.torch_library.adopted.class_nodes import ClassNodes
from opsmith.torch_library.adopted.forward import run_forward
from opsmith.torch_library.autograd.primitive import OperatorPrimitive, RegisteredOperator, differentiate
from opsmith.torch_library.calls.computation import Route, UnknownCallError
from opsmith.torch_library.flattening import ArgumentFlattening


class ClassRoutes:
    """Routes of one adopted class.

    Args:
        registered: The operator.
        compute: Computes all results of argument values but those that are written; None for a call that must
            be validated in full.

    Attributes:
        as_applied: True if a call is one of `apply`, with the same arguments and results in the same order.
    """

    def __init__(
        self, registered: RegisteredOperator, compute: Callable[[list[Any]], tuple[Any, ...] | None]
    ) -> None:
        specification = registered.specification
        adopted = self._adopted = class_of(specification.origin)
        self._compute = compute
        rules = specification.gradients.rules.values()
        self._open = not specification.kernels and all(isinstance(each, ClassFormula) for each in rules)
        self.as_applied = self._open and _is_as_applied(adopted)
        self._nodes = ClassNodes(registered, adopted) if self.as_applied else None
        # What is no tensor may be a flag that chooses whether the class writes.
        self._flags = any(not each.kind.is_tensor or each.kind.optional for each in adopted.schema.arguments)

    def route(self, values: list[Any]) -> Route | None:
        """The route of calls with the signature of these argument values."""
        tensors = tensors_in(values)
        if not self._open or any(each.is_meta for each in tensors):
            return None
        route = Route(self._computed)
        if self._nodes is None or any(each.is_inference() for each in tensors):
            return route
        if not self._writes_nothing(tuple(values)):
            return route
        given = dict(zip(self._adopted.schema.names, values, strict=True))
        apply = self._nodes.of(given)
        return Route(self._computed, self._unless_it_writes(apply) if self._adopted.may_write else apply)

    def _computed(self, values: Any) -> tuple[Any, ...]:
        """All results by the class on copies of what it writes, or in place."""
        try:
            results = self._compute(list(values))
        except (errors.ResultTypeError, errors.ResultCountError) as error:
            raise UnknownCallError from error  # the call in full learns another structure of results
        if results is None:
            raise UnknownCallError
        return results

    def _writes_nothing(self, values: tuple[Any, ...]) -> bool:
        """Return True if the runs under the flags of a call have written into nothing."""
        return self._adopted.facts.written_under.get(self._adopted.flags(values)) == frozenset()

    def _unless_it_writes(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """The `apply` of a node, for the calls that write into nothing as far as earlier runs tell."""
        facts = self._adopted.facts

        def checked(*values: Any) -> Any:
            if self._writes_nothing(values) if self._flags else not facts.written:
                return apply(*values)
            raise UnknownCallError

        return checked


def _is_as_applied(adopted: AdoptedFunction) -> bool:
    schema = adopted.schema
    plain = adopted.parameters.plain and not (adopted.defaults or schema.new_values or adopted.random)
    lists = any(each.kind.is_tensor and each.kind.sequence for each in schema.arguments)
    differentiable = schema.always_tensors and all(result.differentiable for result in schema.results)
    return (
        plain
        and adopted.outputs in (0, tuple(range(len(schema.results))))
        and schema.positional == len(schema.arguments)
        and differentiable
        and not (adopted.takes_self or lists)
        and adopted.backward is not None
    )


def computed_by_class(
    registered: RegisteredOperator, adopted: AdoptedFunction, values: list[Any]
) -> tuple[Any, ...]:
    """All results of a call of plain tensors, by the forward of a class on copies of what it writes."""
    if not torch.is_grad_enabled() or not requires_gradient(values):
        with torch.no_grad():
            return run_forward(adopted, values).results
    flattening = ArgumentFlattening.of(adopted.schema, values)
    primitive = OperatorPrimitive(registered, flattening)
    return differentiate(primitive, flattening.flatten(values))
